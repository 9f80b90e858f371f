"""How fast a transfer runs and how long it still takes. Free of Qt."""

from __future__ import annotations

from math import exp

_SMOOTHING_S = 4.0
"""Older samples weigh 1/e after this time."""
_STALLED_S = 8.0
_TRUSTED_AFTER_S = 1.0
"""A time left from less than this much measuring would mislead."""


class TransferMeter:
    """Takes the bytes received so far whenever they are known; bytes that were held beforehand do not count."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0
        self._last_bytes = 0
        self._rate: float | None = None

    def update(self, done_bytes: int, now_s: float) -> None:
        """``done_bytes`` have arrived by ``now_s`` (of a monotonic clock)."""
        if self._first_s is None or done_bytes < self._last_bytes:
            self._first_s, self._last_s, self._last_bytes, self._rate = now_s, now_s, done_bytes, None
            return
        elapsed = now_s - self._last_s
        if done_bytes == self._last_bytes or elapsed <= 0:
            return
        sample = (done_bytes - self._last_bytes) / elapsed
        weight = 1 - exp(-elapsed / _SMOOTHING_S)
        self._rate = sample if self._rate is None else self._rate + weight * (sample - self._rate)
        self._last_s, self._last_bytes = now_s, done_bytes

    def bytes_per_second(self, now_s: float) -> float | None:
        """The smoothed rate; None while it is unknown or nothing arrives."""
        return None if self._rate is None or now_s - self._last_s > _STALLED_S else self._rate

    def seconds_left(self, total_bytes: int, now_s: float) -> float | None:
        """Time until ``total_bytes`` are there at the present rate; None while that cannot be said."""
        rate = self.bytes_per_second(now_s)
        if not rate or self._first_s is None or self._last_s - self._first_s < _TRUSTED_AFTER_S:
            return None
        return max(total_bytes - self._last_bytes, 0) / rate
