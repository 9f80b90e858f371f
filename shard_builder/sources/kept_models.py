"""Keeps converted models for the next build: made aside, put in place whole, found again by what they were made of."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from fleet.data_dir import default_data_dir
from fleet.errors import ModelError
from shard_builder.made_folders import made_folder
from shard_builder.reporting import Reporter
from shard_builder.sources.child_work import LibraryRefusedError
from shard_builder.stream_faults import stream_fault

_SCRATCH = re.compile(r"\.converting-(\d+)-")
CONVERT_ANYWAY_VARIABLE = "PACELINE_CONVERT_ANYWAY"
"""Where it is set, a conversion starts although the PC seems to have too little memory for it."""


def default_work_folder() -> Path:
    """Where converted models are kept."""
    return default_data_dir() / "converted-models"


def conversion_key(name: str, files: Iterable[Path], packages: Iterable[str], *details: str) -> str:
    """Changes with the files' places, lengths and times, with the versions of the packages, and with the details.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}.") from None
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    for package in packages:
        digest.update(f"{package} {_installed(package)}\0".encode())
    for detail in details:
        digest.update(f"{detail}\0".encode())
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)[:60]}-{digest.hexdigest()[:16]}"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def keep(destination: Path, needed_bytes: int, what: str, make: Callable[[Path], None]) -> Path:
    """The folder ``destination``, made by ``make`` in a folder aside where it is not there yet.

    Args:
        needed_bytes: free space without which it is not begun.
        what: what the sentence about a full disk begins with, such as "Converting X".

    Raises:
        ModelError: the disk is too full or cannot be written, or whatever ``make`` raises. Nothing stays behind.
    """
    if destination.is_dir():
        return destination
    parent = destination.parent
    with ExitStack() as stack:
        try:
            stack.enter_context(made_folder(parent))
            _remove_abandoned(parent)
            free = shutil.disk_usage(parent).free
            if free < needed_bytes:
                raise ModelError(
                    f"{what} needs about {needed_bytes:,} bytes on the disk of {parent}, which has {free:,} free."
                )
            scratch = Path(tempfile.mkdtemp(prefix=f".converting-{os.getpid()}-", dir=parent))
        except OSError as error:
            raise ModelError(f"{parent} cannot be written: {error.strerror}.") from None
        try:
            make(scratch)
            _put_in_place(scratch, destination)
        except OSError as error:
            raise ModelError(f"{what} failed: {error.strerror} ({error.filename or parent}).") from None
        except LibraryRefusedError as error:
            fault = stream_fault(str(error), parent)
            if fault is None:
                raise
            raise ModelError(f"{what} failed: {fault.strerror} ({parent}).") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return destination


def _put_in_place(scratch: Path, destination: Path) -> None:
    try:
        scratch.rename(destination)
    except OSError:
        if not destination.is_dir():  # else another build made the same meanwhile
            raise


def _remove_abandoned(parent: Path) -> None:
    """What processes that were killed left behind."""
    for path in parent.iterdir():
        found = _SCRATCH.match(path.name)
        if found and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)


def _gigabytes(needed_bytes: int) -> str:
    """Rounded up to a tenth, since a need of '0.0 GB' would read as none."""
    return f"{math.ceil(needed_bytes / 1e8) / 10:.1f}"


def announce_needs(reporter: Reporter, what: str, memory_bytes: int, disk_bytes: int) -> None:
    """Says what a conversion will need before it starts, and refuses one that would run the PC out of memory.

    Raises:
        ModelError: less memory is available than the conversion will need.
    """
    available = psutil.virtual_memory().available
    reporter.remark(
        "convert",
        f"{what} needs about {_gigabytes(memory_bytes)} GB of memory ({available / 1e9:.1f} GB are available) and "
        f"{_gigabytes(disk_bytes)} GB of disk.",
    )
    if available < memory_bytes and not os.environ.get(CONVERT_ANYWAY_VARIABLE):
        raise ModelError(
            f"{what} needs about {memory_bytes:,} bytes of memory, and {available:,} are available: close other "
            f"programs, convert it on a larger PC, or set {CONVERT_ANYWAY_VARIABLE}=1 to try all the same."
        )
