"""Whether a peer is there, as a state machine without clock or sockets: events go in, the next thing to do comes out.

Only the caller's own monotonic clock counts, so a peer whose clock is wrong is as alive as any other. Only answers of
the peer's own loop make it alive: that its address answers, or its process' network thread, proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PeerState = Literal["unknown", "connecting", "authenticated", "alive", "suspect", "lost", "refused"]
"""``authenticated``: the handshake is done, no answer yet. ``suspect``: an answer is overdue, so nothing that the peer
said still holds. ``lost``: given up, reconnecting. ``refused``: it does not admit us, asked again at long intervals."""

Instruction = Literal["connect", "heartbeat", "disconnect"]
"""``disconnect``: close what is left of the connection; ``connect`` follows when its time has come."""

SUSPEND_JUMP_S = 30.0


@dataclass(frozen=True)
class LivenessSettings:
    """Times in seconds; ``suspect_after_s`` and ``lost_after_s`` count from the last answer."""

    heartbeat_interval_s: float = 2.0
    suspect_after_s: float = 4.5
    lost_after_s: float = 7.0
    connect_timeout_s: float = 10.0
    first_retry_s: float = 0.5
    longest_retry_s: float = 10.0
    refused_retry_s: float = 10.0


class Liveness:
    """One peer. Times are of any monotonic clock, in seconds; they must not go back."""

    def __init__(self, settings: LivenessSettings | None = None) -> None:
        self._settings = settings or LivenessSettings()
        self.state: PeerState = "unknown"
        self._since_s = 0.0
        self._last_answer_s = 0.0
        self._last_heartbeat_s = 0.0
        self._next_connect_s = float("-inf")
        self._retry_s = self._settings.first_retry_s
        self._connection_open = False

    def next_instruction(self, now_s: float) -> Instruction | None:
        """What to do now; call again until None, and again at ``next_time_s`` or after any event.

        The instruction counts as carried out: ``connect`` must be answered by ``on_authenticated``, ``on_refused``
        or ``on_disconnected``, and is given up after ``connect_timeout_s``.
        """
        settings = self._settings
        if self.state == "connecting" and now_s >= self._since_s + settings.connect_timeout_s:
            self._lose(now_s)
        if self.state in ("authenticated", "alive", "suspect"):
            if now_s >= self._last_answer_s + settings.lost_after_s:
                self._lose(now_s)
            elif self.state == "alive" and now_s >= self._last_answer_s + settings.suspect_after_s:
                self.state = "suspect"
        if self.state in ("unknown", "lost", "refused"):
            if self._connection_open:
                self._connection_open = False
                return "disconnect"
            if now_s >= self._next_connect_s:
                self.state = "connecting"
                self._since_s = now_s
                self._connection_open = True
                return "connect"
            return None
        if self.state != "connecting" and now_s >= self._last_heartbeat_s + settings.heartbeat_interval_s:
            self._last_heartbeat_s = now_s
            return "heartbeat"
        return None

    def next_time_s(self) -> float:
        """When ``next_instruction`` must be asked again, unless an event comes first."""
        settings = self._settings
        if self.state in ("unknown", "lost", "refused"):
            return float("-inf") if self._connection_open else self._next_connect_s
        if self.state == "connecting":
            return self._since_s + settings.connect_timeout_s
        times = [
            self._last_heartbeat_s + settings.heartbeat_interval_s,
            self._last_answer_s + settings.lost_after_s,
        ]
        if self.state == "alive":
            times.append(self._last_answer_s + settings.suspect_after_s)
        return min(times)

    def on_authenticated(self, now_s: float) -> None:
        """The handshake with the right key succeeded."""
        if self.state != "connecting":
            return
        self.state = "authenticated"
        self._last_answer_s = now_s
        self._last_heartbeat_s = float("-inf")

    def on_answer(self, now_s: float) -> None:
        """The peer's own loop answered a message of this connection."""
        if self.state not in ("authenticated", "alive", "suspect"):
            return
        self.state = "alive"
        self._last_answer_s = now_s
        self._retry_s = self._settings.first_retry_s

    def on_refused(self, now_s: float) -> None:
        """The peer does not admit us, or speaks no version that we do."""
        self.state = "refused"
        self._next_connect_s = now_s + self._settings.refused_retry_s

    def on_disconnected(self, now_s: float) -> None:
        """The connection broke or could not be made."""
        if self.state not in ("unknown", "lost", "refused"):
            self._lose(now_s)

    def on_seen(self, now_s: float) -> None:
        """Discovery saw the peer at an address, or a person approved it: try at once, whatever the back-off says."""
        if self.state in ("unknown", "lost", "refused"):
            self._next_connect_s = now_s
            self._retry_s = self._settings.first_retry_s

    def on_resumed(self, now_s: float) -> None:
        """This PC slept or its network changed: nothing is known of the peer until it answers on a new connection."""
        self.state = "unknown"
        self._next_connect_s = now_s
        self._retry_s = self._settings.first_retry_s

    def _lose(self, now_s: float) -> None:
        self.state = "lost"
        self._next_connect_s = now_s + self._retry_s
        self._retry_s = min(self._retry_s * 2, self._settings.longest_retry_s)


class ResumeDetector:
    """Tells that this PC slept: the wall clock ran on while the monotonic one stood, or both jumped between two calls.

    A wall clock that is set forward looks the same; the price is one new connection per peer.
    """

    def __init__(self, monotonic_s: float, wall_s: float) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def resumed(self, monotonic_s: float, wall_s: float) -> bool:
        """Whether the PC slept since the last call; call it every few seconds."""
        monotonic_jump_s = monotonic_s - self._monotonic_s
        wall_jump_s = wall_s - self._wall_s
        self._monotonic_s, self._wall_s = monotonic_s, wall_s
        return monotonic_jump_s > SUSPEND_JUMP_S or wall_jump_s - monotonic_jump_s > SUSPEND_JUMP_S
