"""The folder that holds a node's identity, what it trusts, and its store; and how files in it are written."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from fleet.errors import DataFolderError

HOME_VARIABLE = "PACELINE_HOME"
LOCK_TIMEOUT_S = 20.0


def default_data_dir() -> Path:
    """``PACELINE_HOME`` where it is set, else the platform's folder for this user's application data."""
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    return platformdirs.user_data_path("paceline", appauthor=False)


def create_data_dir(data_dir: Path) -> Path:
    """Creates the folder, readable by its owner alone, and returns it.

    Raises:
        DataFolderError: it cannot be created.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise DataFolderError(f"The data folder {data_dir} is a file; name a folder with --data-dir.") from None
    except OSError as error:
        raise DataFolderError(f"The data folder {data_dir} cannot be created: {error.strerror}.") from None
    return data_dir


def write_private(path: Path, content: bytes) -> None:
    """Replaces a file in one step; only its owner may read it, and a crash leaves the old or the new content.

    On Windows the mode has no effect: there the user's own profile folder keeps other users out.

    Raises:
        DataFolderError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DataFolderError(f"{path} cannot be written: {error.strerror}.") from None


def read_file(path: Path) -> bytes | None:
    """The content of a file; None where there is no such file.

    Raises:
        DataFolderError: the file is there and cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataFolderError(f"{path} cannot be read: {error.strerror}.") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other processes and threads of this PC from changing a file while the block reads and replaces it.

    Raises:
        DataFolderError: another process holds the lock for too long, or it cannot be made.
    """
    try:
        with FileLock(path.with_name(f"{path.name}.lock"), timeout=LOCK_TIMEOUT_S):
            yield
    except Timeout:
        raise DataFolderError(f"{path} is in use by another process; try again when that has ended.") from None
