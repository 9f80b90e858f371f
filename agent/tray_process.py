"""The tray icon as a process of its own, so that a fault in Qt or in the desktop never takes the agent with it."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from fleet.child_process import start_child

STOP_S = 3.0


class TrayProcess:
    """Starts the tray; it ends when it is closed, or when the agent ends in whatever way."""

    def __init__(self, data_dir: Path) -> None:
        arguments = ["--data-dir", str(data_dir), "--stop-with-stdin"]
        self._process = start_child("agent.tray", arguments, stdout=None, stderr=None)

    def wait(self, timeout_s: float) -> int:
        """Its exit code, once it has ended by itself.

        Raises:
            subprocess.TimeoutExpired: it has not, within ``timeout_s``.
        """
        return self._process.wait(timeout_s)

    def close(self) -> None:
        """End the tray and wait for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
