"""CURVE sockets with the options that every part of the fleet uses, and finding an address that answers.

Measured facts behind the options: a CURVE server without ZAP admits everybody; a ROUTER drops silently what it cannot
route unless ``ROUTER_MANDATORY`` is set; a refused client never tries again (make a new socket after approval);
a client with a wrong server key tries forever, so the interval must grow; a peer whose frame exceeds ``MAXMSGSIZE`` is
disconnected, comes back and sends it again, so senders must keep to the limit themselves.
"""

from __future__ import annotations

import asyncio
import selectors
import socket as tcp
import time
from collections.abc import Collection
from typing import Any, TypeVar

import zmq

from fleet.codec import MAX_CONTROL_BYTES
from fleet.errors import UnreachableError
from fleet.identity import Identity, is_public_key
from fleet.node import PeerAddress
from fleet.zap import ZAP_DOMAIN, AllowList, ZapHandler, authorised_sender, sender_key, start_zap

__all__ = [
    "AllowList",
    "ZapHandler",
    "authorised_sender",
    "bind_tcp",
    "curve_client_socket",
    "curve_server_socket",
    "endpoint_of",
    "pick_address",
    "pick_address_async",
    "sender_key",
    "start_zap",
]

HANDSHAKE_TIMEOUT_MS = 5_000
CONNECT_TIMEOUT_MS = 5_000
HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000
RECONNECT_INTERVAL_MS = 200
RECONNECT_INTERVAL_MAX_MS = 5_000
CONTROL_HIGH_WATER_MARK = 100
CONNECT_STAGGER_S = 0.05
"""How long an address further down the list waits for those above it."""

SocketType = TypeVar("SocketType", bound="zmq.Socket[Any]")


def curve_server_socket(
    context: zmq.Context[SocketType],
    socket_type: int,
    identity: Identity,
    *,
    zap_domain: str = ZAP_DOMAIN,
    high_water_mark: int = CONTROL_HIGH_WATER_MARK,
    max_message_bytes: int = MAX_CONTROL_BYTES,
    linger_ms: int = 0,
) -> SocketType:
    """A socket that proves ``identity`` and admits only whom the context's ZAP handler admits; nobody without one.

    Args:
        context: a blocking or an asyncio context, on which ``start_zap`` was called.
        socket_type: ``zmq.ROUTER`` as a rule; then sending to a peer that is gone raises ``EHOSTUNREACH`` and to one
            whose queue is full ``EAGAIN``, instead of dropping the message.
        high_water_mark: messages queued per peer and direction; at least 2, since a ROUTER counts its peer's identity.
        max_message_bytes: largest frame accepted; a peer that sends more is disconnected.
        linger_ms: how long closing waits for unsent messages.
    """
    socket = context.socket(socket_type)
    _set_common_options(socket, high_water_mark, max_message_bytes, linger_ms)
    socket.set(zmq.ZAP_DOMAIN, zap_domain.encode())
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, identity.secret_key.encode())
    if socket_type == zmq.ROUTER:
        socket.set(zmq.ROUTER_MANDATORY, 1)
    return socket


def curve_client_socket(
    context: zmq.Context[SocketType],
    socket_type: int,
    identity: Identity,
    server_public_key: str,
    *,
    high_water_mark: int = CONTROL_HIGH_WATER_MARK,
    max_message_bytes: int = MAX_CONTROL_BYTES,
    linger_ms: int = 0,
) -> SocketType:
    """A socket that talks only to the server that holds ``server_public_key``. Connect it to ``pick_address(...)``.

    It reconnects by itself after a loss, not after a refusal: then close it and make another. Nothing is queued
    while there is no connection: sending blocks (or raises ``zmq.Again``).

    Raises:
        UnreachableError: ``server_public_key``, which may have come from another PC, is not a CURVE key.
    """
    if not is_public_key(server_public_key):
        raise UnreachableError("The peer cannot be connected to: what was given as its public key is not a CURVE key.")
    socket = context.socket(socket_type)
    _set_common_options(socket, high_water_mark, max_message_bytes, linger_ms)
    socket.set(zmq.CURVE_SERVERKEY, server_public_key.encode())
    socket.set(zmq.CURVE_PUBLICKEY, identity.public_key.encode())
    socket.set(zmq.CURVE_SECRETKEY, identity.secret_key.encode())
    socket.set(zmq.IMMEDIATE, 1)
    return socket


def _set_common_options(socket: zmq.Socket[Any], high_water_mark: int, max_message_bytes: int, linger_ms: int) -> None:
    # TCP_NODELAY needs no option: libzmq always sets it.
    socket.set(zmq.SNDHWM, high_water_mark)
    socket.set(zmq.RCVHWM, high_water_mark)
    socket.set(zmq.MAXMSGSIZE, max_message_bytes)
    socket.set(zmq.LINGER, linger_ms)
    socket.set(zmq.IPV6, 1)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    socket.set(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_INTERVAL_MAX_MS)


def bind_tcp(socket: zmq.Socket[Any], address: str = "0.0.0.0", port: int = 0) -> int:
    """Binds to an address of this PC and returns the port, which is ``port`` or, for 0, a free one.

    Raises:
        UnreachableError: the port is taken or the address is not one of this PC.
    """
    try:
        socket.bind(endpoint_of(address, port) if port else endpoint_of(address, "*"))
    except zmq.ZMQError as error:
        raise UnreachableError(
            f"Cannot listen on {address} port {port or '(any)'} of this PC: {zmq.strerror(error.errno or 0)}."
        ) from None
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rsplit(":", 1)[1])


def endpoint_of(address: str, port: int | str) -> str:
    """``tcp://address:port``, with brackets around an IPv6 address."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def pick_address(peer: PeerAddress, timeout_s: float = 5.0, *, skip: Collection[str] = ()) -> str:
    """The endpoint (``tcp://host:port``) of the first address of a peer that takes a TCP connection.

    Addresses are tried side by side, each a little after the one before it, so that one which swallows packets costs
    no time (https://www.rfc-editor.org/rfc/rfc8305). That somebody listens there says nothing about who it is: CURVE
    does. Endpoints in ``skip`` are not tried, for callers that found another machine behind one.

    Raises:
        UnreachableError: none answers within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    candidates = [(endpoint, where) for endpoint, where in _resolve(peer) if endpoint not in skip]
    begun = 0
    with selectors.DefaultSelector() as selector:
        try:
            while True:
                if begun < len(candidates):
                    endpoint, (family, socket_address) = candidates[begun]
                    begun += 1
                    connection = tcp.socket(family, tcp.SOCK_STREAM)
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_WRITE, endpoint)
                    try:
                        # Windows answers "would block", POSIX "in progress"; what became of it shows in SO_ERROR.
                        connection.connect_ex(socket_address)
                    except OSError:
                        selector.unregister(connection)
                        connection.close()
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or (begun == len(candidates) and not selector.get_map()):
                    raise UnreachableError(_unreachable_text(peer))
                wait_s = min(CONNECT_STAGGER_S, remaining_s) if begun < len(candidates) else remaining_s
                for key, _ in selector.select(wait_s):
                    connection = key.fileobj  # type: ignore[assignment]
                    if connection.getsockopt(tcp.SOL_SOCKET, tcp.SO_ERROR) == 0 and _is_connected(connection):
                        return str(key.data)
                    selector.unregister(connection)
                    connection.close()
        finally:
            for key in list(selector.get_map().values()):
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


async def pick_address_async(peer: PeerAddress, timeout_s: float = 5.0, *, skip: Collection[str] = ()) -> str:
    """``pick_address`` in a thread, for event loops."""
    return await asyncio.to_thread(pick_address, peer, timeout_s, skip=skip)


def _resolve(peer: PeerAddress) -> list[tuple[str, tuple[tcp.AddressFamily, Any]]]:
    found: dict[str, tuple[tcp.AddressFamily, Any]] = {}
    for address in peer.addresses:
        try:
            answers = tcp.getaddrinfo(address, peer.port, type=tcp.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue
        for family, _, _, _, socket_address in answers:
            found.setdefault(endpoint_of(str(socket_address[0]), peer.port), (family, socket_address))
    return list(found.items())


def _is_connected(connection: tcp.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _unreachable_text(peer: PeerAddress) -> str:
    return (
        f"{peer.node_name} does not answer on port {peer.port} of {', '.join(peer.addresses)}; "
        "check that the PC is on, that Paceline runs there, and that its firewall lets it through."
    )
