"""GatewayClient against a ROUTER that answers as the test says: real sockets, real keys."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import psutil
import pytest
import zmq

from fleet.codec import MAX_CONTROL_BYTES, PROTOCOL_VERSION, Decoder, encode
from fleet.errors import MessageError, UnreachableError
from fleet.gateway_client import GatewayClient
from fleet.gateway_messages import (
    Accepted,
    AskStatus,
    Cancel,
    ClientMessage,
    Delta,
    Failed,
    Finished,
    GatewayMessage,
    Generate,
    ServiceStatus,
)
from fleet.identity import Identity
from fleet.node import PeerAddress
from fleet.sockets import AllowList, bind_tcp, curve_server_socket, start_zap

Answer = Callable[[Any], Sequence[GatewayMessage | list[bytes]]]
"""Messages, or frames as they are."""
MutatedMessages = Callable[[Sequence[bytes], int], Sequence[list[bytes]]]


def status(number: int, protocol: int = PROTOCOL_VERSION) -> ServiceStatus:
    return ServiceStatus(number, protocol, "model", "ready", "", 128, True, "f16", 0, 0, (), 0)


def finished(number: int) -> Finished:
    return Finished(number, "stop", 1, 1, 0.1, 0.1)


class PlayedGateway:
    """A ROUTER in a thread that answers each message with what ``answer`` returns, and keeps what it heard."""

    def __init__(self, answer: Answer, client: Identity, identity: Identity | None = None, port: int = 0) -> None:
        self.identity = identity or Identity.generate()
        self.heard: list[Any] = []
        self.news = threading.Condition()
        self._answer = answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = start_zap(self._context, AllowList([client.public_key]))
        self._socket = curve_server_socket(self._context, zmq.ROUTER, self.identity)
        self.port = bind_tcp(self._socket, "127.0.0.1", port)
        self.address = PeerAddress("gandalf", ("127.0.0.1",), self.port, self.identity.public_key)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        decoder: Decoder[ClientMessage] = Decoder(ClientMessage)
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            client, frame = self._socket.recv_multipart()
            message = decoder.decode(frame)
            for reply in self._answer(message):
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.send_multipart([client, *(reply if isinstance(reply, list) else [encode(reply)])])
            with self.news:
                self.heard.append(message)
                self.news.notify_all()

    def wait_for(self, wanted: Callable[[Any], bool], timeout_s: float = 5.0) -> None:
        with self.news:
            assert self.news.wait_for(lambda: any(wanted(message) for message in self.heard), timeout_s), self.heard

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(0)
        self._zap.close()
        self._context.term()


@pytest.fixture
def client_identity() -> Identity:
    return Identity.generate()


@contextlib.contextmanager
def playing(answer: Answer, client: Identity, **options: Any) -> Iterator[PlayedGateway]:
    gateway = PlayedGateway(answer, client, **options)
    try:
        yield gateway
    finally:
        gateway.close()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    def selector_loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(selectors.SelectSelector())

    with asyncio.Runner(loop_factory=selector_loop) as runner:
        runner.run(asyncio.wait_for(coroutine, 30))


def polite(message: Any) -> list[GatewayMessage]:
    match message:
        case AskStatus():
            return [status(message.number)]
        case Generate():
            number = message.number
            return [Accepted(number, 3), Delta(number, f"{number}!", (7,)), finished(number)]
    return []


def silent_to_requests(message: Any) -> list[GatewayMessage]:
    return [status(message.number)] if isinstance(message, AskStatus) else []


def test_the_first_message_asks_for_the_protocol_and_several_requests_share_the_connection(
    client_identity: Identity,
) -> None:
    async def text_of(client: GatewayClient, number: int) -> str:
        text = ""
        async for message in client.generate(Generate(number, prompt="x")):
            if isinstance(message, Delta):
                text += message.text
        return text

    async def talk(gateway: PlayedGateway) -> None:
        async with GatewayClient(client_identity, gateway.address) as client:
            numbers = [client.next_number() for _ in range(40)]
            texts = await asyncio.gather(*(text_of(client, number) for number in numbers))
            assert texts == [f"{number}!" for number in numbers]
            assert (await client.status()).model == "model"

    with playing(polite, client_identity) as gateway:
        run(talk(gateway))
        assert isinstance(gateway.heard[0], AskStatus)
        assert gateway.heard[0].protocol == PROTOCOL_VERSION


def test_another_protocol_version_is_named(client_identity: Identity) -> None:
    async def talk(gateway: PlayedGateway) -> None:
        with pytest.raises(MessageError, match="version 9 of the protocol"):
            async with GatewayClient(client_identity, gateway.address):
                pass

    with playing(lambda message: [status(message.number, 9)], client_identity) as gateway:
        run(talk(gateway))


def test_a_key_that_the_gateway_does_not_know_is_refused_in_words(client_identity: Identity) -> None:
    async def talk(gateway: PlayedGateway) -> None:
        with pytest.raises(UnreachableError, match="gandalf does not know this client's key"):
            async with GatewayClient(Identity.generate(), gateway.address):
                pass

    with playing(polite, client_identity) as gateway:
        run(talk(gateway))
        assert gateway.heard == []


def test_a_gateway_with_another_key_hears_nothing(client_identity: Identity) -> None:
    async def talk(gateway: PlayedGateway) -> None:
        address = PeerAddress("gandalf", ("127.0.0.1",), gateway.port, Identity.generate().public_key)
        with pytest.raises(UnreachableError, match="gandalf"):
            async with GatewayClient(client_identity, address, connect_timeout_s=2):
                pass

    with playing(polite, client_identity) as gateway:
        run(talk(gateway))
        assert gateway.heard == []


def test_leaving_an_iteration_cancels_the_request(client_identity: Identity) -> None:
    def endless(message: Any) -> list[GatewayMessage]:
        if isinstance(message, Generate):
            return [Accepted(message.number, 1), Delta(message.number, "a", (1,))]
        return silent_to_requests(message)

    async def talk(gateway: PlayedGateway) -> None:
        async with GatewayClient(client_identity, gateway.address) as client:
            async with contextlib.aclosing(client.generate(Generate(5, prompt="x"))) as messages:
                async for message in messages:
                    if isinstance(message, Delta):
                        break
            await asyncio.to_thread(gateway.wait_for, lambda heard: heard == Cancel(5))

    with playing(endless, client_identity) as gateway:
        run(talk(gateway))


def test_closing_the_client_cancels_what_runs(client_identity: Identity) -> None:
    async def talk(gateway: PlayedGateway) -> None:
        client = GatewayClient(client_identity, gateway.address)
        messages = client.generate(Generate(5, prompt="x"))
        waiting = asyncio.create_task(anext(messages))
        await asyncio.to_thread(gateway.wait_for, lambda heard: isinstance(heard, Generate))
        await client.close()
        with pytest.raises(UnreachableError, match="closed"):
            await waiting
        await asyncio.to_thread(gateway.wait_for, lambda heard: heard == Cancel(5))
        with pytest.raises(UnreachableError, match="closed"):
            await client.status()

    with playing(silent_to_requests, client_identity) as gateway:
        run(talk(gateway))


def test_a_restarted_gateway_fails_what_ran_and_serves_what_comes(client_identity: Identity) -> None:
    first = PlayedGateway(silent_to_requests, client_identity)

    async def talk() -> None:
        async with GatewayClient(client_identity, first.address) as client:
            messages = client.generate(Generate(1, prompt="x"))
            waiting = asyncio.create_task(anext(messages))
            await asyncio.to_thread(first.wait_for, lambda heard: isinstance(heard, Generate))
            await asyncio.to_thread(first.close)
            with pytest.raises(UnreachableError, match="gandalf went away"):
                await waiting
            with pytest.raises(UnreachableError, match="gandalf does not answer on port"):
                await client.status()
            second = await asyncio.to_thread(PlayedGateway, polite, client_identity, first.identity, first.port)
            try:
                received = [message async for message in client.generate(Generate(2, prompt="x"))]
                assert received[-1] == finished(2)
            finally:
                await asyncio.to_thread(second.close)

    run(talk())


def test_signs_of_life_are_sent_while_requests_run_and_a_silent_gateway_is_given_up(client_identity: Identity) -> None:
    answered = 0

    def answers_three_times(message: Any) -> list[GatewayMessage]:
        nonlocal answered
        if isinstance(message, AskStatus) and answered < 3:
            answered += 1
            return [status(message.number)]
        return []

    async def talk(gateway: PlayedGateway) -> None:
        async with GatewayClient(client_identity, gateway.address, sign_of_life_s=0.1, silence_s=0.5) as client:
            with pytest.raises(UnreachableError, match="has not answered"):
                async for _ in client.generate(Generate(1, prompt="x")):
                    pass

    with playing(answers_three_times, client_identity) as gateway:
        run(talk(gateway))
        assert sum(isinstance(message, AskStatus) for message in gateway.heard) >= 5


def test_what_a_gateway_could_not_read_is_not_sent(client_identity: Identity) -> None:
    async def talk(gateway: PlayedGateway) -> None:
        async with GatewayClient(client_identity, gateway.address) as client:
            with pytest.raises(MessageError, match="too large"):
                await anext(client.generate(Generate(1, prompt="日" * (MAX_CONTROL_BYTES // 3 + 1))))
            with pytest.raises(MessageError, match="max_tokens"):
                await anext(client.generate(Generate(2, prompt="x", max_tokens=0)))
            assert (await client.status()).state == "ready"

    with playing(polite, client_identity) as gateway:
        run(talk(gateway))


def test_ten_thousand_mutated_answers_do_not_harm_the_client(
    client_identity: Identity, mutated_messages: MutatedMessages
) -> None:
    good = [
        encode(status(999)),
        encode(Accepted(999, 3)),
        encode(Delta(999, "x", (7,))),
        encode(Failed(999, "internal", "no")),
        encode(finished(999)),
    ]

    def flooding(message: Any) -> Sequence[GatewayMessage | list[bytes]]:
        return [*(mutated_messages(good, 7) if isinstance(message, Generate) else ()), *polite(message)]

    async def talk(gateway: PlayedGateway) -> None:
        async with GatewayClient(client_identity, gateway.address) as client:
            resident_before = psutil.Process().memory_info().rss
            messages = [message async for message in client.generate(Generate(client.next_number(), prompt="x"))]
            assert messages[-1] == finished(1)
            assert (await client.status()).model == "model"
            assert psutil.Process().memory_info().rss - resident_before < 50 << 20

    with playing(flooding, client_identity) as gateway:
        run(talk(gateway))
