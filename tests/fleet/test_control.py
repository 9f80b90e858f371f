"""The control connection over real sockets, and what happens to it under bad input."""

from __future__ import annotations

import asyncio
import contextlib
import socket as tcp
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.codec import Decoder, encode
from fleet.control import ControlClient, ControlServer, read_request
from fleet.control_messages import (
    ControlReply,
    ControlRequest,
    Done,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Leave,
    NodeStatus,
    Refused,
    Undeploy,
    Welcome,
)
from fleet.errors import DeployError, EnrolmentError, RefusedError, UnreachableError
from fleet.identity import Identity
from fleet.node import Inventory, LiveLoad, PeerAddress
from fleet.sockets import curve_client_socket
from fleet.zap import AllowList, start_zap

AGENT = Identity.generate()
CONTROLLER = Identity.generate()
STRANGER = Identity.generate()
MutatedMessages = Callable[[Sequence[bytes], int], Sequence[list[bytes]]]
INVENTORY = Inventory("a CPU", 2, "Linux", "2026.4", "0.1", 16 << 30, 12 << 30, 100 << 30, ())


async def answer(request: ControlRequest, controller_key: str) -> ControlReply:
    match request:
        case Hello():
            return Welcome(
                number=0, protocol=1, name="PC-1", inventory=INVENTORY, transfer_port=1, token_id=request.nonce
            )
        case Heartbeat():
            return Done(number=request.number)
        case Undeploy():
            raise DeployError("PC-1: the stage cannot be stopped.")
        case Leave():
            raise ZeroDivisionError
        case _:
            await asyncio.sleep(3600)
            return Done(number=request.number)


async def router_send(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """A ROUTER does not wait for a peer that is slow to read."""
    while True:
        try:
            await socket.send_multipart(frames)
            return
        except zmq.Again:
            await asyncio.sleep(0.001)


class Agent:
    """A control server on loopback with its own context."""

    def __init__(self, handler: Callable[[ControlRequest, str], Awaitable[ControlReply]] = answer) -> None:
        self.context = zmq.asyncio.Context()
        self.allow_list = AllowList([CONTROLLER.public_key])
        self.zap = start_zap(self.context, self.allow_list)
        self.server = ControlServer(self.context, AGENT, self.allow_list, handler)
        self.port = self.server.start("127.0.0.1")
        self.peer = PeerAddress("PC-1", ("127.0.0.1",), self.port, AGENT.public_key)

    def client(self, identity: Identity = CONTROLLER, peer: PeerAddress | None = None) -> ControlClient:
        return ControlClient(self.context, identity, peer or self.peer, controller_name="desk")

    async def close(self) -> None:
        await self.server.close()
        self.zap.close()
        self.context.destroy(0)


@contextlib.asynccontextmanager
async def running_agent(**options: Any) -> AsyncIterator[Agent]:
    agent = Agent(**options)
    try:
        async with asyncio.timeout(60):
            yield agent
    finally:
        await agent.close()


def test_greeting_request_and_refusals() -> None:
    async def main() -> None:
        async with running_agent() as agent:
            client = agent.client()
            welcome = await client.connect()
            assert welcome.name == "PC-1"
            assert welcome.token_id == client.nonce
            assert isinstance(await client.request(Heartbeat(number=7)), Done)
            with pytest.raises(RefusedError, match="PC-1: PC-1: the stage cannot be stopped"):
                await client.request(Undeploy(number=0, deployment="0" * 12))
            with pytest.raises(RefusedError, match="ZeroDivisionError"):
                await client.request(Leave(number=0))
            replies = await asyncio.gather(*(client.request(Heartbeat(number=0)) for _ in range(20)))
            assert len({reply.number for reply in replies}) == 20
            await client.close()
            await client.close()
            with pytest.raises(UnreachableError, match="no connection"):
                await client.request(Heartbeat(number=0))

    asyncio.run(main())


def test_a_stranger_is_told_and_enters_after_approval() -> None:
    async def main() -> None:
        async with running_agent() as agent:
            with pytest.raises(EnrolmentError, match="does not trust this controller"):
                await agent.client(STRANGER).connect()
            agent.allow_list.add(STRANGER.public_key)
            client = agent.client(STRANGER)
            await client.connect()
            # Taken off the list again, the session that is there is no longer served.
            agent.allow_list.discard(STRANGER.public_key)
            with pytest.raises(UnreachableError, match="did not answer"):
                await client.request(Heartbeat(number=0), timeout_s=0.3)
            await client.close()

    asyncio.run(main())


def test_an_address_with_somebody_else_behind_it_is_passed_over() -> None:
    async def main() -> None:
        async with running_agent() as agent:
            impostor = ControlServer(agent.context, STRANGER, agent.allow_list, answer)
            impostor_port = impostor.start("127.0.0.1")
            wrong = PeerAddress("PC-1", ("127.0.0.1",), impostor_port, AGENT.public_key)
            with pytest.raises(UnreachableError):
                await agent.client(peer=wrong).connect(2)
            # The same with a second address that is the right one: two loopback addresses, one port.
            second = ControlServer(agent.context, AGENT, agent.allow_list, answer)
            second.start("127.0.0.2", impostor_port)
            peer = PeerAddress("PC-1", ("127.0.0.1", "127.0.0.2"), impostor_port, AGENT.public_key)
            client = agent.client(peer=peer)
            await client.connect()
            assert client.endpoint == f"tcp://127.0.0.2:{impostor_port}"
            await client.close()
            await second.close()
            await impostor.close()

    asyncio.run(main())


def test_a_lost_connection_ends_what_waits_at_once() -> None:
    async def never(request: ControlRequest, controller_key: str) -> ControlReply:
        if isinstance(request, Hello):
            return await answer(request, controller_key)
        await asyncio.sleep(3600)
        raise AssertionError

    async def main() -> None:
        async with running_agent(handler=never) as agent:
            context = zmq.asyncio.Context()
            client = ControlClient(context, CONTROLLER, agent.peer, controller_name="desk")
            await client.connect()
            waiting = asyncio.create_task(client.request(Heartbeat(number=0), timeout_s=30))
            await asyncio.sleep(0.05)
            await agent.server.close()
            with pytest.raises(UnreachableError, match="was lost"):
                await asyncio.wait_for(waiting, 5)
            assert client.disconnected.is_set()
            await client.close()
            context.destroy(0)

    asyncio.run(main())


def test_a_listener_that_says_nothing_is_given_up() -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        with tcp.create_server(("127.0.0.1", 0)) as listener:
            peer = PeerAddress("PC-9", ("127.0.0.1",), listener.getsockname()[1], AGENT.public_key)
            with pytest.raises(UnreachableError, match="PC-9"):
                await ControlClient(context, CONTROLLER, peer, controller_name="desk").connect(0.5)
        context.destroy(0)

    asyncio.run(main())


@pytest.mark.parametrize(("low", "high", "outdated"), [(2, 9, "this PC"), (2, 2, "this PC")])
def test_another_protocol_version_is_told_to_update(low: int, high: int, outdated: str) -> None:
    frame = msgspec.msgpack.encode(
        {"type": "hello", "number": 5, "protocol_min": low, "protocol_max": high, "a_field_of_the_future": True}
    )
    refusal = read_request(frame)
    assert isinstance(refusal, Refused)
    assert refusal.number == 5
    assert refusal.message.startswith(f"Update needed: {outdated} runs an older Paceline")


def test_a_request_of_the_future_is_refused_under_its_number() -> None:
    refusal = read_request(msgspec.msgpack.encode({"type": "defragment", "number": 99}))
    assert isinstance(refusal, Refused)
    assert refusal.number == 99
    assert "Update needed" in refusal.message


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_no_bytes_raise_out_of_reading_a_request(frame: bytes) -> None:
    assert isinstance(read_request(frame), Refused)


reply_decoder: Decoder[ControlReply] = Decoder(ControlReply)


def test_ten_thousand_mutated_messages_do_not_harm_the_server(mutated_messages: MutatedMessages) -> None:
    async def main() -> None:
        seeds = [
            encode(Hello(number=1, protocol_min=1, protocol_max=1, controller_name="desk", nonce="ab" * 32)),
            encode(Heartbeat(number=2)),
            encode(Undeploy(number=3, deployment="0123456789ab")),
        ]
        async with running_agent() as agent:
            process = psutil.Process()
            context = zmq.asyncio.Context()
            attacker = curve_client_socket(context, zmq.DEALER, CONTROLLER, AGENT.public_key)
            attacker.connect(f"tcp://127.0.0.1:{agent.port}")

            last_number = 10**12
            last_answered = asyncio.Event()

            async def swallow() -> None:
                while True:
                    if reply_decoder.decode(await attacker.recv()).number == last_number:
                        last_answered.set()

            swallower = asyncio.create_task(swallow())
            await attacker.send(seeds[0])
            resident_before = process.memory_info().rss
            for frames in mutated_messages(seeds, 1):
                await attacker.send_multipart(frames)
            while not last_answered.is_set():
                await attacker.send(encode(Heartbeat(number=last_number)))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(last_answered.wait(), 0.2)
            client = agent.client()
            await client.connect()
            assert isinstance(await client.request(Heartbeat(number=0)), Done)
            assert process.memory_info().rss - resident_before < 50 << 20
            await client.close()
            swallower.cancel()
            context.destroy(0)

    asyncio.run(main())


def test_ten_thousand_mutated_answers_do_not_harm_the_client(mutated_messages: MutatedMessages) -> None:
    async def main() -> None:
        async with running_agent() as agent:
            client = agent.client()
            welcome = await client.connect()
            load = LiveLoad(cpu_percent=1.0, memory_free_bytes=1, disk_free_bytes=1)
            beat = HeartbeatReply(number=2, status=NodeStatus(load=load, paused=False, stages=(), gateways=()))
            connection = next(iter(agent.server._greeted))
            resident_before = psutil.Process().memory_info().rss
            good = [encode(welcome), encode(beat), encode(Done(number=2)), encode(Refused(number=2, message="no"))]
            for frames in mutated_messages(good, 2):
                await router_send(agent.server._socket, [connection, *frames])
            # Number 2 may have been answered by what was left whole of a mutated message, number 3 was not.
            with contextlib.suppress(RefusedError):
                await client.request(Heartbeat(number=0))
            assert isinstance(await client.request(Heartbeat(number=0)), Done)
            assert psutil.Process().memory_info().rss - resident_before < 50 << 20
            await client.close()

    asyncio.run(main())


def test_a_peer_that_never_reads_does_not_hold_up_the_others() -> None:
    async def main() -> None:
        async with running_agent() as agent:
            context = zmq.asyncio.Context()
            deaf = curve_client_socket(context, zmq.DEALER, CONTROLLER, AGENT.public_key, high_water_mark=1)
            deaf.connect(f"tcp://127.0.0.1:{agent.port}")
            await deaf.send(
                encode(Hello(number=1, protocol_min=1, protocol_max=1, controller_name="desk", nonce="ab" * 32))
            )
            for number in range(3_000):
                await deaf.send(encode(Heartbeat(number=number)))
            client = agent.client()
            await client.connect()
            assert isinstance(await client.request(Heartbeat(number=0), timeout_s=5), Done)
            await client.close()
            context.destroy(0)

    asyncio.run(main())


def test_a_reply_of_a_state_that_is_not_asked_for_is_ignored() -> None:
    """Late answers and answers to nobody do not confuse the client."""

    async def main() -> None:
        async with running_agent() as agent:
            client = agent.client()
            await client.connect()
            connection = next(iter(agent.server._greeted))
            for reply in (Done(number=999_999), Refused(number=0, message="late")):
                agent.server._send(connection, reply)
            agent.server._socket.send_multipart([connection, b"\xc1 no msgpack"])
            assert not isinstance(await client.request(Heartbeat(number=0)), HeartbeatReply)
            await client.close()

    asyncio.run(main())
