"""The gateway process and its CURVE clients: cancel, disappearance, strangers, rubbish, and the loss of a stage."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import zmq

from fleet.codec import PROTOCOL_VERSION, Decoder, encode
from fleet.errors import ModelError, UnreachableError
from fleet.gateway_client import GatewayClient
from fleet.gateway_messages import (
    Accepted,
    AskStatus,
    Cancel,
    ChatMessage,
    Delta,
    Failed,
    Finished,
    GatewayMessage,
    Generate,
    PrefillProgress,
    Sampling,
    ServiceStatus,
)
from fleet.identity import Identity
from fleet.sockets import curve_client_socket, pick_address
from pipeline.local import LocalPipeline

MutatedMessages = Callable[[Sequence[bytes], int], Sequence[list[bytes]]]
ENDLESS = Sampling(ignore_stop_ids=True)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    def selector_loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(selectors.DefaultSelector())

    with asyncio.Runner(loop_factory=selector_loop) as runner:
        runner.run(asyncio.wait_for(coroutine, 120))


def client_of(pipeline: LocalPipeline) -> GatewayClient:
    return GatewayClient(pipeline.identity, pipeline.gateway_address)


async def collect(messages: AsyncIterator[GatewayMessage]) -> list[GatewayMessage]:
    return [message async for message in messages]


def text_of(messages: list[GatewayMessage]) -> str:
    return "".join(message.text for message in messages if isinstance(message, Delta))


def tokens_of(messages: list[GatewayMessage]) -> list[int]:
    return [token for message in messages if isinstance(message, Delta) for token in message.tokens]


def test_the_course_of_a_request(pipeline: LocalPipeline) -> None:
    async def talk() -> None:
        async with client_of(pipeline) as client:
            prompt = "The quick brown fox. " * 60
            messages = await collect(client.generate(Generate(1, prompt=prompt, max_tokens=5)))
            accepted, *progress = messages[: -(5 + 1)]
            assert isinstance(accepted, Accepted)
            # The prompt is longer than four chunks of 64 tokens.
            assert accepted.prompt_tokens > 256
            done = [message.done_tokens for message in progress if isinstance(message, PrefillProgress)]
            assert done == [64 * (index + 1) for index in range(len(done))]
            assert len(done) == len(progress) >= 4
            assert len(tokens_of(messages)) == 5
            finished = messages[-1]
            assert isinstance(finished, Finished)
            assert (finished.reason, finished.completion_tokens) == ("length", 5)
            assert finished.prompt_tokens == accepted.prompt_tokens
            assert finished.time_to_first_token_s > 0
            assert finished.decode_s > 0

    run(talk())


def test_chat_text_and_tokens_are_alternatives(pipeline: LocalPipeline) -> None:
    async def talk() -> None:
        async with client_of(pipeline) as client:
            chat = (ChatMessage("user", "What is the capital of France?"),)
            answer = await collect(client.generate(Generate(1, messages=chat, max_tokens=16)))
            assert "Paris" in text_of(answer)
            for number, wrong in enumerate(
                (
                    Generate(0),
                    Generate(0, messages=chat, prompt="x"),
                    Generate(0, tokens=()),
                    Generate(0, prompt=""),
                    Generate(0, tokens=(49152,)),
                    Generate(0, prompt="x", model="another"),
                )
            ):
                request = Generate(10 + number, wrong.messages, wrong.prompt, wrong.tokens, model=wrong.model)
                messages = await collect(client.generate(request))
                assert isinstance(messages[-1], Failed)
                assert messages[-1].code in ("bad_request", "unknown_model")

    run(talk())


def test_cancel_ends_a_request_and_frees_it(
    pipeline: LocalPipeline, wait_for_sequences: Callable[[list[int]], None]
) -> None:
    async def talk() -> None:
        async with client_of(pipeline) as client:
            last: GatewayMessage | None = None
            async for message in client.generate(Generate(1, prompt="Once upon a time", sampling=ENDLESS)):
                if isinstance(message, Delta):
                    assert (await client.status()).running == 1
                    await client.cancel(1)
                last = message
            assert isinstance(last, Finished)
            assert last.reason == "cancelled"
            assert last.completion_tokens > 0
            assert (await client.status()).running == 0

    run(talk())
    wait_for_sequences([0, 0])


def test_cancel_while_the_prompt_is_read(pipeline: LocalPipeline) -> None:
    async def talk() -> None:
        async with client_of(pipeline) as client:
            for moment in (Accepted, PrefillProgress):
                number = client.next_number()
                last: GatewayMessage | None = None
                async for message in client.generate(Generate(number, prompt="fox " * 2000)):
                    if isinstance(message, moment):
                        await client.cancel(number)
                    last = message
                assert isinstance(last, Finished)
                assert (last.reason, last.completion_tokens) == ("cancelled", 0)
            number = client.next_number()
            messages = client.generate(Generate(number, prompt="fox " * 7000))
            first = asyncio.create_task(collect(messages))
            await asyncio.sleep(0)
            await client.cancel(number)
            assert isinstance((await first)[-1], Finished)
            assert (await client.status()).running == 0

    run(talk())


def test_several_requests_over_one_connection(pipeline: LocalPipeline) -> None:
    async def talk() -> None:
        async with client_of(pipeline) as client:
            prompts = [f"Number {index} is" for index in range(6)]
            requests = [Generate(index, prompt=prompt, max_tokens=5) for index, prompt in enumerate(prompts)]
            together = await asyncio.gather(*(collect(client.generate(request)) for request in requests))
            alone = [await collect(client.generate(request)) for request in requests]
            assert [tokens_of(messages) for messages in together] == [tokens_of(messages) for messages in alone]

    run(talk())


def test_a_long_prompt_does_not_silence_a_running_answer(pipeline: LocalPipeline) -> None:
    """While a stranger's prompt of 500 tokens is read, a reader's tokens go on coming."""

    async def talk() -> None:
        async with client_of(pipeline) as client:
            came_s: list[float] = []
            reading = asyncio.Event()

            async def read() -> None:
                async with contextlib.aclosing(
                    client.generate(Generate(1, prompt="Once upon a time", sampling=ENDLESS))
                ) as messages:
                    async for message in messages:
                        if isinstance(message, Delta):
                            came_s.append(time.monotonic())
                            if len(came_s) == 20:
                                reading.set()

            reader = asyncio.create_task(read())
            await reading.wait()
            begin_s = time.monotonic()
            prefilled = 0
            async with contextlib.aclosing(client.generate(Generate(2, prompt="fox " * 500))) as messages:
                async for message in messages:
                    if isinstance(message, PrefillProgress):
                        prefilled += 1
                    if isinstance(message, Delta):
                        break
            end_s = time.monotonic()
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            between = sum(begin_s < moment < end_s for moment in came_s)
            # Chunks and decode steps take turns; how large the chunks are depends on what was measured.
            assert between >= max(1, prefilled // 3), (between, prefilled)

    run(talk())


def raw_client(context: zmq.Context[zmq.Socket[bytes]], pipeline: LocalPipeline) -> zmq.Socket[bytes]:
    gateway = pipeline.gateway_address
    socket = curve_client_socket(context, zmq.DEALER, pipeline.identity, gateway.public_key, high_water_mark=20_000)
    socket.set(zmq.SNDTIMEO, 5000)
    socket.set(zmq.RCVTIMEO, 5000)
    socket.connect(pick_address(gateway))
    return socket


def test_a_client_that_vanishes_frees_its_sequences(
    pipeline: LocalPipeline, wait_for_status: Callable[..., None], wait_for_sequences: Callable[[list[int]], None]
) -> None:
    with zmq.Context() as context:
        socket = raw_client(context, pipeline)
        socket.send(encode(AskStatus(1, PROTOCOL_VERSION)))
        socket.send(encode(Generate(2, prompt="Once upon a time", sampling=ENDLESS)))
        decoder: Decoder[GatewayMessage] = Decoder(GatewayMessage)
        while not isinstance(decoder.decode(socket.recv()), Delta):
            pass
        wait_for_status(running=1)
        socket.close(0)
        wait_for_status(running=0)
    wait_for_sequences([0, 0])


def test_a_connection_begins_with_the_protocol_version(pipeline: LocalPipeline) -> None:
    decoder: Decoder[GatewayMessage] = Decoder(GatewayMessage)
    with zmq.Context() as context, raw_client(context, pipeline) as socket:
        socket.send(encode(Generate(1, prompt="x")))
        refused = decoder.decode(socket.recv())
        assert isinstance(refused, Failed)
        assert "begins with a status request" in refused.message
        socket.send(encode(AskStatus(2, 77)))
        status = decoder.decode(socket.recv())
        assert isinstance(status, ServiceStatus)
        assert status.protocol == PROTOCOL_VERSION
        socket.send(encode(Generate(3, prompt="x")))
        assert isinstance(decoder.decode(socket.recv()), Failed)


def test_a_key_that_is_not_allowed_gets_nothing(pipeline: LocalPipeline, http: httpx.Client) -> None:
    async def talk() -> None:
        with pytest.raises(UnreachableError, match="does not know this client's key"):
            async with GatewayClient(Identity.generate(), pipeline.gateway_address):
                pass

    run(talk())
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0  # what was never delivered would hold up the end of the context
        plain.connect(pick_address(pipeline.gateway_address))
        plain.send(encode(AskStatus(1, PROTOCOL_VERSION)))
        assert plain.poll(700) == 0
    assert http.get("/health").status_code == 200


def test_ten_thousand_mutated_messages_change_nothing(
    pipeline: LocalPipeline,
    http: httpx.Client,
    model: str,
    wait_for_status: Callable[..., None],
    mutated_messages: MutatedMessages,
) -> None:
    assert pipeline.gateway_process is not None
    process = psutil.Process(pipeline.gateway_process.pid)
    # Requests that decode after all are cut short by their own limits.
    seeds = [
        encode(AskStatus(1, PROTOCOL_VERSION)),
        encode(Cancel(3)),
        encode(Generate(3, prompt="x", max_tokens=1, stop=("a", "b"), sampling=Sampling(logit_bias={5: 1.0}))),
        encode(Generate(4, messages=(ChatMessage("user", "hello"),), max_tokens=1)),
        encode(Generate(5, tokens=(1, 2, 3), max_tokens=1)),
    ]
    with zmq.Context() as context, raw_client(context, pipeline) as socket:
        socket.send(encode(AskStatus(1, PROTOCOL_VERSION)))
        socket.recv()
        before = process.memory_info().rss
        for frames in mutated_messages(seeds, 5):
            socket.send_multipart(frames)
        socket.send(encode(AskStatus(2**40, PROTOCOL_VERSION)))
        decoder: Decoder[GatewayMessage] = Decoder(GatewayMessage)
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline
            message = decoder.decode(socket.recv())
            if isinstance(message, ServiceStatus) and message.number == 2**40:
                break
    assert process.memory_info().rss - before < 64 << 20
    wait_for_status(timeout_s=30, running=0, waiting=0)
    chat = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200


def test_a_stage_that_is_killed_is_named_and_the_next_request_works(smollm2_two_stages: Path) -> None:
    story: Any = [{"role": "user", "content": "Tell me a long story."}]
    with LocalPipeline(smollm2_two_stages, gateway=True, threads=1) as pipeline:
        gateway = pipeline.gateway_process
        assert gateway is not None
        url = f"http://127.0.0.1:{pipeline.http_port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as api:
            name = api.models.list().data[0].id
            request: dict[str, Any] = {"model": name, "messages": story, "temperature": 0}
            for number in (1, 0):
                with api.chat.completions.create(
                    stream=True, max_tokens=2000, extra_body={"ignore_eos": True}, **request
                ) as stream:
                    for _ in range(5):
                        next(stream)
                    pipeline.stage_processes[number].kill()
                    with pytest.raises(openai.APIError, match=f"stage-{number}") as caught:
                        list(stream)
                assert caught.value.code == "stage_lost"
                status = httpx.get(f"{url}/v1/status").json()
                assert (status["state"], status["running"]) == ("degraded", 0)
                assert f"stage-{number}" in status["detail"]
                assert httpx.get(f"{url}/health").status_code == 503
                degraded = gateway.statuses.get(timeout=60)
                assert degraded is not None
                assert (degraded.state, degraded.port) == ("degraded", pipeline.gateway_address.port)
                pipeline.restart_stage(number)
                # It waits until the stages are attached again.
                answer = api.chat.completions.create(max_tokens=4, **request)
                assert answer.usage is not None
                assert answer.usage.completion_tokens == 4
                while (status_line := gateway.statuses.get(timeout=60)) is not None and status_line.state != "ready":
                    pass
                assert status_line is not None


def test_a_folder_that_cannot_be_served_fails_in_words(smollm2_two_stages: Path, tmp_path: Path) -> None:
    from fleet.process import GatewayConfig
    from pipeline.local import ChildProcess

    identity = Identity.generate()
    process = ChildProcess(
        "pipeline.gateway",
        "The gateway",
        GatewayConfig(
            node_name="here",
            shard_folder=str(tmp_path),
            stages=(),
            kv_precision="f16",
            secret_key=identity.secret_key,
            public_key=identity.public_key,
            allowed_keys=(),
        ),
    )
    try:
        with pytest.raises(ModelError, match=r"is not a shard folder"):
            process.wait_until_ready(time.monotonic() + 60)
    finally:
        process.stop(time.monotonic() + 30)
