"""What becomes of a socket's connections, as events: connected, ready, refused, disconnected."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

ConnectionEventKind = Literal["connected", "ready", "refused", "handshake_failed", "disconnected", "connect_failed"]
"""``connected``: TCP only. ``ready``: the CURVE handshake succeeded, the peer is who it should be and admits us.
``refused``: the peer's allow-list does not have our key; the socket will not try again. ``handshake_failed``: the
handshake broke off, as with a peer that does not hold the expected key. ``connect_failed``: nobody listens."""

_KINDS: dict[int, ConnectionEventKind] = {
    zmq.EVENT_CONNECTED: "connected",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "ready",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake_failed",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake_failed",
    zmq.EVENT_DISCONNECTED: "disconnected",
    zmq.EVENT_CLOSED: "connect_failed",
}


@dataclass(frozen=True)
class ConnectionEvent:
    kind: ConnectionEventKind
    endpoint: str


class SocketMonitor:
    """Watches one socket. ``socket`` may stand in a poller; then take events with ``read``; or iterate ``events()``.

    Close it before the socket that it watches.
    """

    def __init__(self, watched: zmq.Socket[Any]) -> None:
        events = 0
        for event in _KINDS:
            events |= event
        self._watched = watched
        self.socket: Any = watched.get_monitor_socket(events)

    def close(self) -> None:
        """Stops watching."""
        if not self._watched.closed:
            self._watched.disable_monitor()
        self.socket.close(0)

    def read(self) -> ConnectionEvent | None:
        """Takes the next event of a blocking socket; None where there is none now."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return _event_of(frames)

    async def events(self) -> AsyncIterator[ConnectionEvent]:
        """The events of an asyncio socket, until the monitor is closed or the iteration cancelled."""
        while not self.socket.closed:
            yield _event_of(await self.socket.recv_multipart())


def _event_of(frames: list[bytes]) -> ConnectionEvent:
    message = parse_monitor_message(frames)
    return ConnectionEvent(_KINDS[int(message["event"])], message["endpoint"].decode(errors="replace"))
