"""Tells a disk that cannot be written from a model that OpenVINO refuses.

OpenVINO writes files through C++ streams. Where one fails, because the disk is full most of all, the error names
neither the file nor the reason, and looks like any other of OpenVINO's.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL_BELOW_BYTES = 16 << 20
"""With less than this free a disk was full: OpenVINO may have removed its unfinished file, a graph of a few MiB."""
_STREAM_WORD = "iostream"
"""In what() of std::ios_base::failure, both of libstdc++ and of Microsoft's library."""


def stream_fault(words: str, folder: Path) -> OSError | None:
    """What the system would have said of a failed stream into ``folder``; None where OpenVINO's words are of no stream.

    Args:
        words: of OpenVINO's error, or a sentence that has them.
        folder: where OpenVINO wrote.

    Returns:
        ENOSPC where the folder's disk has no space left, else EIO.
    """
    if _STREAM_WORD not in words:
        return None
    number = errno.ENOSPC if shutil.disk_usage(folder).free < FULL_BELOW_BYTES else errno.EIO
    return OSError(number, os.strerror(number))


@contextmanager
def told_of_streams(folder: Path) -> Iterator[None]:
    """Within it, OpenVINO's failed streams into ``folder`` raise OSError as Python's own do."""
    try:
        yield
    except RuntimeError as error:
        fault = stream_fault(str(error), folder)
        if fault is None:
            raise
        raise fault from None
