"""What an agent holds on disk: weight files, graphs and tokenizers by their hash, and a folder per running stage.

Layout, below the data folder's ``store``::

    blobs/<sha256>               a graph or tokenizer file
    weights/<sha256>.bin         the weights of a stage: complete, checked
    weights/<sha256>.json        which runs lie where in it, and its size and time when it was checked
    incoming/<sha256>.part       a file on its way in (the transfer keeps its journal beside it)
    deployments/<id>/<stage>/    manifest and files of a stage, as hard links, for its process to open

A file appears under its final name in one step, when it is whole and its hash is right; so what is there is right,
whenever the agent was killed. Names are hashes or come from the checked manifest, never from a peer's message alone.
A layer's run that any weight file holds is copied from there and not fetched again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from fleet.data_dir import write_private
from fleet.errors import TransferError
from fleet.manifest import MANIFEST_NAME, FileEntry, Manifest, decode_manifest, encode_manifest
from fleet.transfer_files import journal_of

DISK_RESERVE_BYTES = 1 << 30
"""Never taken by shards, so that the PC itself goes on working."""
_BLOCK_BYTES = 1 << 20


class HeldRun(msgspec.Struct, frozen=True):
    """A run inside a weight file."""

    sha256: str
    offset: int
    bytes: int


class WeightIndex(msgspec.Struct, frozen=True):
    """What is known of a weight file; size and time tell whether it was touched since it was checked."""

    bytes: int
    modified_ns: int
    runs: tuple[HeldRun, ...]


class ShardStore:
    """The store of one agent. Methods block on the disk; those that read or write weights belong into a thread.

    One thread at a time may call the methods that change something.
    """

    def __init__(self, root: Path) -> None:
        self._blobs = root / "blobs"
        self._weights = root / "weights"
        self._incoming = root / "incoming"
        self._deployments = root / "deployments"
        for folder in (self._blobs, self._weights, self._incoming, self._deployments):
            folder.mkdir(parents=True, exist_ok=True)
        self._index: dict[str, WeightIndex] = {}
        self._recover()

    @property
    def incoming(self) -> Path:
        """Folder for files that are being received."""
        return self._incoming

    def blob(self, sha256: str) -> Path | None:
        """A held graph or tokenizer file."""
        path = self._blobs / _checked(sha256)
        return path if path.is_file() else None

    def weights(self, sha256: str) -> Path | None:
        """A held weight file."""
        return self._weight_path(sha256) if sha256 in self._index else None

    def incoming_path(self, sha256: str) -> Path:
        """Where a file is assembled before it is admitted."""
        return self._incoming / f"{_checked(sha256)}.part"

    def holds_run(self, sha256: str) -> bool:
        """Whether some weight file holds this run."""
        return next(self._places(sha256), None) is not None

    def held_bytes(self) -> int:
        """Bytes of all complete files."""
        blobs = sum(path.stat().st_size for path in self._blobs.iterdir())
        return blobs + sum(index.bytes for index in self._index.values())

    def copy_run(self, sha256: str, destination: Path, offset: int) -> bool:
        """Copy a held run into ``destination`` at ``offset``, checking its hash; False if no good copy is held."""
        for weights, place in list(self._places(sha256)):
            destination.touch()
            with self._weight_path(weights).open("rb") as source, destination.open("r+b") as target:
                source.seek(place.offset)
                target.seek(offset)
                if _copy(source, target, place.bytes) == sha256:
                    return True
            self._forget_weights(weights)
        return False

    def admit_blob(self, sha256: str) -> None:
        """Take a received graph or tokenizer file in.

        Raises:
            TransferError: its content does not have this hash.
        """
        path = self.incoming_path(sha256)
        self._check_hash(path, sha256)
        path.replace(self._blobs / sha256)

    def admit_weights(self, manifest: Manifest, stage: int) -> None:
        """Take a received and assembled weight file in.

        Raises:
            TransferError: its content does not have the hash that the manifest gives.
        """
        parts = manifest.stages[stage]
        path = self.incoming_path(parts.weights.sha256)
        path.touch()
        with path.open("r+b") as file:
            file.truncate(parts.weights.bytes)  # padding behind the last run was never sent
        self._check_hash(path, parts.weights.sha256)
        facts = path.stat()
        index = WeightIndex(
            bytes=facts.st_size,
            modified_ns=facts.st_mtime_ns,
            runs=tuple(HeldRun(place.sha256, place.offset, manifest.run(place.sha256).bytes) for place in parts.runs),
        )
        # The index first: a weight file without one could not be used after a crash, an index without its file is
        # simply removed.
        write_private(self._index_path(parts.weights.sha256), msgspec.json.encode(index))
        path.replace(self._weight_path(parts.weights.sha256))
        self._index[parts.weights.sha256] = index

    def publish(self, deployment: str, manifest: Manifest, stage: int, with_tokenizer: bool) -> Path:
        """Make the folder that a stage's process opens, from held files; the folder there is left alone.

        Raises:
            TransferError: a file is not held.
        """
        folder = self.folder(deployment, stage)
        if (folder / MANIFEST_NAME).is_file():
            return folder
        building = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        parts = manifest.stages[stage]
        _link(self._required(self.weights(parts.weights.sha256), parts.weights), building / parts.weights.name)
        small: Sequence[FileEntry] = (parts.graph, *(manifest.tokenizer if with_tokenizer else ()))
        for entry in small:
            _link(self._required(self.blob(entry.sha256), entry), building / entry.name)
        write_private(building / MANIFEST_NAME, encode_manifest(manifest))
        building.replace(folder)
        return folder

    def folder(self, deployment: str, stage: int) -> Path:
        """The folder of a stage of a deployment, whether it is there or not."""
        if not deployment.isalnum():
            raise ValueError(deployment)
        return self._deployments / deployment / str(stage)

    def published(self) -> list[tuple[str, int, Manifest]]:
        """Deployment, stage and manifest of every folder that is there."""
        found = []
        for folder in sorted(self._deployments.glob("[0-9a-f]*/*")):
            if folder.name.isdecimal() and (folder / MANIFEST_NAME).is_file():
                manifest = decode_manifest((folder / MANIFEST_NAME).read_bytes(), str(folder))
                found.append((folder.parent.name, int(folder.name), manifest))
        return found

    def release(self, deployment: str) -> None:
        """Remove a deployment's folders; the files stay for the next one."""
        folder = self._deployments / deployment
        gone = folder.with_name(f".{deployment}.gone")
        with contextlib.suppress(OSError):  # it is not there; or, on Windows, a file in it is still open
            folder.replace(gone)  # in one step, so that a kill never leaves half a stage
        for leftover in (folder, gone):
            shutil.rmtree(leftover, ignore_errors=True)

    def make_room(self, needed_bytes: int, free_bytes: Callable[[], int], keep: frozenset[str]) -> bool:
        """Remove what receptions left unfinished, then weight files that no deployment uses, the longest unused
        first, until there is room. Where all of that would not be enough, nothing is removed.

        Args:
            needed_bytes: what must be free besides the reserve.
            free_bytes: asks the disk.
            keep: hashes of files that are about to be used.

        Returns:
            Whether there is enough room now.
        """
        begun = [path for path in self._incoming.glob("*.part") if path.stem not in keep]
        used = keep | {manifest.stages[stage].weights.sha256 for _, stage, manifest in self.published()}
        unused = sorted((key for key in self._index if key not in used), key=self._last_use)
        at_hand_bytes = sum(path.stat().st_size for path in begun) + sum(self._index[key].bytes for key in unused)
        wanted_bytes = needed_bytes + DISK_RESERVE_BYTES
        if free_bytes() + at_hand_bytes < wanted_bytes:
            return False
        while free_bytes() < wanted_bytes:
            if begun:
                path = begun.pop()
                path.unlink()
                journal_of(path).unlink(missing_ok=True)
            elif unused:
                self._forget_weights(unused.pop(0))
            else:
                return False
        return True

    def mark_used(self, sha256: str) -> None:
        """Remember that a weight file was needed now."""
        path = self._index_path(sha256)
        if path.is_file():
            os.utime(path)

    def _last_use(self, sha256: str) -> float:
        with contextlib.suppress(OSError):
            return self._index_path(sha256).stat().st_mtime
        return time.time()

    def _recover(self) -> None:
        """Keep what is whole: called once, before anything is done."""
        for leftover in (*self._deployments.glob("*/.*.new"), *self._deployments.glob(".*.gone")):
            shutil.rmtree(leftover, ignore_errors=True)
        for path in self._weights.iterdir():
            if path.suffix == ".json":
                self._recover_weights(path.stem)
            elif path.suffix != ".bin":
                path.unlink()  # left by a write that a crash cut off
        for path in self._weights.glob("*.bin"):
            if path.stem not in self._index:
                path.unlink()

    def _recover_weights(self, sha256: str) -> None:
        weights = self._weight_path(sha256)
        try:
            index = msgspec.json.decode(self._index_path(sha256).read_bytes(), type=WeightIndex)
            facts = weights.stat()
        except (OSError, msgspec.MsgspecError):
            self._forget_weights(sha256)
            return
        touched = facts.st_mtime_ns != index.modified_ns
        if facts.st_size != index.bytes or (touched and _hash_of(weights) != sha256):
            self._forget_weights(sha256)
            return
        self._index[sha256] = index

    def _forget_weights(self, sha256: str) -> None:
        self._index.pop(sha256, None)
        with contextlib.suppress(PermissionError):  # Windows, while a stage has it open; removed at the next start
            self._weight_path(sha256).unlink(missing_ok=True)
        self._index_path(sha256).unlink(missing_ok=True)

    def _places(self, sha256: str) -> Iterator[tuple[str, HeldRun]]:
        for weights, index in self._index.items():
            for run in index.runs:
                if run.sha256 == sha256:
                    yield weights, run

    def _check_hash(self, path: Path, sha256: str) -> None:
        if _hash_of(path) != sha256:
            path.unlink(missing_ok=True)
            raise TransferError(
                f"{path.name} arrived damaged: its content does not have the expected hash. It will be fetched anew."
            )
        with path.open("rb+") as file:
            os.fsync(file.fileno())

    def _required(self, path: Path | None, entry: FileEntry) -> Path:
        if path is None:
            raise TransferError(f"The store does not hold {entry.name} any more; deploy again to fetch it.")
        return path

    def _weight_path(self, sha256: str) -> Path:
        return self._weights / f"{_checked(sha256)}.bin"

    def _index_path(self, sha256: str) -> Path:
        return self._weights / f"{_checked(sha256)}.json"


def _checked(sha256: str) -> str:
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise ValueError(sha256)
    return sha256


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: BinaryIO, target: BinaryIO, bytes_left: int) -> str:
    digest = hashlib.sha256()
    while bytes_left:
        block = source.read(min(_BLOCK_BYTES, bytes_left))
        if not block:
            break
        digest.update(block)
        target.write(block)
        bytes_left -= len(block)
    return digest.hexdigest()


def _link(source: Path, destination: Path) -> None:
    """A hard link; a copy where the file system has none (FAT, some network drives)."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)
