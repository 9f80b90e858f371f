"""What changes all the time: processor load, free memory, free disk, battery."""

from __future__ import annotations

from pathlib import Path

import psutil

from fleet.node import LiveLoad


class LoadReader:
    """Reads the load; the processor's share is that since the call before."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        psutil.cpu_percent(interval=None)  # the first call has nothing to compare with and returns 0

    def read(self) -> LiveLoad:
        """The load now. Takes well under a millisecond, so it may be called in an event loop."""
        battery = _battery()
        return LiveLoad(
            cpu_percent=min(100.0, max(0.0, psutil.cpu_percent(interval=None))),
            memory_free_bytes=int(psutil.virtual_memory().available),
            disk_free_bytes=int(psutil.disk_usage(str(self._data_dir)).free),
            on_battery=battery is not None and not battery[1],
            battery_percent=battery[0] if battery is not None else None,
        )


def _battery() -> tuple[float, bool] | None:
    """Charge in percent and whether mains power is on; None on a PC without a battery."""
    if not hasattr(psutil, "sensors_battery"):
        return None
    state = psutil.sensors_battery()
    if state is None:
        return None
    return min(100.0, max(0.0, float(state.percent))), state.power_plugged is not False
