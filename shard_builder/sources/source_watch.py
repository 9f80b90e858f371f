"""Notices that a model's files change while they are read: what is made of them then belongs to no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fleet.errors import ModelError


@contextmanager
def unchanged(files: Sequence[Path]) -> Iterator[None]:
    """Within it the files must keep their lengths and times of change.

    Raises:
        ModelError: one did not. It comes in place of any other that the block raises, because it explains that one.
    """
    before = [_stamp(file) for file in files]

    def check() -> None:
        for file, stamp in zip(files, before, strict=True):
            if _stamp(file) != stamp:
                raise ModelError(f"{file} changed while it was being cut; build again.") from None

    try:
        yield
    except ModelError:
        check()
        raise
    check()


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
