"""Tells the caller how far a build is and hears from it when to stop."""

from __future__ import annotations

from collections.abc import Callable

from fleet.build_messages import BuildPhase, BuildProgress
from fleet.errors import CancelledError

_PHASES: dict[BuildPhase, tuple[float, float]] = {
    "convert": (0.0, 0.3),
    "analyse": (0.3, 0.35),
    "write": (0.35, 0.6),
    "verify": (0.6, 1.0),
}


class Reporter:
    """Every report also asks whether to stop."""

    def __init__(self, progress: Callable[[BuildProgress], None] | None, cancelled: Callable[[], bool] | None) -> None:
        self._progress = progress or (lambda _: None)
        self.cancelled = cancelled or (lambda: False)

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
        start, end = _PHASES[phase]
        fraction = start + (end - start) * min(share, 1.0)
        self._progress(BuildProgress(phase=phase, fraction=fraction, bytes_done=bytes_done, bytes_total=bytes_total))

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
