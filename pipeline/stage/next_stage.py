"""The connection to the next stage: blocking, with a deadline on everything, and it says who is at fault."""

from __future__ import annotations

import threading
import time
from typing import Any

import zmq

from fleet.errors import UnreachableError
from fleet.identity import Identity
from fleet.node import PeerAddress
from fleet.socket_monitor import SocketMonitor
from fleet.sockets import curve_client_socket, pick_address

CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 6.0
SEND_TIMEOUT_S = 30.0
"""How long a next stage that is connected may take no step before it counts as lost."""
HIGH_WATER_MARK = 32
"""Steps queued per connection and direction."""
MAX_RECEIVED_BYTES = 8192
"""Nothing is ever read from this connection, so what the other side sends would only pile up."""
_LOOK_AROUND_MS = 100


class NextStage:
    """A DEALER to the next stage. Once it has raised UnreachableError it is of no more use: close it.

    Args:
        context: of the data path.
        identity: of this node.
        peer: the next stage.
        stopping: set when this process shall end; waits then end with UnreachableError.

    Raises:
        UnreachableError: nobody answers, it is not the peer, or it does not admit this node.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], identity: Identity, peer: PeerAddress, stopping: threading.Event
    ) -> None:
        self.peer = peer
        self._stopping = stopping
        endpoint = pick_address(peer, CONNECT_TIMEOUT_S)
        self._socket = curve_client_socket(
            context,
            zmq.DEALER,
            identity,
            peer.public_key,
            high_water_mark=HIGH_WATER_MARK,
            max_message_bytes=MAX_RECEIVED_BYTES,
        )
        self._monitor = SocketMonitor(self._socket)
        try:
            self._socket.connect(endpoint)
            self._wait_until_ready(endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def monitor_socket(self) -> zmq.Socket[Any]:
        """Readable when ``check`` has something to look at."""
        monitor_socket: zmq.Socket[Any] = self._monitor.socket
        return monitor_socket

    def close(self) -> None:
        """Drop the connection and what is queued in it."""
        self._monitor.close()
        self._socket.close(0)

    def check(self) -> None:
        """Look at what has become of the connection.

        Raises:
            UnreachableError: it is gone. It would come back by itself, to a process that knows none of the sequences.
        """
        while (event := self._monitor.read()) is not None:
            if event.kind not in ("connected", "ready"):
                raise UnreachableError(f"the connection to the next stage on {self.peer.node_name} was lost.")

    def send(self, frames: list[Any]) -> None:
        """Send a message; its memory may be used again at once.

        Raises:
            UnreachableError: the next stage is gone, or has taken nothing for SEND_TIMEOUT_S.
        """
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
                return
            except zmq.Again:
                self.check()
            if self._stopping.is_set():
                raise UnreachableError("this process is ending.")
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"the next stage on {self.peer.node_name} has taken no step for {SEND_TIMEOUT_S:.0f} s."
                )
            self._socket.poll(_LOOK_AROUND_MS, zmq.POLLOUT)

    def _wait_until_ready(self, endpoint: str) -> None:
        name = self.peer.node_name
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        while not self._stopping.is_set():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise UnreachableError(f"the next stage on {name} ({endpoint}) does not answer.")
            if not self._monitor.socket.poll(min(remaining_s * 1e3, _LOOK_AROUND_MS)):
                continue
            event = self._monitor.read()
            if event is None or event.kind == "connected":
                continue
            if event.kind == "ready":
                return
            if event.kind == "refused":
                raise UnreachableError(f"the next stage on {name} does not admit this node.")
            if event.kind == "handshake_failed":
                raise UnreachableError(f"at {endpoint} there is not the next stage on {name} but another process.")
            # "disconnected" and "connect_failed": it goes on trying until the deadline.
        raise UnreachableError("this process is ending.")
