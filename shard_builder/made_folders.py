"""Makes folders for what may fail, so that none stays behind that was made for nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """The folder and those above it are there within; afterwards those that were made and are empty are gone.

    Raises:
        OSError: it cannot be made.
    """
    made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in made:
            # One that holds what was made, or something that came meanwhile, stays.
            with contextlib.suppress(OSError):
                path.rmdir()
