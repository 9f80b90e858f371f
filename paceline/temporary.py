"""Temporary folders, and an end in order however often the person presses Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fleet.errors import DataFolderError


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let the block, which must be short, finish: Ctrl-C and requests to terminate are ignored meanwhile.

    For the main thread, as all that handles signals.
    """
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed afterwards, even if Ctrl-C is pressed again meanwhile.

    While it is there, a request to terminate (SIGTERM) ends the process as Ctrl-C does: in order.

    Raises:
        DataFolderError: none can be made.
    """
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        try:
            # On Windows a file may still be mapped for a moment after its process has ended.
            folder = tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True)
        except OSError as error:
            raise DataFolderError(
                f"No temporary folder can be made: {error.strerror}. Name one with space that can be written to in the "
                "environment variable TMPDIR (on Windows: TEMP)."
            ) from None
        try:
            yield Path(folder.name)
        finally:
            with uninterrupted():
                folder.cleanup()
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
