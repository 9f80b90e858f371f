"""A log that nobody can flood from outside."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOG_INTERVAL_S = 5.0


class LimitedLog:
    """Warnings that anyone can cause by sending rubbish: one every LOG_INTERVAL_S, with a count of those left out."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._last_s = -LOG_INTERVAL_S
        self._left_out = 0

    def warning(self, text: str) -> None:
        """Log it, or count it."""
        now_s = self._clock()
        if now_s - self._last_s < LOG_INTERVAL_S:
            self._left_out += 1
            return
        self._log.warning("%s%s", text, f" ({self._left_out} more like this before)" if self._left_out else "")
        self._last_s = now_s
        self._left_out = 0
