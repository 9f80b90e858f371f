"""One CURVE connection of an asyncio client: found behind one of a peer's addresses, proved, watched."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Literal

import zmq
import zmq.asyncio

from fleet.codec import MAX_CONTROL_BYTES
from fleet.errors import EnrolmentError, UnreachableError
from fleet.identity import Identity
from fleet.node import PeerAddress
from fleet.socket_monitor import SocketMonitor
from fleet.sockets import CONTROL_HIGH_WATER_MARK, curve_client_socket, pick_address_async

_log = logging.getLogger("paceline.connection")


class Connection:
    """A DEALER whose peer proved its key and admits us. It does not reconnect: that would need a new greeting."""

    def __init__(self, socket: zmq.asyncio.Socket, monitor: SocketMonitor, endpoint: str) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self._monitor = monitor

    async def lost(self) -> None:
        """Returns when the connection is over."""
        async for event in self._monitor.events():
            if event.kind not in ("connected", "ready"):
                return

    def close(self) -> None:
        """Ends the connection; what was not sent yet is dropped. Safe to call twice."""
        with contextlib.suppress(zmq.ZMQError):
            self._monitor.close()
        self.socket.close(0)


async def open_connection(
    context: zmq.asyncio.Context,
    identity: Identity,
    peer: PeerAddress,
    timeout_s: float,
    *,
    high_water_mark: int = CONTROL_HIGH_WATER_MARK,
    max_message_bytes: int = MAX_CONTROL_BYTES,
) -> Connection:
    """Connects to the first of the peer's addresses behind which somebody proves the peer's key.

    Raises:
        UnreachableError: no address answers in time, or whoever answers does not hold the key.
        EnrolmentError: the peer does not admit this identity.
    """
    strangers: set[str] = set()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                endpoint = await pick_address_async(peer, timeout_s, skip=strangers)
                socket: zmq.asyncio.Socket = curve_client_socket(
                    context,
                    zmq.DEALER,
                    identity,
                    peer.public_key,
                    high_water_mark=high_water_mark,
                    max_message_bytes=max_message_bytes,
                )
                socket.set(zmq.RECONNECT_IVL, -1)
                connection = Connection(socket, SocketMonitor(socket), endpoint)
                try:
                    verdict = await _shake_hands(connection)
                except BaseException:
                    connection.close()
                    raise
                if verdict == "ready":
                    return connection
                connection.close()
                if verdict == "refused":
                    raise EnrolmentError(
                        f"{peer.node_name} does not trust this controller; enrol it with a token of this fleet."
                    )
                strangers.add(endpoint)
                _log.warning("%s is not %s: it does not prove its key", endpoint, peer.node_name)
    except TimeoutError:
        raise UnreachableError(f"{peer.node_name} does not answer within {timeout_s:g} s.") from None


async def _shake_hands(connection: Connection) -> Literal["ready", "refused", "stranger"]:
    connection.socket.connect(connection.endpoint)
    async for event in connection._monitor.events():
        if event.kind in ("ready", "refused"):
            return "ready" if event.kind == "ready" else "refused"
        if event.kind != "connected":
            break
    return "stranger"
