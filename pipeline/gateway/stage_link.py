"""The gateway's connection to one stage: found, made, watched, and made anew after a loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import zmq

from fleet.codec import PROTOCOL_VERSION, Decoder, encode
from fleet.errors import MessageError, UnreachableError
from fleet.identity import Identity
from fleet.limited_log import LimitedLog
from fleet.node import PeerAddress
from fleet.socket_monitor import SocketMonitor
from fleet.sockets import curve_client_socket
from pipeline.messages import Attach, Attached, GatewayBoundMessage, Ping

HIGH_WATER_MARK = 1000
MESSAGES_IN_A_ROW = 64
"""Of one stage, before the others and the clients are looked at."""
CONNECT_DEADLINE_S = 10.0
ATTACH_DEADLINE_S = 30.0
PING_INTERVAL_S = 2.0
SILENCE_DEADLINE_S = 120.0
"""A stage answers between steps, and a long chunk on a slow device is one step. A dead process is noticed at once by
its connection; this is for one that hangs."""
FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0

LinkState = Literal["waiting", "resolving", "connecting", "connected"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpectedStage:
    """What must answer at the other end."""

    number: int
    first_layer: int
    end_layer: int
    model_id: str


@dataclass(frozen=True)
class Resolved:
    """The outcome of looking for a stage's address: an endpoint, or why there is none."""

    stage: int
    attempt: int
    endpoint: str = ""
    error: str = ""


class StageLink:
    """One stage. All methods are called from the data thread.

    Args:
        peer: where the stage listens.
        next_peer: where the stage after it listens; None for the last.
        resolve: begin to look for an endpoint (in another thread) and post a Resolved with these two numbers.
        on_lost: called with the reason each time a connection that was wanted does not come about or ends.
        on_connected: called when the CURVE handshake is done.
        on_attached: called when the stage has begun the epoch of the last ``attach``.
    """

    def __init__(
        self,
        expected: ExpectedStage,
        peer: PeerAddress,
        next_peer: PeerAddress | None,
        identity: Identity,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        *,
        resolve: Callable[[PeerAddress, int, int], None],
        on_lost: Callable[[StageLink, str], None],
        on_connected: Callable[[StageLink], None],
        on_attached: Callable[[StageLink], None],
    ) -> None:
        self.expected = expected
        self.peer = peer
        self.state: LinkState = "waiting"
        self.device = ""
        self.attached_epoch = -1
        self._next_peer = next_peer
        self._identity = identity
        self._context = context
        self._poller = poller
        self._resolve = resolve
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._on_attached = on_attached
        self._decoder: Decoder[GatewayBoundMessage] = Decoder(GatewayBoundMessage)
        self._limited_log = LimitedLog(_log)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: SocketMonitor | None = None
        self._attempt = 0
        self._retry_s = FIRST_RETRY_S
        self._retry_at_s = 0.0
        self._deadline_s: float | None = None
        self._heard_s = 0.0
        self._ping_at_s = 0.0
        self._pings = 0
        self._wanted_epoch = -1

    @property
    def name(self) -> str:
        """How the stage is called in messages to people."""
        return f"Stage {self.expected.number} on {self.peer.node_name}"

    @property
    def is_connected(self) -> bool:
        return self.state == "connected"

    def resolved(self, outcome: Resolved, now_s: float) -> None:
        """The search for an address has ended."""
        if self.state != "resolving" or outcome.attempt != self._attempt:
            return
        if not outcome.endpoint:
            self._lose(outcome.error, now_s)
            return
        try:
            self._socket = curve_client_socket(
                self._context, zmq.DEALER, self._identity, self.peer.public_key, high_water_mark=HIGH_WATER_MARK
            )
        except UnreachableError as error:
            self._lose(f"{self.name}: {error}", now_s)
            return
        self._monitor = SocketMonitor(self._socket)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor.socket, zmq.POLLIN)
        self.state = "connecting"
        self._deadline_s = now_s + CONNECT_DEADLINE_S
        self._socket.connect(outcome.endpoint)

    def watch(self, now_s: float) -> None:
        """Look at what has become of the connection."""
        while self._monitor is not None and (event := self._monitor.read()) is not None:
            if event.kind == "ready":
                self.state = "connected"
                self._deadline_s = None
                self._heard_s = self._ping_at_s = now_s
                self._on_connected(self)
            elif event.kind == "refused":
                self._lose(f"{self.name} does not admit this gateway; deploy the model again.", now_s)
            elif event.kind == "handshake_failed":
                self._lose(f"{self.name} did not prove the key that was expected of it.", now_s)
            elif event.kind in ("disconnected", "connect_failed"):
                self._lose(f"{self.name} went away; try again when it is back.", now_s)

    def receive(self, now_s: float) -> list[GatewayBoundMessage]:
        """What has come, but Attached and Pong, which end here; no more than a few at once, however many there are."""
        messages: list[GatewayBoundMessage] = []
        for _ in range(MESSAGES_IN_A_ROW):
            if self._socket is None:
                break
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._heard_s = now_s
            try:
                if len(frames) != 1:
                    raise MessageError(f"a message has {len(frames)} frames instead of one")
                message = self._decoder.decode(frames[0])
            except MessageError as error:
                self._limited_log.warning(f"{self.name}: {error}")
                continue
            if isinstance(message, Attached):
                self._take_attached(message, now_s)
            else:
                messages.append(message)
        return messages

    def attach(self, epoch: int, now_s: float) -> None:
        """Ask the stage to begin an epoch."""
        self._wanted_epoch = epoch
        self.attached_epoch = -1
        self._deadline_s = now_s + ATTACH_DEADLINE_S
        self.send(Attach(PROTOCOL_VERSION, epoch, self.expected.number, self._next_peer), now_s)

    def send(self, message: msgspec.Struct, now_s: float) -> None:
        """Send a message; a stage that takes none is lost."""
        if self._socket is None:
            return
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._lose(f"{self.name} takes no more messages.", now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        if self.state == "waiting" and now_s >= self._retry_at_s:
            self._attempt += 1
            self.state = "resolving"
            self._resolve(self.peer, self.expected.number, self._attempt)
        elif self._deadline_s is not None and now_s > self._deadline_s:
            what = "does not complete the connection" if self.state == "connecting" else "does not begin to serve"
            self._lose(f"{self.name} {what} in time.", now_s)
        elif self.state == "connected" and now_s - self._heard_s > SILENCE_DEADLINE_S:
            self._lose(f"{self.name} has not answered for {SILENCE_DEADLINE_S:.0f} s.", now_s)
        elif self.state == "connected" and now_s >= self._ping_at_s:
            self._ping_at_s = now_s + PING_INTERVAL_S
            self._pings += 1
            self.send(Ping(self._pings), now_s)

    def close(self) -> None:
        """Close the sockets."""
        if self._monitor is not None and self._socket is not None:
            self._poller.unregister(self._monitor.socket)
            self._poller.unregister(self._socket)
            self._monitor.close()
            self._socket.close(0)
        self._monitor = self._socket = None
        self.state = "waiting"
        self.attached_epoch = -1
        self._deadline_s = None

    def owns(self, socket: Any) -> Literal["monitor", "data"] | None:
        """Which of this link's sockets a poller has named."""
        if self._monitor is not None and socket is self._monitor.socket:
            return "monitor"
        return "data" if socket is self._socket and socket is not None else None

    def _take_attached(self, message: Attached, now_s: float) -> None:
        if message.epoch != self._wanted_epoch or self.attached_epoch == message.epoch:
            return
        expected = self.expected
        found = (message.stage, message.first_layer, message.end_layer, message.model_id)
        if message.protocol != PROTOCOL_VERSION:
            self._lose(f"{self.name} speaks version {message.protocol} of the protocol; update it.", now_s)
        elif found != (expected.number, expected.first_layer, expected.end_layer, expected.model_id):
            self._lose(f"{self.name} runs another shard than this gateway expects; deploy the model again.", now_s)
        else:
            self._deadline_s = None
            self._retry_s = FIRST_RETRY_S
            self.device = message.device
            self.attached_epoch = message.epoch
            self._on_attached(self)

    def _lose(self, reason: str, now_s: float) -> None:
        """Close, and try again after a while that doubles until the stage has attached."""
        self.close()
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        self._on_lost(self, reason)
