"""Compiling a shard for a device, or importing the blob that this or a like machine compiled before.

A blob is used only where everything it was made from is the same, where the device plugin's requirements string and
the version of OpenVINO are this machine's, and where its bytes are those that were recorded. Anything else is compiled
here, and the words say why. A blob holds the weights: it takes as much disk as they do, and is mapped, not read.

Blobs are written and read through OpenVINO's own model cache under a number of ours (``CACHE_BLOB_ID``): that way they
go straight to the file and come mapped from it, while ``export_model`` holds them in memory twice. The property
``COMPATIBILITY_CHECK`` cannot be read from Python, so the requirements string of a tiny model is compared instead.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov
from openvino import opset13

from fleet.compiled_shards import (
    RECORD_NAME,
    CompiledFor,
    CompiledShard,
    begin_entry,
    check_blob,
    finish_entry,
    read_record,
    remove_unfinished,
)
from fleet.errors import ModelError
from fleet.manifest import FileEntry, Stage

NO_BLOB = "no shard was compiled for this device and these properties"
BLOB_SHARE = 1.3
"""Bytes of a blob per byte of weights, at most, as far as was seen (CPU: 1.09 to 1.14)."""
SPARE_DISK_BYTES = 1 << 30
_RUN_TIME_PROPERTIES = frozenset({"INFERENCE_NUM_THREADS"})
"""Those that a blob is not made with: measured on the CPU, it runs to the bit like a shard compiled with them."""
_CACHE_SUFFIXES = frozenset({".blob", ".cl_cache"})
"""Of the files that OpenVINO and its plugins write into a folder of their cache."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A compiled model and how it came to be."""

    model: ov.CompiledModel
    why_compiled: str
    """Why it was compiled here; empty where it was imported."""
    why_not_kept: str | None = None
    """Why its blob is not kept; empty where it is, None where none was to be kept."""

    @property
    def words(self) -> str:
        """What happened, for people."""
        if not self.why_compiled:
            return "imported the compiled shard"
        if self.why_not_kept is None:
            kept = ""
        elif self.why_not_kept:
            kept = f"; not kept for the next start: {self.why_not_kept}"
        else:
            kept = "; kept for the next start"
        return f"compiled here: {self.why_compiled}{kept}"


def made_from(stage: Stage, device: str, properties: dict[str, Any]) -> CompiledFor:
    """What a blob of this stage would be made from."""
    texts = {
        name: value.get_type_name() if isinstance(value, ov.Type) else str(value)
        for name, value in properties.items()
        if name not in _RUN_TIME_PROPERTIES
    }
    return CompiledFor(stage.graph.sha256, stage.weights.sha256, device, texts)


def runtime_requirements(core: ov.Core, device: str) -> str:
    """What the device's plugin asks of a machine that imports its blobs; empty where it does not say.

    Raises:
        RuntimeError: the device does not compile even a tiny model.
    """
    parameter = opset13.parameter([1, 8], ov.Type.f32, "value")
    tiny = core.compile_model(ov.Model([opset13.relu(parameter)], [parameter], "tiny"), device)
    return _requirements_of(tiny)


def load(
    core: ov.Core,
    read_model: Callable[[], ov.Model],
    wanted: CompiledFor,
    properties: dict[str, Any],
    folders: Sequence[Path],
    keep_in: Path | None,
    stage: Stage,
    check: Callable[[ov.CompiledModel], None],
) -> Loaded:
    """Import a shard from the first of the folders that has a blob of use, else compile it.

    Args:
        core: OpenVINO.
        read_model: gives the shard's model; called only where it is compiled.
        wanted: see ``made_from``.
        properties: what the model shall be compiled or imported with.
        folders: of compiled shards; they need not exist.
        keep_in: where a blob compiled here is kept for the next time; None keeps none.
        stage: the shard, for its number and size.
        check: raises ModelError where an imported model is not this shard; its blob is then removed.

    Raises:
        RuntimeError: the device does not take the shard.
    """
    reasons = []
    for folder in folders:
        outcome = import_shard(core, folder / wanted.key, wanted, properties)
        if isinstance(outcome, ov.CompiledModel):
            try:
                check(outcome)
                return Loaded(outcome, "")
            except ModelError:
                _log.exception("the blob in %s is another shard's", folder / wanted.key)
            # It has mapped the blob, and Windows removes no file that is mapped.
            del outcome
            _remove_entry(folder / wanted.key, wanted)
            reasons.append(f"the blob in {folder / wanted.key} is another shard's and is removed")
        elif outcome:
            reasons.append(outcome)
    reason = "; ".join(reasons) or NO_BLOB
    if keep_in is None:
        return Loaded(core.compile_model(read_model(), wanted.device, properties), reason)
    model, why_not_kept = compile_and_keep(core, read_model(), wanted, properties, keep_in, stage)
    return Loaded(model, reason, why_not_kept)


def import_shard(core: ov.Core, entry: Path, wanted: CompiledFor, properties: dict[str, Any]) -> ov.CompiledModel | str:
    """The compiled model of a blob's folder, or why it is not used: empty where there is none."""
    reason = why_not_used(core, entry, wanted)
    if reason is None:
        return ""
    if reason:
        _log.warning("%s", reason)
        return reason
    if entry.is_symlink():
        # What a plugin left there could not be removed: it may be anybody's.
        return f"{entry} is a link, not a folder of a blob"
    try:
        _remove_other_caches(entry, wanted)
        # An empty model: should the plugin refuse the blob, there is nothing that it could compile instead.
        compiled = core.compile_model(
            ov.Model([], [], [], "none"), wanted.device, {**properties, **_cache_properties(entry, wanted)}
        )
    except (RuntimeError, OSError) as error:
        _log.exception("a compiled shard could not be imported")
        return f"the blob in {entry} cannot be imported ({error.__class__.__name__}; the log has the whole of it)"
    if not compiled.get_property("LOADED_FROM_CACHE"):
        # OpenVINO has put the empty model in the blob's place.
        _remove_entry(entry, wanted)
        return f"OpenVINO refused the blob in {entry}, which is removed"
    return compiled


def why_not_used(core: ov.Core, entry: Path, wanted: CompiledFor) -> str | None:
    """Why the blob in a folder is not to be imported: empty where it is, None where there is no blob at all.

    Raises:
        RuntimeError: the device compiles nothing.
    """
    try:
        record = read_record(entry)
    except ModelError as error:
        return str(error)
    if record is None:
        return None
    if record.made_from != wanted or record.blob.name != _blob_name(wanted):
        return f"the blob in {entry} was made from another shard or with other properties"
    requirements = runtime_requirements(core, wanted.device)
    if not requirements:
        return f"the device {wanted.device} does not say on which machines its blobs may be used"
    return record.why_not_here(ov.__version__, requirements) or check_blob(entry, record)


def compile_and_keep(
    core: ov.Core, model: ov.Model, wanted: CompiledFor, properties: dict[str, Any], folder: Path, stage: Stage
) -> tuple[ov.CompiledModel, str]:
    """The compiled model, whose blob is put into the folder, and why it is not: empty where it is.

    Raises:
        RuntimeError: the device does not take the model.
    """
    try:
        remove_unfinished(folder)
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        needed = int(stage.weights.bytes * BLOB_SHARE) + SPARE_DISK_BYTES
        if free < needed:
            why = f"it needs {needed:,} bytes on the disk of {folder}, which has {free:,} free"
            return core.compile_model(model, wanted.device, properties), why
        unfinished = begin_entry(folder)
    except OSError as error:
        return core.compile_model(model, wanted.device, properties), f"{folder} cannot be written: {error.strerror}"
    try:
        compiled = core.compile_model(model, wanted.device, {**properties, **_cache_properties(unfinished, wanted)})
        return compiled, _finish(unfinished, compiled, wanted, stage)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _finish(unfinished: Path, compiled: ov.CompiledModel, wanted: CompiledFor, stage: Stage) -> str:
    """Records the blob that OpenVINO wrote; why it cannot be: empty where it is."""
    blob = unfinished / _blob_name(wanted)
    requirements = _requirements_of(compiled)
    if not requirements:
        return f"the device {wanted.device} does not say on which machines its blobs may be used"
    if not blob.is_file():
        # OpenVINO removes a blob that it could not write whole, and says nothing.
        return f"OpenVINO wrote no blob; the device {wanted.device} exports none, or the disk is full"
    try:
        _remove_other_caches(unfinished, wanted)
        blob.chmod(stat.S_IREAD | stat.S_IWRITE)  # Windows removes no file that is read-only, as OpenVINO leaves it
        with blob.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entry = FileEntry(name=blob.name, bytes=blob.stat().st_size, sha256=digest)
        finish_entry(unfinished, CompiledShard(stage.stage, wanted, ov.__version__, requirements, entry))
    except OSError as error:
        return f"{unfinished.parent} cannot be written: {error.strerror}"
    return ""


def _requirements_of(compiled: ov.CompiledModel) -> str:
    if "RUNTIME_REQUIREMENTS" not in compiled.get_property("SUPPORTED_PROPERTIES"):
        return ""
    return str(compiled.get_property("RUNTIME_REQUIREMENTS"))


def _cache_properties(entry: Path, wanted: CompiledFor) -> dict[str, str]:
    return {"CACHE_DIR": str(entry), "CACHE_BLOB_ID": str(wanted.blob_id), "CACHE_MODE": "OPTIMIZE_SPEED"}


def _blob_name(wanted: CompiledFor) -> str:
    return f"{wanted.blob_id}.blob"


def _remove_other_caches(folder: Path, wanted: CompiledFor) -> None:
    """What a plugin keeps beside its blob has no hash here, so it is not used again. Files of others stay."""
    for path in folder.iterdir():
        if path.suffix in _CACHE_SUFFIXES and path.name != _blob_name(wanted) and not path.is_dir():
            path.unlink()


def _remove_entry(entry: Path, wanted: CompiledFor) -> None:
    """Removes a blob and its record, and their folder where nothing else lies in it."""
    try:
        for name in (RECORD_NAME, _blob_name(wanted)):
            (entry / name).unlink(missing_ok=True)
        if not any(entry.iterdir()):
            entry.rmdir()
    except OSError:
        _log.exception("%s cannot be removed", entry)
