"""A real pipeline of two stages and a gateway, shared by the tests that leave it as they found it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import zmq

from fleet.codec import Decoder, encode
from fleet.sockets import curve_client_socket, pick_address
from pipeline.local import LocalPipeline
from pipeline.messages import Ping, Pong

CHUNK_TOKENS = 64


@pytest.fixture(scope="session")
def pipeline(smollm2_two_stages: Path) -> Iterator[LocalPipeline]:
    """Exact, so that a greedy answer is the same however it was grouped with others."""
    with LocalPipeline(
        smollm2_two_stages,
        gateway=True,
        exact=True,
        kv_precision="f32",
        threads=1,
        max_sequences=4,
        prefill_chunk_tokens=CHUNK_TOKENS,
    ) as started:
        yield started


@pytest.fixture
def http(pipeline: LocalPipeline) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{pipeline.http_port}", timeout=60) as client:
        yield client


@pytest.fixture
def api(pipeline: LocalPipeline) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{pipeline.http_port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(api: openai.OpenAI) -> str:
    return api.models.list().data[0].id


@pytest.fixture
def wait_for_sequences(pipeline: LocalPipeline) -> Callable[[list[int]], None]:
    """Waits until each stage holds the KV cache of so many sequences.

    The gateway counts a request as ended once it has told the first stage to close it; the word travels on from stage
    to stage behind the steps before it, so a later stage may hold the sequence a moment longer.
    """

    def ask() -> list[int]:
        counts: list[int] = []
        with zmq.Context() as context:
            for stage in pipeline.stage_addresses:
                with curve_client_socket(context, zmq.DEALER, pipeline.identity, stage.public_key) as socket:
                    socket.set(zmq.SNDTIMEO, 5000)
                    socket.set(zmq.RCVTIMEO, 5000)
                    socket.connect(pick_address(stage))
                    socket.send(encode(Ping(1)))
                    counts.append(Decoder[Pong](Pong).decode(socket.recv()).sequences)
        return counts

    def wait(wanted: list[int]) -> None:
        deadline = time.monotonic() + 10
        while (counts := ask()) != wanted:
            assert time.monotonic() < deadline, f"the stages hold {counts} sequences, not {wanted}"
            time.sleep(0.02)

    return wait


@pytest.fixture
def wait_for_status(http: httpx.Client) -> Callable[..., None]:
    def wait(timeout_s: float = 10.0, **wanted: object) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            status = http.get("/v1/status").json()
            if all(status[name] == value for name, value in wanted.items()):
                return
            assert time.monotonic() < deadline, f"{status} is not {wanted}"
            time.sleep(0.02)

    return wait
