"""The connection to the next stage, against one that behaves badly."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from fleet.errors import UnreachableError
from fleet.identity import Identity
from fleet.node import PeerAddress
from fleet.sockets import AllowList, ZapHandler, bind_tcp, curve_server_socket, start_zap
from pipeline.stage import next_stage
from pipeline.stage.next_stage import NextStage

DEADLINE_S = 30.0


class Server:
    """A ROUTER that admits one key and reads only when it is told to."""

    def __init__(self, allowed: str) -> None:
        self.identity = Identity.generate()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.zap: ZapHandler = start_zap(self.context, AllowList([allowed]))
        self.router = curve_server_socket(self.context, zmq.ROUTER, self.identity, high_water_mark=2)
        self.port = bind_tcp(self.router, "127.0.0.1")

    @property
    def address(self) -> PeerAddress:
        return address_of(self.port, self.identity.public_key)

    def close(self) -> None:
        self.zap.close()
        self.context.destroy(0)


def flood(following: NextStage) -> None:
    for _ in range(1000):
        following.send([b"header", bytes(1 << 20)])


def address_of(port: int, public_key: str) -> PeerAddress:
    return PeerAddress(node_name="PC-2", addresses=("127.0.0.1",), port=port, public_key=public_key)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(0)


@pytest.fixture
def identity() -> Identity:
    return Identity.generate()


@pytest.fixture
def server(identity: Identity) -> Iterator[Server]:
    server = Server(identity.public_key)
    yield server
    server.close()


def test_what_is_sent_arrives(context: zmq.Context[zmq.Socket[bytes]], identity: Identity, server: Server) -> None:
    following = NextStage(context, identity, server.address, threading.Event())
    following.send([b"header", b"tensor"])
    assert server.router.poll(DEADLINE_S * 1e3)
    assert server.router.recv_multipart()[1:] == [b"header", b"tensor"]
    following.check()
    following.close()


def test_one_that_takes_nothing_is_given_up(
    context: zmq.Context[zmq.Socket[bytes]], identity: Identity, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_stage, "SEND_TIMEOUT_S", 0.5)
    following = NextStage(context, identity, server.address, threading.Event())
    begin = time.monotonic()
    with pytest.raises(UnreachableError, match="PC-2 has taken no step"):
        flood(following)
    assert time.monotonic() - begin < DEADLINE_S
    following.close()


def test_one_that_goes_away_is_noticed_while_sending_and_while_waiting(
    context: zmq.Context[zmq.Socket[bytes]], identity: Identity, server: Server
) -> None:
    following = NextStage(context, identity, server.address, threading.Event())
    server.close()
    assert following.monitor_socket.poll(DEADLINE_S * 1e3)
    with pytest.raises(UnreachableError, match="next stage on PC-2 was lost"):
        following.check()
    following.close()


def test_the_end_of_this_process_ends_a_wait(
    context: zmq.Context[zmq.Socket[bytes]], identity: Identity, server: Server
) -> None:
    stopping = threading.Event()
    following = NextStage(context, identity, server.address, stopping)
    stopping.set()
    with pytest.raises(UnreachableError, match="is ending"):
        flood(following)
    following.close()


def test_one_that_does_not_know_this_node_is_told_apart(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    server = Server(Identity.generate().public_key)
    try:
        with pytest.raises(UnreachableError, match="PC-2 does not admit this node"):
            NextStage(context, Identity.generate(), server.address, threading.Event())
    finally:
        server.close()


def test_one_that_never_answers_is_given_up(
    context: zmq.Context[zmq.Socket[bytes]], identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_stage, "HANDSHAKE_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = address_of(silent.getsockname()[1], Identity.generate().public_key)
        with pytest.raises(UnreachableError, match=r"PC-2 .* does not answer"):
            NextStage(context, identity, peer, threading.Event())
