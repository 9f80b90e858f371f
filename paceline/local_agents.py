"""Agents as processes of this PC, each with a data folder of its own: the fleet of the demo and of ``serve``."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from fleet.child_process import describe_exit, start_child
from fleet.errors import DeployError
from paceline.temporary import uninterrupted

_STOP_S = 10.0
_LOG_TAIL_BYTES = 2000


class LocalAgents:
    """Starts agents on entering the context and stops them, with all that they started, on leaving it.

    They also end when this process is gone, however it ended. Where ``compiled_folder`` has a blob of a stage that they
    run, they import it.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        enrolment_token: str,
        memory_bytes: int | None = None,
        compiled_folder: Path | None = None,
    ) -> None:
        self._folder = folder
        self._names = tuple(names)
        self._token = enrolment_token
        self._memory_bytes = memory_bytes
        self._compiled_folder = compiled_folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalAgents:
        try:
            for name in self._names:
                self._processes[name] = self._start(name)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raise DeployError, with the end of its log, where an agent has ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise DeployError(
                    f"The agent {name} is gone, {describe_exit(process.returncode)}: {self._log_tail(name)}"
                )

    def stop(self) -> None:
        """Ask all agents to stop, by closing their standard input, wait, and end those that don't."""
        with uninterrupted():
            for process in self._processes.values():
                assert process.stdin is not None
                process.stdin.close()
            for process in self._processes.values():
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._processes.clear()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        data_dir = self._folder / name
        data_dir.mkdir(parents=True, exist_ok=True)
        arguments = ["--data-dir", str(data_dir), "--name", name, "--enrol", "-", "--stop-with-stdin"]
        if self._memory_bytes is not None:
            arguments += ["--memory", str(self._memory_bytes)]
        if self._compiled_folder is not None:
            arguments += ["--compiled", str(self._compiled_folder.absolute())]
        with self._log_path(name).open("wb") as log:
            process = start_child("agent", arguments, stdout=log, stderr=subprocess.STDOUT)
        assert process.stdin is not None
        # Not as an argument, which every user of this PC could read.
        with contextlib.suppress(BrokenPipeError):  # it ended at once; ``check`` says why
            process.stdin.write(f"{self._token}\n".encode())
            process.stdin.flush()
        return process

    def _log_path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _log_tail(self, name: str) -> str:
        text = self._log_path(name).read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "it wrote no log."
