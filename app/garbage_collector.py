"""Keeps Python's garbage collector in the window's thread.

Python collects cyclic garbage in whichever thread happens to allocate. Where the garbage holds Qt objects, that would
destroy them in the network's thread, which Qt forbids. So the automatic collection is switched off while the window
is open, and the window's thread collects on a timer, by the same thresholds.
"""

from __future__ import annotations

import gc

from PySide6.QtCore import QObject, QTimer

_INTERVAL_MS = 1000


class GarbageCollector(QObject):
    """Collects from its own thread until ``stop``, which gives the automatic collection back."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._thresholds = gc.get_threshold()
        self._was_enabled = gc.isenabled()
        gc.disable()
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.collect)
        self._timer.start(_INTERVAL_MS)

    def collect(self) -> None:
        """Collect the oldest generation that is due, and the younger ones with it."""
        counts = gc.get_count()
        for generation in (2, 1, 0):
            if counts[generation] > self._thresholds[generation]:
                gc.collect(generation)
                return

    def stop(self) -> None:
        self._timer.stop()
        gc.collect()
        if self._was_enabled:
            gc.enable()
