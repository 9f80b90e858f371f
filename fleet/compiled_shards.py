"""Records of compiled shards: what a blob was made of, for which device, and on what kind of machine it may be used.

A shard folder keeps them in ``compiled/<key>/``, one folder per blob: ``record.json`` and the blob itself, as
OpenVINO's device plugin exported it. The key follows from the shard, the device and the properties it is compiled with.
A folder appears there in one step, when its blob is whole.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fleet.data_dir import locked
from fleet.errors import ModelError
from fleet.manifest import FileEntry, Sha256, Text

COMPILED_FOLDER = "compiled"
RECORD_NAME = "record.json"
_UNFINISHED = ".unfinished-"


class CompiledFor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a blob is made from: a change of any of these makes another blob."""

    graph_sha256: Sha256
    weights_sha256: Sha256
    device: Text
    """As OpenVINO names it, such as ``CPU`` or ``GPU.1``."""
    properties: dict[str, str]
    """OpenVINO's properties that take part in the compilation."""

    @property
    def blob_id(self) -> int:
        """A number of 64 bits that stands for all of it; OpenVINO names the blob by it."""
        return int.from_bytes(hashlib.sha256(msgspec.json.encode(self, order="sorted")).digest()[:8], "big")

    @property
    def key(self) -> str:
        """``blob_id`` in hexadecimal: the name of the blob's folder."""
        return f"{self.blob_id:016x}"


class CompiledShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A blob and where it may be used."""

    stage: int
    made_from: CompiledFor
    openvino_version: Text
    runtime_requirements: Text
    """OpenVINO's ``RUNTIME_REQUIREMENTS``: version and instruction set, or driver and kind of device."""
    blob: FileEntry

    def why_not_here(self, openvino_version: str, runtime_requirements: str) -> str:
        """Why the blob is of no use on a machine with this version and these requirements; empty where it is."""
        if self.runtime_requirements != runtime_requirements:
            return f"the blob was made for {self.runtime_requirements}, and this is {runtime_requirements}"
        if self.openvino_version != openvino_version:
            return f"the blob was made by OpenVINO {self.openvino_version}, and this is {openvino_version}"
        return ""


def read_record(entry: Path) -> CompiledShard | None:
    """The record of a blob's folder; None where there is none.

    Raises:
        ModelError: it is damaged, or cannot be read.
    """
    path = entry / RECORD_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=CompiledShard)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ModelError(f"the record {path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError:
        raise ModelError(f"the record {path} is damaged") from None


def check_blob(entry: Path, record: CompiledShard) -> str:
    """Why the blob is not the one that was recorded; empty where it is. Reads it whole."""
    path = entry / record.blob.name
    try:
        if path.stat().st_size != record.blob.bytes:
            return f"the blob {path} has another size than when it was made"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"the blob {path} cannot be read: {error.strerror}"
    return "" if digest == record.blob.sha256 else f"the blob {path} has changed since it was made"


def begin_entry(folder: Path) -> Path:
    """An empty folder in which a blob may be written before it gets its place.

    Raises:
        OSError: it cannot be made.
    """
    unfinished = folder / f"{_UNFINISHED}{secrets.token_hex(4)}"
    unfinished.mkdir(parents=True)
    return unfinished


def finish_entry(unfinished: Path, record: CompiledShard) -> Path:
    """Writes the record beside the blob and puts both in their place, where an older blob of the same key may lie.

    Raises:
        OSError: it cannot be written.
    """
    (unfinished / RECORD_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    entry = unfinished.with_name(record.made_from.key)
    shutil.rmtree(entry, ignore_errors=True)
    return unfinished.replace(entry)


@contextmanager
def locked_for_compiling(folder: Path) -> Iterator[None]:
    """Keeps other processes from compiling into a folder of compiled shards, which is made where it is not there.

    Raises:
        ModelError: the folder cannot be made.
        DataFolderError: another process compiles into it.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ModelError(f"{folder} cannot be made: {error.strerror}.") from None
    with locked(folder / "folder"):
        yield


def remove_unfinished(folder: Path) -> None:
    """Removes what a compilation that was ended left in a folder of compiled shards. None may run there meanwhile."""
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
