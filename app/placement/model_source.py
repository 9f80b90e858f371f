"""What a chosen file or folder is: a model that must be cut first, or shards that are cut already. Free of Qt."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleet.errors import ModelError
from fleet.manifest import MANIFEST_NAME

SourceKind = Literal["shards", "ir", "gguf"]
IR_NAME = "openvino_model.xml"


@dataclass(frozen=True)
class ModelSource:
    """A model on this PC's disk."""

    path: Path
    kind: SourceKind

    @property
    def name(self) -> str:
        """What people call it: the file's or folder's name."""
        return self.path.stem if self.kind == "gguf" else self.path.name


def read_source(path: Path) -> ModelSource:
    """What ``path`` is.

    Raises:
        ModelError: it is neither a shard folder, nor an OpenVINO IR folder, nor a GGUF file.
    """
    if path.is_dir():
        if (path / MANIFEST_NAME).is_file():
            return ModelSource(path, "shards")
        if (path / IR_NAME).is_file():
            return ModelSource(path, "ir")
        raise ModelError(
            f"{path} holds neither shards ({MANIFEST_NAME}) nor an OpenVINO model ({IR_NAME}); choose another folder."
        )
    if path.is_file() and path.suffix.lower() == ".gguf":
        return ModelSource(path, "gguf")
    if path.is_file() and path.name in (IR_NAME, MANIFEST_NAME):
        return read_source(path.parent)
    if path.is_file():
        raise ModelError(f"{path} is not a GGUF file; choose one, or the folder of an OpenVINO model or of its shards.")
    raise ModelError(f"{path} is not there any more; choose another model.")


def shard_folder_for(folder: Path, source: ModelSource, cuts: Sequence[int] | None, stages: int) -> Path:
    """Where the shards of a model are put: one folder per model and cut, so that a cut is never built twice.

    The name also depends on the source's path, size and time of change, so that another model of the same name or a
    changed file gets a folder of its own.
    """
    main = source.path if source.kind == "gguf" else source.path / IR_NAME
    status = main.stat()
    mark = hashlib.sha256(f"{main.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip(".-") or "model"
    where = "-".join(map(str, cuts)) if cuts is not None else f"even-{stages}"
    return folder / f"{name[:60]}-{mark}-{where or 'whole'}"
