"""Real sockets: who gets in, who does not, and what a listener on the wire can read."""

from __future__ import annotations

import asyncio
import contextlib
import socket as tcp
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
import zmq
import zmq.asyncio

from fleet.errors import UnreachableError
from fleet.identity import Identity
from fleet.node import PeerAddress
from fleet.socket_monitor import SocketMonitor
from fleet.sockets import bind_tcp, curve_client_socket, curve_server_socket, endpoint_of, pick_address
from fleet.zap import AllowList, authorised_sender, sender_key, start_zap

BlockingContext: TypeAlias = zmq.Context[zmq.Socket[bytes]]
SERVER = Identity.generate()
CLIENT = Identity.generate()
STRANGER = Identity.generate()
DEADLINE_MS = 5_000
REFUSAL_MS = 700


class KeepingContext(zmq.Context[zmq.Socket[bytes]]):
    """Keeps its sockets until it is destroyed; a test's local variables would drop them unclosed."""

    def socket(self, *arguments: Any, **options: Any) -> Any:
        created = super().socket(*arguments, **options)
        self.__dict__.setdefault("kept", []).append(created)
        return created


@pytest.fixture
def server_context() -> Iterator[BlockingContext]:
    context = KeepingContext()
    yield context
    context.destroy(0)


@pytest.fixture
def client_context() -> Iterator[BlockingContext]:
    context = KeepingContext()
    yield context
    context.destroy(0)


def connect(
    context: BlockingContext, port: int, identity: Identity, server_key: str = SERVER.public_key
) -> zmq.Socket[bytes]:
    client = curve_client_socket(context, zmq.DEALER, identity, server_key)
    client.connect(f"tcp://127.0.0.1:{port}")
    client.set(zmq.SNDTIMEO, DEADLINE_MS)
    return client


def wait_for_event(monitor: SocketMonitor, kinds: set[str], timeout_ms: int = DEADLINE_MS) -> str:
    deadline = time.monotonic() + timeout_ms / 1000
    while (remaining_s := deadline - time.monotonic()) > 0:
        if monitor.socket.poll(remaining_s * 1000):
            event = monitor.read()
            if event is not None and event.kind in kinds:
                return event.kind
    pytest.fail(f"none of {kinds} within {timeout_ms} ms")


def test_a_trusted_key_gets_in_and_is_known_per_frame(
    server_context: BlockingContext, client_context: BlockingContext
) -> None:
    allow_list = AllowList([CLIENT.public_key])
    with start_zap(server_context, allow_list):
        server = curve_server_socket(server_context, zmq.ROUTER, SERVER)
        client = connect(client_context, bind_tcp(server, "127.0.0.1"), CLIENT)
        client.send(b"hello")
        assert server.poll(DEADLINE_MS)
        routing_id, frame = server.recv_multipart(copy=False)
        assert frame.bytes == b"hello"
        assert sender_key(frame) == CLIENT.public_key
        assert authorised_sender(frame, allow_list) == CLIENT.public_key
        # Taking the key away does not end the session; the check per message is what stops it.
        allow_list.discard(CLIENT.public_key)
        client.send(b"again")
        assert server.poll(DEADLINE_MS)
        frame = server.recv_multipart(copy=False)[1]
        assert authorised_sender(frame, allow_list) is None
        server.send_multipart([routing_id.bytes, b"answer"])
        assert client.poll(DEADLINE_MS)


def test_without_a_zap_handler_everybody_is_refused(
    server_context: BlockingContext, client_context: BlockingContext
) -> None:
    server = curve_server_socket(server_context, zmq.ROUTER, SERVER)
    client = curve_client_socket(client_context, zmq.DEALER, CLIENT, SERVER.public_key)
    monitor = SocketMonitor(client)
    client.connect(f"tcp://127.0.0.1:{bind_tcp(server, '127.0.0.1')}")
    assert wait_for_event(monitor, {"ready", "refused", "handshake_failed", "disconnected"}) != "ready"
    with pytest.raises(zmq.Again):
        client.send(b"let me in", zmq.NOBLOCK)
    assert not server.poll(REFUSAL_MS)
    monitor.close()


def test_a_stranger_is_refused_and_gets_in_after_approval_with_a_new_socket(
    server_context: BlockingContext, client_context: BlockingContext
) -> None:
    allow_list = AllowList([CLIENT.public_key])
    with start_zap(server_context, allow_list):
        server = curve_server_socket(server_context, zmq.ROUTER, SERVER)
        port = bind_tcp(server, "127.0.0.1")
        client = curve_client_socket(client_context, zmq.DEALER, STRANGER, SERVER.public_key)
        monitor = SocketMonitor(client)
        client.connect(f"tcp://127.0.0.1:{port}")
        assert wait_for_event(monitor, {"ready", "refused"}) == "refused"
        monitor.close()
        client.close()
        assert not server.poll(0)
        allow_list.add(STRANGER.public_key)
        connect(client_context, port, STRANGER).send(b"now")
        assert server.poll(DEADLINE_MS)


def test_a_wrong_server_key_never_connects(server_context: BlockingContext, client_context: BlockingContext) -> None:
    with start_zap(server_context, AllowList([CLIENT.public_key])):
        server = curve_server_socket(server_context, zmq.ROUTER, SERVER)
        client = curve_client_socket(client_context, zmq.DEALER, CLIENT, STRANGER.public_key)
        monitor = SocketMonitor(client)
        client.connect(f"tcp://127.0.0.1:{bind_tcp(server, '127.0.0.1')}")
        assert wait_for_event(monitor, {"ready", "handshake_failed", "disconnected"}) != "ready"
        monitor.close()
        with pytest.raises(zmq.Again):
            client.send(b"secret", zmq.NOBLOCK)
        assert not server.poll(REFUSAL_MS)


@pytest.mark.parametrize("key", [" " * 40, "#" * 40, "\u00e9" * 40])
def test_a_server_key_that_is_none_is_a_sentence(client_context: BlockingContext, key: str) -> None:
    with pytest.raises(UnreachableError, match="not a CURVE key"):
        curve_client_socket(client_context, zmq.DEALER, Identity.generate(), key)


def test_plain_and_null_clients_are_refused(server_context: BlockingContext, client_context: BlockingContext) -> None:
    with start_zap(server_context, AllowList([CLIENT.public_key])):
        server = curve_server_socket(server_context, zmq.ROUTER, SERVER)
        port = bind_tcp(server, "127.0.0.1")
        for plain in (False, True):
            client = client_context.socket(zmq.DEALER)
            client.linger = 0
            if plain:
                client.plain_username = b"admin"
                client.plain_password = b"admin"
            client.connect(f"tcp://127.0.0.1:{port}")
            client.send(b"hello", zmq.NOBLOCK)
        assert not server.poll(REFUSAL_MS)


def test_a_null_socket_in_the_fleet_domain_admits_nobody(
    server_context: BlockingContext, client_context: BlockingContext
) -> None:
    with start_zap(server_context, AllowList([CLIENT.public_key])):
        server = server_context.socket(zmq.ROUTER)
        server.zap_domain = b"fleet"
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client = client_context.socket(zmq.DEALER)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"hello")
        assert not server.poll(REFUSAL_MS)


def test_another_domain_is_refused(server_context: BlockingContext, client_context: BlockingContext) -> None:
    with start_zap(server_context, AllowList([CLIENT.public_key])):
        server = curve_server_socket(server_context, zmq.ROUTER, SERVER, zap_domain="pairing")
        client = curve_client_socket(client_context, zmq.DEALER, CLIENT, SERVER.public_key)
        monitor = SocketMonitor(client)
        client.connect(f"tcp://127.0.0.1:{bind_tcp(server, '127.0.0.1')}")
        assert wait_for_event(monitor, {"ready", "refused"}) == "refused"
        monitor.close()


@pytest.mark.parametrize(
    "request_frames",
    [
        [],
        [b"1.0"],
        [b"1.0", b"7", b"fleet", b"127.0.0.1", b"", b"CURVE"],
        [b"1.0", b"7", b"fleet", b"127.0.0.1", b"", b"CURVE", b"short"],
        [b"2.0", b"7", b"fleet", b"127.0.0.1", b"", b"CURVE", bytes(32)],
        [b"1.0", b"7", b"", b"127.0.0.1", b"", b"CURVE", bytes(32)],
        [b"1.0", b"7", b"fleet", b"\xff\xfe", b"", b"NULL"],
        [b"1.0", b"7", b"fleet", b"127.0.0.1", b"", b"CURVE", bytes(32), b"more"],
    ],
)
def test_malformed_zap_requests_are_answered_with_400(
    server_context: BlockingContext, request_frames: list[bytes]
) -> None:
    with start_zap(server_context, AllowList()) as handler:
        assert handler.answer(request_frames)[2] == b"400"


def test_strangers_that_knock_on_and_on_do_not_fill_the_log(
    server_context: BlockingContext, caplog: pytest.LogCaptureFixture
) -> None:
    key = bytes(32)
    with start_zap(server_context, AllowList()) as handler:
        for mechanism in (b"CURVE", b"NULL"):
            for _ in range(500):
                assert handler.answer([b"1.0", b"7", b"fleet", b"10.0.0.9", b"", mechanism, key])[2] == b"400"
    assert 1 <= len(caplog.records) <= 3
    assert "10.0.0.9" in caplog.text


def test_the_handler_ends_with_its_context_and_closes_twice() -> None:
    context: BlockingContext = zmq.Context()
    handler = start_zap(context, AllowList())
    with pytest.raises(zmq.ZMQError):
        start_zap(context, AllowList())
    context.term()
    handler.close()
    handler.close()
    other: BlockingContext = zmq.Context()
    for _ in range(50):
        start_zap(other, AllowList()).close()
    other.term()


def test_zap_serves_an_asyncio_context() -> None:
    async def talk() -> tuple[bytes, str | None]:
        context = zmq.asyncio.Context()
        handler = start_zap(context, AllowList([CLIENT.public_key]))
        server = curve_server_socket(context, zmq.ROUTER, SERVER)
        client = curve_client_socket(context, zmq.DEALER, CLIENT, SERVER.public_key)
        client.connect(f"tcp://127.0.0.1:{bind_tcp(server, '127.0.0.1')}")
        try:
            await asyncio.wait_for(client.send(b"hello"), 5)
            _, frame = await asyncio.wait_for(server.recv_multipart(copy=False), 5)
            return frame.bytes, sender_key(frame)
        finally:
            client.close()
            server.close()
            handler.close()
            context.term()

    assert asyncio.run(talk()) == (b"hello", CLIENT.public_key)


def test_an_eavesdropper_reads_nothing(server_context: BlockingContext, client_context: BlockingContext) -> None:
    secret = b"the capital of France is Paris. " * 40
    captured = bytearray()
    with start_zap(server_context, AllowList([CLIENT.public_key])), tcp.create_server(("127.0.0.1", 0)) as listener:
        server = curve_server_socket(server_context, zmq.ROUTER, SERVER)
        server_port = bind_tcp(server, "127.0.0.1")

        def relay(source: tcp.socket, sink: tcp.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    captured.extend(data)
                    sink.sendall(data)

        client = connect(client_context, listener.getsockname()[1], CLIENT)
        downstream, _ = listener.accept()
        with downstream, tcp.create_connection(("127.0.0.1", server_port)) as upstream:
            threads = [
                threading.Thread(target=relay, args=pair) for pair in ((downstream, upstream), (upstream, downstream))
            ]
            for thread in threads:
                thread.start()
            client.send(secret)
            assert server.poll(DEADLINE_MS)
            routing_id, received = server.recv_multipart()
            server.send_multipart([routing_id, received[::-1]])
            assert client.poll(DEADLINE_MS)
            assert client.recv() == secret[::-1]
            for end in (downstream, upstream):
                end.shutdown(tcp.SHUT_RDWR)
            for thread in threads:
                thread.join(5)
    assert len(captured) > 2 * len(secret)
    for piece in (secret[:8], secret[::-1][:8], b"Paris", b"siraP", CLIENT.public_key.encode()):
        assert piece not in captured


def test_an_oversized_message_is_not_delivered_and_the_server_lives_on(
    server_context: BlockingContext, client_context: BlockingContext
) -> None:
    with start_zap(server_context, AllowList([CLIENT.public_key, STRANGER.public_key])):
        server = curve_server_socket(server_context, zmq.ROUTER, SERVER, max_message_bytes=1000)
        port = bind_tcp(server, "127.0.0.1")
        flooder = connect(client_context, port, STRANGER)
        flooder.send(bytes(5_000))
        connect(client_context, port, CLIENT).send(b"small")
        assert server.poll(DEADLINE_MS)
        assert server.recv_multipart()[1] == b"small"
        assert not server.poll(300)


def test_a_router_says_when_a_peer_is_gone(server_context: BlockingContext) -> None:
    server = curve_server_socket(server_context, zmq.ROUTER, SERVER)
    with pytest.raises(zmq.ZMQError) as raised:
        server.send_multipart([b"nobody", b"hello"])
    assert raised.value.errno == zmq.EHOSTUNREACH


def test_a_taken_port_is_a_sentence(server_context: BlockingContext) -> None:
    port = bind_tcp(curve_server_socket(server_context, zmq.ROUTER, SERVER), "127.0.0.1")
    with pytest.raises(UnreachableError, match=f"port {port}"):
        bind_tcp(curve_server_socket(server_context, zmq.ROUTER, SERVER), "127.0.0.1", port)


def peer(addresses: list[str], port: int) -> PeerAddress:
    return PeerAddress("PC-7", tuple(addresses), port, SERVER.public_key)


def test_the_first_address_that_answers_is_picked_in_spite_of_a_black_hole() -> None:
    with tcp.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        begun = time.monotonic()
        # 203.0.113.0/24 is reserved for documentation: nobody answers there.
        endpoint = pick_address(peer(["203.0.113.1", "not a host name", "127.0.0.1"], port), 60)
        assert endpoint == endpoint_of("127.0.0.1", port)
        assert time.monotonic() - begun < 30
        with pytest.raises(UnreachableError):
            pick_address(peer(["127.0.0.1"], port), 1, skip={endpoint})


def test_an_unreachable_peer_is_named() -> None:
    with tcp.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UnreachableError, match=f"PC-7 does not answer on port {port} of 127.0.0.1"):
        pick_address(peer(["127.0.0.1"], port), 2)
