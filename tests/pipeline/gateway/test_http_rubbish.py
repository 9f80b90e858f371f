"""Mutated requests over raw connections to the HTTP API of a real gateway."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

import httpx
import psutil

from pipeline.local import LocalPipeline

MutatedMessages = Callable[[Sequence[bytes], int], Sequence[list[bytes]]]
MUTATED_HEADS = 100
REPLY_TIMEOUT_S = 60.0
NO_REPLY_TIMEOUT_S = 0.1
"""There is no answer to a request that is not whole."""
# Refused for two reasons even where they are whole, so that nothing is computed.
BODIES = (
    b'{"messages":[{"role":"robot","content":"Hi"}],"max_tokens":0,"stream":true,"stop":["a"],"seed":7}',
    b'{"messages":[{"role":"robot","content":[{"type":"text","text":"\\u00e9"}]}],"max_tokens":0,"top_p":0.5}',
    b'{"messages":[{"role":"robot","content":"Hi"}],"max_tokens":0,"logit_bias":{"5":1.0},"logprobs":true}',
)


def request(body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connect(port: int, reply_timeout_s: float = REPLY_TIMEOUT_S) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(reply_timeout_s)
    return connection


def status_of_answer(connection: socket.socket) -> int | None:
    """The status of an answer, which is read to its end; None where none came that has a length."""
    answer = b""
    try:
        while b"\r\n\r\n" not in answer and (part := connection.recv(65536)):
            answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if not lengths:
            return None
        while len(body) < int(lengths[0].partition(b":")[2]) and (part := connection.recv(65536)):
            body += part
    except OSError:
        return None
    return int(head.split(b" ")[1])


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head(pipeline: LocalPipeline) -> None:
    """A delayed acknowledgement takes 40 ms on Linux, more elsewhere, and delays every answer but the first few."""
    assert pipeline.http_port is not None
    durations_s = []
    with connect(pipeline.http_port) as connection:
        for _ in range(20):
            began_s = time.perf_counter()
            connection.sendall(request(BODIES[0]))
            assert status_of_answer(connection) == 400
            durations_s.append(time.perf_counter() - began_s)
    assert min(durations_s[10:]) < 0.03


def test_ten_thousand_mutated_requests_change_nothing(
    pipeline: LocalPipeline, http: httpx.Client, model: str, mutated_messages: MutatedMessages
) -> None:
    assert pipeline.gateway_process is not None
    assert pipeline.http_port is not None
    process = psutil.Process(pipeline.gateway_process.pid)
    resident_before = process.memory_info().rss
    statuses: list[int | None] = []
    connection = connect(pipeline.http_port)
    for body, *_ in mutated_messages(BODIES, 9):
        connection.sendall(request(body))
        statuses.append(status_of_answer(connection))
        if statuses[-1] is None:
            connection.close()
            connection = connect(pipeline.http_port)
    connection.close()
    for head, *_ in mutated_messages([request(BODIES[0])], 10)[:MUTATED_HEADS]:
        with connect(pipeline.http_port, NO_REPLY_TIMEOUT_S) as connection:
            connection.sendall(head)
            statuses.append(status_of_answer(connection))
    assert {status for status in statuses if status is not None and status >= 500} == set()
    assert statuses.count(400) > 9_000
    assert process.memory_info().rss - resident_before < 64 << 20
    chat = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
