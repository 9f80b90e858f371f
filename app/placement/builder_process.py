"""Runs the shard builder as a child process and tells how far it is."""

from __future__ import annotations

import sys

import msgspec
from PySide6.QtCore import QObject, QProcess, QTimer, Signal

from fleet.build_messages import BuildDone, BuilderLine, BuildFailed, BuildProgress, BuildRequest

_KILL_AFTER_MS = 8_000
_LOG_LIMIT = 4000


class BuilderProcess(QObject):
    """One build. Its end is always told by exactly one of ``done`` and ``failed``.

    Signals:
        progressed: how far it is (``BuildProgress``).
        done: the shard folder is complete (``BuildDone``).
        failed: a sentence for the person, details for a report, and whether the person stopped it.
    """

    progressed = Signal(object)
    done = Signal(object)
    failed = Signal(str, str, bool)

    def __init__(self, parent: QObject | None = None, *, command: tuple[str, ...] = ("-m", "shard_builder")) -> None:
        super().__init__(parent)
        self._decoder = msgspec.json.Decoder(BuilderLine)
        self._outcome: BuildDone | BuildFailed | None = None
        self._log = ""
        self._cancelled = False
        self._told = False
        self._process = QProcess(self)
        self._process.setProgram(sys.executable)
        self._process.setArguments(list(command))
        self._process.readyReadStandardOutput.connect(self._read_lines)
        self._process.readyReadStandardError.connect(self._read_log)
        self._process.finished.connect(self._on_finished)
        self._process.errorOccurred.connect(self._on_error)
        self._kill = QTimer(self)
        self._kill.setSingleShot(True)
        self._kill.setInterval(_KILL_AFTER_MS)
        self._kill.timeout.connect(self._process.kill)

    @property
    def running(self) -> bool:
        return self._process.state() != QProcess.ProcessState.NotRunning

    def start(self, request: BuildRequest) -> None:
        """Begin. The child's input stays open: closing it is how a build is cancelled."""
        self._process.start()
        self._process.write(msgspec.json.encode(request) + b"\n")

    def cancel(self) -> None:
        """Ask the builder to stop; it is killed where it does not."""
        if self.running:
            self._cancelled = True
            self._process.closeWriteChannel()
            self._kill.start()

    def _read_lines(self) -> None:
        while self._process.canReadLine():
            line = bytes(self._process.readLine().data()).strip()
            if line:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            message = self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._remember(line.decode(errors="replace"))  # a library may print to standard output
            return
        if isinstance(message, BuildProgress):
            self.progressed.emit(message)
        else:
            self._outcome = message
            self._process.closeWriteChannel()

    def _read_log(self) -> None:
        self._remember(bytes(self._process.readAllStandardError().data()).decode(errors="replace"))

    def _remember(self, text: str) -> None:
        self._log = (self._log + text)[-_LOG_LIMIT:]

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error == QProcess.ProcessError.FailedToStart:
            self._tell_failure(
                self.tr("The shard builder could not be started: {reason}").format(reason=self._process.errorString())
            )

    def _on_finished(self, code: int, _status: QProcess.ExitStatus) -> None:
        self._kill.stop()
        self._read_lines()
        self._read_log()
        outcome = self._outcome
        if isinstance(outcome, BuildDone):
            self._told = True
            self.done.emit(outcome)
        elif isinstance(outcome, BuildFailed):
            self._tell_failure(outcome.message, cancelled=outcome.cancelled)
        elif self._cancelled:
            self._tell_failure(self.tr("The build was stopped."), cancelled=True)
        else:
            self._tell_failure(
                self.tr(
                    "The shard builder ended unexpectedly (exit code {code}). There may be too little memory."
                ).format(code=code)
            )

    def _tell_failure(self, message: str, *, cancelled: bool = False) -> None:
        if not self._told:
            self._told = True
            self.failed.emit(message, f"{message}\n{self._log}".strip(), cancelled or self._cancelled)
