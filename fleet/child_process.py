"""Starting child processes the same way on Linux and Windows, and giving way to the person's own programs.

A child is a Python module of ours. It lives as long as its standard input is open, so that it ends when its parent
does, however the parent ended. A Ctrl-C in the parent's terminal must not reach it: the parent decides when it stops.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

import psutil

_NICENESS = 10
_log = logging.getLogger(__name__)


def start_child(
    module: str,
    arguments: Sequence[str] = (),
    *,
    stdout: int | IO[bytes] | None = subprocess.PIPE,
    stderr: int | IO[bytes] | None = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Run ``python -m module`` with a pipe for standard input, and for the outputs too unless told otherwise.

    Raises:
        OSError: the process cannot be started.
    """
    creation_flags = 0
    if sys.platform == "win32":
        creation_flags = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        creationflags=creation_flags,
        start_new_session=True,  # without effect on Windows
    )


def describe_exit(code: int) -> str:
    """A child's exit code in words."""
    if code == 0:
        return "it ended without saying why"
    if code < 0:
        return f"it was ended by signal {-code}"
    if code >= 0xC0000000:
        return f"it crashed with Windows error 0x{code:08X}"
    return f"it ended with exit code {code}"


def lower_priority() -> None:
    """Let the person's own programs go first. Threads that are started later inherit it."""
    process = psutil.Process()
    try:
        if sys.platform == "win32":
            process.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
        elif process.nice() < _NICENESS:
            process.nice(_NICENESS)
    except psutil.Error as error:
        _log.warning("the priority of this process cannot be lowered: %s", error)
