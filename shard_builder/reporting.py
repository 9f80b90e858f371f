"""Tells the caller how far a build is and hears from it when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable

from fleet.build_messages import BuildPhase, BuildProgress
from fleet.errors import CancelledError
from shard_builder.sources.child_work import WorkProgress

_PHASE_ENDS: dict[BuildPhase, float] = {
    "download": 0.1,
    "convert": 0.2,
    "compress": 0.3,
    "analyse": 0.35,
    "write": 0.6,
    "verify": 1.0,
}
"""What share of a build is done when a phase is; one begins where the last that was not skipped ended."""

SETTLED_S = 0.5
"""How long a phase must have run before its rate means something."""


class Reporter:
    """Every report also asks whether to stop."""

    def __init__(self, progress: Callable[[BuildProgress], None] | None, cancelled: Callable[[], bool] | None) -> None:
        self._progress = progress or (lambda _: None)
        self.cancelled = cancelled or (lambda: False)
        self._began: tuple[BuildPhase, float, int] | None = None
        self._phase: BuildPhase | None = None
        self._phase_start = self._fraction = 0.0

    def check(self) -> None:
        """Ends the build where the caller wants that.

        Raises:
            CancelledError: it does.
        """
        if self.cancelled():
            raise CancelledError("The build was stopped; nothing was written.")

    def report(self, phase: BuildPhase, share: float, bytes_done: int = 0, bytes_total: int = 0) -> None:
        """Reports that ``share`` (0 to 1) of a phase is done.

        Raises:
            CancelledError: the caller wants the build to end.
        """
        self.check()
        if phase != self._phase:
            self._phase, self._phase_start = phase, self._fraction
        reached = self._phase_start + (_PHASE_ENDS[phase] - self._phase_start) * min(share, 1.0)
        fraction = self._fraction = max(self._fraction, reached)
        self._progress(
            BuildProgress(
                phase=phase,
                fraction=fraction,
                bytes_done=bytes_done,
                bytes_total=bytes_total,
                bytes_per_second=self._rate(phase, bytes_done),
            )
        )

    def _rate(self, phase: BuildPhase, bytes_done: int) -> float:
        """Bytes per second since the first report of the phase; some of a download may have been there before."""
        now_s = time.monotonic()
        if self._began is None or self._began[0] != phase:
            self._began = phase, now_s, bytes_done
        _, start_s, start_bytes = self._began
        return (bytes_done - start_bytes) / (now_s - start_s) if now_s > start_s + SETTLED_S else 0.0

    def remark(self, phase: BuildPhase, sentence: str) -> None:
        """Tells the person something at the beginning of a phase.

        Raises:
            CancelledError: the caller wants the build to end.
        """
        self.check()
        self._progress(BuildProgress(phase=phase, fraction=self._fraction, remark=sentence))

    def work(self, phase: BuildPhase) -> Callable[[WorkProgress], None]:
        """What hears how far the work of a child process is, for one phase."""
        return lambda progress: self.report(phase, progress.share, progress.bytes_done, progress.bytes_total)

    def finish(self) -> None:
        """Reports that the build is complete, which nothing can undo any more."""
        self._progress(BuildProgress(phase="verify", fraction=1.0))

    def steps(self, phase: BuildPhase, count: int) -> Callable[[], None]:
        """A function that reports one more of ``count`` steps of a phase each time it is called."""
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            self.report(phase, done / count)

        return tick
