"""Long work of other people's libraries, in a child process of its own.

Converters hold a model in memory more than once, print what they like, and may end the process when a file is damaged.
The child says how far it is and what came of it in JSON lines on its standard output; whatever its libraries print goes
to standard error. It ends when its parent does.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from fleet.child_process import describe_exit, lower_priority, start_child
from fleet.errors import CancelledError, ModelError, PacelineError

_POLL_S = 0.1
_REASON_CHARACTERS = 300


class WorkProgress(msgspec.Struct, frozen=True, tag="progress"):
    """``share`` (0 to 1) of the work is done."""

    share: float
    bytes_done: int = 0
    bytes_total: int = 0


class WorkDone(msgspec.Struct, frozen=True, tag="done"):
    """The work is complete; ``value`` is what it came to, as text."""

    value: str = ""


class LibraryRefusedError(ModelError):
    """A library said why it does not do the work, rather than that its process came to grief."""


class WorkFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The work ended with a fault: a sentence for a person, or the reason that a library gave."""

    reason: str
    is_sentence: bool


WorkLine = WorkProgress | WorkDone | WorkFailed
Tell = Callable[[WorkProgress], None]


def run_child_work(
    module: str,
    arguments: Sequence[str],
    *,
    complaint: str,
    on_progress: Tell,
    cancelled: Callable[[], bool],
) -> str:
    """Runs ``python -m module`` and returns the value that its work came to.

    Args:
        complaint: what the sentence about a fault begins with, such as "Optimum cannot export X".
        on_progress: hears what the child reports.
        cancelled: asked ten times a second; True kills the child.

    Raises:
        LibraryRefusedError: a library does not do the work; the text gives its reason.
        ModelError: the work failed.
        CancelledError: ``cancelled`` said so.
    """
    with tempfile.TemporaryFile() as log:
        process = start_child(module, arguments, stderr=log)
        assert process.stdin is not None
        assert process.stdout is not None
        lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            while True:
                if cancelled():
                    raise CancelledError("The build was stopped; nothing was written.")
                try:
                    line = lines.get(timeout=_POLL_S)
                except queue.Empty:
                    continue
                if not line:
                    raise ModelError(f"{complaint}: {_last_words(log, process.wait())}.")
                match msgspec.json.decode(line, type=WorkLine):
                    case WorkProgress() as progress:
                        on_progress(progress)
                    case WorkDone(value=value):
                        return value
                    case WorkFailed(reason=reason, is_sentence=is_sentence):
                        if is_sentence:
                            raise ModelError(reason)
                        raise LibraryRefusedError(f"{complaint}: {reason}.")
        finally:
            process.kill()
            process.wait()
            reader.join()
            process.stdin.close()
            process.stdout.close()


def _read_lines(stream: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(b"")


def _last_words(log: IO[bytes], code: int) -> str:
    """Why a child ended without an outcome."""
    if code in (-signal.SIGTERM, -9):  # Windows has no SIGKILL, and no process that ends so
        return f"{describe_exit(code)}, most likely because the PC's memory was full"
    log.seek(0)
    text = log.read().decode(errors="replace")
    return plain_line(text) or describe_exit(code)


def plain_line(text: str) -> str:
    """The last line that says something, without OpenVINO's places in its source."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Exception from", "While validating", "Check '"))]
    return kept[-1].rstrip(". ")[:_REASON_CHARACTERS] if kept else ""


def do_child_work(work: Callable[[Sequence[str], Tell], str]) -> int:
    """The main function of a child's module: does the work with the process's arguments; the exit code."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print must not be taken for our lines
    # A terminal sends Ctrl-C to the whole group; the parent decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lower_priority()
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def write(line: WorkLine) -> None:
        output.write(msgspec.json.encode(line) + b"\n")

    try:
        write(WorkDone(work(sys.argv[1:], write)))
    except PacelineError as error:
        write(WorkFailed(str(error), is_sentence=True))
        return 1
    except Exception as error:
        # Whatever a library raises is the reason that the person reads.
        write(WorkFailed(plain_line(str(error)) or type(error).__name__, is_sentence=False))
        return 1
    return 0


def _end_with_parent() -> None:
    # Not through sys.stdin: a thread that waits in it holds its lock, which Python needs to end.
    while os.read(0, 4096):
        pass
    os._exit(1)
