"""The harness of a child process: configuration in, status lines out, and an end as soon as the parent is gone.

The conversation is described in :mod:`fleet.process`. A module that is run as a child calls :func:`ignore_interrupts`
before its slow imports and then :func:`run_child`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec
import psutil

from fleet.child_process import lower_priority
from fleet.errors import PacelineError
from fleet.node import Port
from fleet.process import ChildStatus

EXIT_FAILED = 1
"""A PacelineError ended the child; its sentence is in the last status line."""
EXIT_BAD_CONFIG = 2
EXIT_INTERNAL = 3
"""An error that nobody expected; the traceback is on standard error."""

MAX_CONFIG_BYTES = 1 << 20
STOP_GRACE_S = 1.0
"""How long a child may take to close its sockets once its parent is gone, before it is ended where it stands."""
MAX_DETAIL_CHARACTERS = 4000

_STDIN = 0
_STDOUT = 1
_STDERR = 2
_log = logging.getLogger(__name__)

ConfigType = TypeVar("ConfigType", bound=msgspec.Struct)
State = Literal["starting", "ready", "degraded", "failed"]


class ChildContext:
    """What the harness gives to a child's main function. All methods may be called from any thread."""

    def __init__(self, status_descriptor: int) -> None:
        self.stopping = threading.Event()
        """Set when the child shall end."""
        self._status_descriptor = status_descriptor
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def status(
        self,
        state: State,
        detail: str = "",
        *,
        port: Port | None = None,
        http_port: Port | None = None,
        loaded: str = "",
    ) -> None:
        """Write a status line. A parent that no longer reads stops the child."""
        line = ChildStatus(
            state=state,
            detail=detail[:MAX_DETAIL_CHARACTERS],
            port=port,
            http_port=http_port,
            loaded=loaded[:MAX_DETAIL_CHARACTERS],
        )
        data = msgspec.json.encode(line) + b"\n"
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._status_descriptor, data) :]
            except OSError:
                broken = True
            else:
                broken = False
        if broken:
            self.stop()

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` (from another thread) when the child shall end; at once if it shall already."""
        with self._lock:
            if not self.stopping.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def stop(self) -> None:
        """Ask the child's main function to return."""
        with self._lock:
            if self.stopping.is_set():
                return
            self.stopping.set()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()


def ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent, which closes the pipe when it has heard it.

    A terminal sends it to the whole process group, and a child that dies of it prints a traceback over the parent's
    last words.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "win32":
        signal.signal(signal.SIGBREAK, signal.SIG_IGN)


def pin_to(cpus: Sequence[int]) -> None:
    """Run on these logical processors only. Threads that are started later inherit it; where it fails, it is logged."""
    if sys.platform == "darwin":
        _log.warning("this system does not pin processes to processors")
        return
    try:
        psutil.Process().cpu_affinity(list(cpus))
    except (psutil.Error, OSError, ValueError) as error:
        _log.warning("this process cannot be pinned to processors %s: %s", list(cpus), error)


def run_child(config_type: type[ConfigType], main: Callable[[ConfigType, ChildContext], None]) -> int:
    """Read the configuration, run ``main`` until it returns or the parent closes the pipe, and give the exit code.

    ``main`` runs in the main thread. It writes ``ready`` itself and returns soon after ``context.stopping`` is set; a
    child that is still there :data:`STOP_GRACE_S` later, in the middle of an inference, say, is ended by the harness.
    Standard output carries status lines only: whatever else is printed there, by libraries too, goes to standard error.
    """
    status_descriptor = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    context = ChildContext(status_descriptor)
    try:
        config = msgspec.json.decode(_read_line(), type=config_type)
    except msgspec.MsgspecError as error:
        # The text of the line is never repeated: it holds a secret key.
        context.status("failed", f"The configuration of this process cannot be read: {error}.")
        return EXIT_BAD_CONFIG
    if getattr(config, "low_priority", False):
        lower_priority()
    threading.Thread(target=_watch_parent, args=(context,), name="parent watch", daemon=True).start()
    context.status("starting")
    try:
        main(config, context)
    except PacelineError as error:
        _log.error("%s", error)
        context.status("failed", str(error))
        return EXIT_FAILED
    except Exception as error:
        traceback.print_exc()
        context.status("failed", f"The process met an internal error ({type(error).__name__}: {error}).")
        return EXIT_INTERNAL
    return 0


def _read_line() -> bytes:
    """The first line of standard input."""
    # os.read and not sys.stdin: a daemon thread that sits in a buffered reader aborts the interpreter's shutdown.
    data = bytearray()
    while b"\n" not in data and len(data) <= MAX_CONFIG_BYTES:
        part = os.read(_STDIN, 65536)
        if not part:
            break
        data += part
    return bytes(data).split(b"\n", 1)[0]


def _watch_parent(context: ChildContext) -> None:
    """Wait for end-of-file on standard input, then end the process, politely at first."""
    with contextlib.suppress(OSError):
        while os.read(_STDIN, 65536):
            pass
    timer = threading.Timer(STOP_GRACE_S, _exit_now)
    timer.daemon = True
    timer.start()
    context.stop()


def _exit_now() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(0)
