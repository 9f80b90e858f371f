"""The life of one supervised child process, as a synchronous state machine: events in, instructions out, no clock of
its own. :mod:`agent.supervisor` carries the instructions out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleet.process import ChildStatus

ChildState = Literal["starting", "ready", "degraded", "restarting", "failed", "stopping", "stopped"]

FIRST_BACK_OFF_S = 0.5
LARGEST_BACK_OFF_S = 30.0
QUICK_DEATHS_LIMIT = 5
"""After so many deaths in a row without ``STEADY_S`` of being ready in between, the child counts as failed."""
STEADY_S = 60.0
START_DEADLINE_S = 900.0
"""A first compilation for an NPU takes minutes; one that takes this long hangs."""
INPUT_CLOSED_GRACE_S = 5.0
TERMINATE_GRACE_S = 3.0


@dataclass(frozen=True)
class Spawn:
    """Start the process; with these ports if it had them before, so that those who know it find it again."""

    port: int | None
    http_port: int | None


@dataclass(frozen=True)
class CloseInput:
    """Close the process's standard input, which asks it to end."""


@dataclass(frozen=True)
class Terminate:
    """End the process (SIGTERM; on Windows at once)."""


@dataclass(frozen=True)
class Kill:
    """End the process without its consent."""


Instruction = Spawn | CloseInput | Terminate | Kill


class ChildMachine:
    """One child. Call ``start`` once; then ``status``, ``exited``, ``tick`` and ``stop`` as things happen.

    Attributes:
        state: see :data:`ChildState`; ``failed`` and ``stopped`` are final.
        detail: why, in words.
        port: where the child listens, kept over restarts.
        restarts: how often it was started again.
        wake_at: when ``tick`` wants to be called next, on the caller's clock; None if nothing is due.
    """

    def __init__(self, port: int | None = None, http_port: int | None = None) -> None:
        self.state: ChildState = "starting"
        self.detail = ""
        self.port = port
        self.http_port = http_port
        self.loaded = ""
        self.restarts = 0
        self.wake_at: float | None = None
        self._running = False
        self._was_ready = False
        self._ready_since: float | None = None
        self._quick_deaths = 0
        self._last_words = ""
        self._gave_up = False
        self._stop_steps: list[tuple[float, Instruction]] = []

    @property
    def finished(self) -> bool:
        """Whether nothing runs and nothing will."""
        return self.state in ("failed", "stopped") and not self._running

    def start(self, now_s: float) -> list[Instruction]:
        """The first start."""
        return self._spawn(now_s)

    def status(self, status: ChildStatus, now_s: float) -> list[Instruction]:
        """The child says how it is."""
        if self.state in ("failed", "stopping", "stopped") or not self._running:
            return []
        match status.state:
            case "starting":
                self.detail = status.detail or self.detail
            case "ready" | "degraded":
                self.state = status.state
                self.detail = status.detail
                self.port = status.port or self.port
                self.http_port = status.http_port or self.http_port
                self.loaded = status.loaded
                self._was_ready = True
                if self._ready_since is None:
                    self._ready_since = now_s
                self.wake_at = None
            case "failed":
                self._last_words = status.detail
                # A reason that it gives before it ever worked does not go away by trying again.
                self._gave_up = not self._was_ready
                self.wake_at = now_s + INPUT_CLOSED_GRACE_S
        return []

    def exited(self, why: str, now_s: float) -> list[Instruction]:
        """The process is gone; ``why`` is its exit in words. Its own last words come first, if it had any."""
        self._running = False
        self._stop_steps = []
        self.wake_at = None
        if self.state in ("stopping", "stopped"):
            self.state = "stopped"
            return []
        reason = self._last_words or why
        self._last_words = ""
        steady = self._ready_since is not None and now_s - self._ready_since >= STEADY_S
        self._ready_since = None
        self._quick_deaths = 1 if steady else self._quick_deaths + 1
        self.detail = reason
        if self._gave_up or self._quick_deaths >= QUICK_DEATHS_LIMIT:
            self.state = "failed"
            if not self._gave_up:
                self.detail = f"It ended {self._quick_deaths} times in a row; the last time: {reason}"
            return []
        self.state = "restarting"
        self.wake_at = now_s + min(LARGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** (self._quick_deaths - 1))
        return []

    def not_started(self, why: str, now_s: float) -> list[Instruction]:
        """The operating system refused to start the process."""
        return self.exited(why, now_s)

    def stop(self, now_s: float) -> list[Instruction]:
        """End it: close its input, later terminate it, later kill it."""
        if self.state in ("stopping", "stopped"):
            return []
        if not self._running:
            self.state = "stopped"
            self.wake_at = None
            return []
        self.state = "stopping"
        self._stop_steps = [
            (now_s + INPUT_CLOSED_GRACE_S, Terminate()),
            (now_s + INPUT_CLOSED_GRACE_S + TERMINATE_GRACE_S, Kill()),
        ]
        self.wake_at = self._stop_steps[0][0]
        return [CloseInput()]

    def tick(self, now_s: float) -> list[Instruction]:
        """Time has passed."""
        if self.wake_at is None or now_s < self.wake_at:
            return []
        self.wake_at = None
        if self.state == "stopping":
            if not self._stop_steps:
                return []
            _, instruction = self._stop_steps.pop(0)
            self.wake_at = self._stop_steps[0][0] if self._stop_steps else None
            return [instruction]
        if self._running:
            self._last_words = self._last_words or f"it was not ready within {START_DEADLINE_S:.0f} s"
            return [Kill()]
        self.restarts += 1
        return self._spawn(now_s)

    def _spawn(self, now_s: float) -> list[Instruction]:
        self.state = "starting" if self.restarts == 0 else "restarting"
        self._running = True
        self.wake_at = now_s + START_DEADLINE_S
        return [Spawn(self.port, self.http_port)]
