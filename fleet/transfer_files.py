"""Where a transfer's bytes land: files under construction, and beside each a journal of the chunks that are written.

The journal only saves work. What it claims is proved by hash before it counts, so a journal that a crash left behind
or ahead of its file costs a fetch and never lets wrong bytes through.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fleet.errors import CancelledError, TransferError
from fleet.transfer_machine import ChunkMachine, Fetch

_BLOCK_BYTES = 1 << 20
_PROBE_BYTES = 4096
_MB = 1_000_000


@dataclass(frozen=True)
class Wanted:
    """Bytes to fetch by their SHA-256, and where they belong: ``offset`` of the file ``path`` under construction."""

    sha256: str
    bytes: int
    path: Path
    offset: int = 0


def journal_of(path: Path) -> Path:
    """The journal beside a file under construction; whoever gives the file up removes both."""
    return path.with_name(f"{path.name}.journal")


class PartFiles:
    """The files of one transfer. Methods block on the disk and belong into threads: ``write`` and ``forget`` into
    one, ``is_right`` into any.

    ``cancelled`` may be set from any thread: what reads for long then raises CancelledError.
    """

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = tuple(wanted)
        self._files: dict[Path, BinaryIO] = {}
        self._journals: dict[Path, BinaryIO] = {}
        self.cancelled = threading.Event()

    def open(self, machine: ChunkMachine) -> tuple[set[int], dict[int, set[int]]]:
        """Opens everything, reserves the disk space, and returns the pieces that are there and right, and by piece
        the chunks that are there and unproved.

        Raises:
            TransferError: the disk is too full, or a file cannot be opened.
        """
        ends: dict[Path, int] = {}
        for piece in self._wanted:
            ends[piece.path] = max(ends.get(piece.path, 0), piece.offset + piece.bytes)
        sizes = {path: path.stat().st_size if path.exists() else None for path in ends}
        self._check_space(ends, sizes)
        verified: set[int] = set()
        written: dict[int, set[int]] = {}
        for path, end in ends.items():
            journalled = self._read_journal(path) if sizes[path] is not None else None
            try:
                self._files[path] = self._open_file(path, end, sizes[path])
                self._journals[path] = journal_of(path).open("ab" if journalled is not None else "wb", buffering=0)
            except OSError as error:
                self.close()
                raise _disk_error(path, error) from None
            for number, piece in enumerate(self._wanted):
                if piece.path != path or piece.offset + piece.bytes > (sizes[path] or 0):
                    continue
                chunks = journalled.get((piece.sha256, piece.offset), set()) if journalled is not None else None
                if chunks is None:
                    # No journal: an attempt that was complete, or a file from elsewhere.
                    if self._may_be_written(piece) and self.is_right(number):
                        verified.add(number)
                elif len(chunks) >= machine.chunks_of(number):
                    if self.is_right(number):
                        verified.add(number)
                elif chunks:
                    written[number] = chunks
        return verified, written

    def write(self, fetch: Fetch, data: bytes | memoryview) -> None:
        """Writes a chunk to its place, then notes it in the journal.

        Raises:
            TransferError: the disk is full or fails.
        """
        piece = self._wanted[fetch.piece]
        try:
            file = self._files[piece.path]
            file.seek(piece.offset + fetch.offset)
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            self._journals[piece.path].write(f"{piece.sha256} {piece.offset} {fetch.chunk}\n".encode())
        except OSError as error:
            raise _disk_error(piece.path, error) from None

    def forget(self, number: int) -> None:
        """Notes that a piece's chunks, which were damaged, do not count."""
        piece = self._wanted[number]
        try:
            self._journals[piece.path].write(f"{piece.sha256} {piece.offset} -\n".encode())
        except OSError as error:
            raise _disk_error(piece.path, error) from None

    def is_right(self, number: int) -> bool:
        """Whether the bytes on disk have the piece's hash."""
        piece = self._wanted[number]
        digest = hashlib.sha256()
        left = piece.bytes
        try:
            with piece.path.open("rb") as file:
                file.seek(piece.offset)
                while left:
                    if self.cancelled.is_set():
                        raise CancelledError("The transfer was cancelled.")
                    block = file.read(min(_BLOCK_BYTES, left))
                    if not block:
                        return False
                    digest.update(block)
                    left -= len(block)
        except OSError as error:
            raise _disk_error(piece.path, error) from None
        return digest.hexdigest() == piece.sha256

    def finish(self) -> None:
        """Everything is there and right: makes it durable and removes the journals.

        Raises:
            TransferError: the disk fails.
        """
        for path, file in self._files.items():
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise _disk_error(path, error) from None
        self.close()
        for path in {piece.path for piece in self._wanted}:
            journal_of(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes everything; what is there stays for the next attempt. Safe to call twice."""
        for file in (*self._files.values(), *self._journals.values()):
            file.close()
        self._files.clear()
        self._journals.clear()

    def _check_space(self, ends: dict[Path, int], sizes: dict[Path, int | None]) -> None:
        needed: dict[Path, int] = {}
        for path, end in ends.items():
            needed[path.parent] = needed.get(path.parent, 0) + max(0, end - (sizes[path] or 0))
        for folder, needed_bytes in needed.items():
            free_bytes = shutil.disk_usage(folder).free
            if free_bytes < needed_bytes:
                raise TransferError(
                    f"The disk that holds {folder} has {free_bytes / _MB:,.0f} MB free and "
                    f"{needed_bytes / _MB:,.0f} MB are still to arrive; make room on this PC."
                )

    def _open_file(self, path: Path, end: int, size: int | None) -> BinaryIO:
        file: BinaryIO = path.open("r+b" if size is not None else "w+b", buffering=0)
        if (size or 0) < end:
            try:
                _reserve(file, end)
            except OSError:
                file.close()
                raise
        return file

    def _may_be_written(self, piece: Wanted) -> bool:
        """False for a range that begins with zeros, as reserved space does: reading all of it would prove nothing."""
        with piece.path.open("rb") as file:
            file.seek(piece.offset)
            return any(file.read(min(_PROBE_BYTES, piece.bytes)))

    def _read_journal(self, path: Path) -> dict[tuple[str, int], set[int]] | None:
        try:
            lines = journal_of(path).read_bytes().split(b"\n")
        except OSError:
            return None
        chunks: dict[tuple[str, int], set[int]] = {}
        for line in lines[:-1]:  # the last is empty, or was cut off
            with contextlib.suppress(ValueError):
                sha256, offset, chunk = line.decode("ascii").split(" ")
                if chunk == "-":
                    chunks.pop((sha256, int(offset)), None)
                else:
                    chunks.setdefault((sha256, int(offset)), set()).add(int(chunk))
        return chunks


def _reserve(file: BinaryIO, size: int) -> None:
    """Makes the file ``size`` bytes long, with the space taken on disk where the system offers that."""
    if sys.platform != "win32" and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    file.truncate(size)


def _disk_error(path: Path, error: OSError) -> TransferError:
    if error.errno == errno.ENOSPC:
        return TransferError(f"The disk that holds {path.parent} is full; make room on this PC.")
    return TransferError(f"{path} cannot be written: {error.strerror}.")
