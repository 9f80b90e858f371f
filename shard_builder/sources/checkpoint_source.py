"""Hugging Face checkpoints: a folder with config.json and weights, exported through Optimum Intel."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fleet.errors import ModelError
from shard_builder.reporting import Reporter
from shard_builder.sources.child_work import run_child_work
from shard_builder.sources.export_extra import EXPORT_PACKAGES, LIBRARIES_BYTES, require_export_extra
from shard_builder.sources.hub import index_files
from shard_builder.sources.kept_models import announce_needs, conversion_key, keep
from shard_builder.sources.model_files import (
    CHECKPOINT_INDEXES,
    CHECKPOINT_WEIGHTS,
    CONFIGURATION,
    companions,
    is_tokenizer_source,
)

EXPORT_MODULES = ("torch", "transformers", "optimum")
EXPORT_MEMORY_FACTOR = 2.5
"""Of the weights' bytes in f16: torch's own, OpenVINO's copy, and what is held while the IR is written. On the safe
side: SmolLM2-135M, 0.27 GB, took 1.1 GB together with the libraries."""
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that has been looked at. ``tensors`` is empty for weights in pytorch_model.bin."""

    folder: Path
    configuration: dict[str, Any]
    files: tuple[Path, ...]
    """The weights."""
    tensors: dict[str, tuple[int, ...]]
    """Shapes by name, from the heads of the safetensors files."""

    @property
    def f16_bytes(self) -> int:
        """What the weights will take in f16."""
        if not self.tensors:
            return sum(file.stat().st_size for file in self.files)
        return 2 * sum(prod(shape) for shape in self.tensors.values())


def read_checkpoint(folder: Path, names: set[str]) -> Checkpoint:
    """Looks at a folder before anything is loaded. ``names`` are the files in it.

    Raises:
        ModelError: it is incomplete, damaged, or not a language model.
    """
    configuration = _read_configuration(folder / CONFIGURATION)
    _check_kind(folder, configuration)
    files = _weight_files(folder, names)
    if not any(is_tokenizer_source(name) and name != "tokenizer_config.json" for name in names):
        raise ModelError(f"{folder} has no tokenizer: copy the model's tokenizer.json and tokenizer_config.json there.")
    tensors: dict[str, tuple[int, ...]] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors |= read_safetensors_head(file)
    return Checkpoint(folder, configuration, tuple(files), tensors)


def _read_configuration(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ModelError(f"{path} is damaged: it is not JSON.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is damaged: it is not a JSON object.")
    return content


def _check_kind(folder: Path, configuration: dict[str, Any]) -> None:
    named = configuration.get("architectures")
    classes = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if configuration.get("is_encoder_decoder"):
        raise ModelError(f"{folder} is a model with an encoder ({', '.join(classes)}); Paceline serves decoders alone.")
    if any(name.endswith(_LANGUAGE_MODELS) for name in classes) or (not classes and "auto_map" in configuration):
        return
    if "vision_config" in configuration:
        raise ModelError(f"{folder} is a model for pictures and text ({', '.join(classes)}), not a language model.")
    if classes and "auto_map" not in configuration:
        raise ModelError(f"{folder} holds a {classes[0]}, which is not a language model that writes text.")
    if not isinstance(configuration.get("model_type"), str):
        raise ModelError(f"{folder} is not a model: its {CONFIGURATION} names no model_type.")


def _weight_files(folder: Path, names: set[str]) -> list[Path]:
    if CHECKPOINT_WEIGHTS[0] in names:
        return [folder / CHECKPOINT_WEIGHTS[0]]
    for index in CHECKPOINT_INDEXES:
        if index not in names:
            continue
        try:
            listed = index_files((folder / index).read_bytes())
        except OSError as error:
            raise ModelError(f"{folder / index} cannot be read: {error.strerror}.") from None
        except ValueError:
            raise ModelError(f"{folder / index} is damaged; get it again.") from None
        missing = [name for name in listed if name not in names]
        if missing:
            raise ModelError(f"{folder} is not complete: {missing[0]} is missing; get it again.")
        return [folder / name for name in listed]
    if CHECKPOINT_WEIGHTS[1] in names:
        return [folder / CHECKPOINT_WEIGHTS[1]]
    raise ModelError(f"{folder} is not complete: it has a {CONFIGURATION} and no weights (model.safetensors).")


def read_safetensors_head(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, by name.

    The format: https://github.com/huggingface/safetensors#format.

    Raises:
        ModelError: it is damaged or cut short.
    """
    try:
        with file.open("rb") as content:
            (length,) = struct.unpack("<Q", content.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("head too long")
            head = json.loads(content.read(length))
            size = content.seek(0, 2)
        head.pop("__metadata__", None)
        shapes = {name: tuple(int(n) for n in entry["shape"]) for name, entry in head.items()}
        end = max((int(entry["data_offsets"][1]) for entry in head.values()), default=0)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}.") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ModelError(f"{file} is not a whole safetensors file: its head is damaged; get it again.") from None
    if size < 8 + length + end:
        raise ModelError(f"{file} is cut short: it has {size:,} bytes and needs {8 + length + end:,}; get it again.")
    return shapes


def export_checkpoint(checkpoint: Checkpoint, name: str, work_folder: Path, reporter: Reporter) -> Path:
    """The folder with the exported IR, in f16, made first where it is not kept from an earlier time.

    Raises:
        ModelError: it cannot be exported, or not on this PC; the text says why.
        CancelledError: the caller wants the build to end.
    """
    folder = checkpoint.folder
    what = f"Exporting {name}"
    require_export_extra(EXPORT_MODULES, f"{folder} is a Hugging Face checkpoint; exporting it")
    key_files = [*checkpoint.files, folder / CONFIGURATION, *tokenizer_sources(folder), *companions(folder)]
    destination = work_folder / conversion_key(name, key_files, EXPORT_PACKAGES, "f16")
    if destination.is_dir():
        return destination
    disk = checkpoint.f16_bytes + (64 << 20)
    announce_needs(reporter, what, round(checkpoint.f16_bytes * EXPORT_MEMORY_FACTOR) + LIBRARIES_BYTES, disk)

    def make(scratch: Path) -> None:
        run_child_work(
            "shard_builder.sources.convert_checkpoint",
            (str(folder), str(scratch)),
            complaint=f"Optimum Intel cannot export {folder}",
            on_progress=reporter.work("convert"),
            cancelled=reporter.cancelled,
        )
        for path in companions(folder):
            shutil.copyfile(path, scratch / path.name)

    return keep(destination, disk, what, make)


def tokenizer_sources(folder: Path) -> list[Path]:
    """The files that a folder's tokenizer is made from, by name."""
    return sorted(path for path in folder.iterdir() if is_tokenizer_source(path.name))
