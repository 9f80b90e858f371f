"""How a stage's process takes memory from the system, so that it gives back what it no longer needs.

glibc takes large blocks from the system one by one and gives them back when they are freed, but raises the size from
which it does so, up to 32 MiB, each time such a block is freed (``mallopt(3)``, ``M_MMAP_THRESHOLD``). A KV cache
grows by moving into a larger block, so a stage kept that of the smaller ones: 26 of 176 MB for half of a small model
after a prompt of 1,024 tokens. A threshold that is set stays. Windows gives large blocks back by itself.
"""

from __future__ import annotations

import ctypes
import logging
import sys

_M_MMAP_THRESHOLD = -3
_THRESHOLD_BYTES = 128 << 10
"""glibc's own at the start of a process."""
_log = logging.getLogger(__name__)


def return_freed_blocks() -> None:
    """Keep the size from which freed blocks go back to the system where it is; without effect but on glibc."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):  # another C library
        return
    if not library.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES):
        _log.warning("the C library does not take a threshold for large blocks")
