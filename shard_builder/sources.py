"""The ways in: an OpenVINO IR folder as it is, and a GGUF file by way of a converted IR that is kept for next time."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import openvino_genai

from fleet.data_dir import default_data_dir
from fleet.errors import CancelledError, ModelError
from shard_builder.gguf import GgufHead, is_gguf, read_head

MODEL_GRAPH = "openvino_model.xml"
MODEL_WEIGHTS = "openvino_model.bin"
TOKENIZER_FILES = (
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_detokenizer.bin",
)
COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
)
"""Taken along where the model has them."""
MAX_CONVERSION_MEMORY_FACTOR = 3
"""OpenVINO GenAI's reader took up to three times the GGUF file's bytes."""


@dataclass(frozen=True)
class Source:
    """A model as IR. ``gguf`` is the head of the file it came from, if it came from one."""

    folder: Path
    name: str
    gguf: GgufHead | None = None

    @property
    def graph(self) -> Path:
        """The model's graph file."""
        return self.folder / MODEL_GRAPH

    @property
    def companions(self) -> list[Path]:
        """Tokenizer, configuration and licence files that the model has."""
        return [self.folder / name for name in (*TOKENIZER_FILES, *COMPANION_FILES) if (self.folder / name).is_file()]


def default_work_folder() -> Path:
    """Where converted models are kept."""
    return default_data_dir() / "converted-models"


def open_source(model: Path, work_folder: Path | None, cancelled: Callable[[], bool]) -> Source:
    """The model as IR, converted first if need be.

    Raises:
        ModelError: there is no such model, or it is not one that can be read.
        CancelledError: ``cancelled`` said so during a conversion.
    """
    try:
        if model.is_dir():
            return _ir_source(model)
        if model.is_file() and model.name == MODEL_GRAPH:
            return _ir_source(model.parent)
        exists = model.exists()
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error.strerror}.") from None
    if not exists:
        raise ModelError(f"There is no model at {model}: give an OpenVINO IR folder or a GGUF file.")
    if not is_gguf(model):
        raise ModelError(f"{model} is not a model: give an OpenVINO IR folder or a GGUF file.")
    return _gguf_source(model, work_folder or default_work_folder(), cancelled)


def _ir_source(folder: Path) -> Source:
    try:
        present = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}.") from None
    if MODEL_GRAPH not in present:
        other = sorted(name for name in present if name.startswith("openvino_") and name.endswith("_model.xml"))
        hint = f"; its {other[0]} belongs to a model of another kind" if other else ""
        raise ModelError(f"{folder} is not an OpenVINO language model: it has no {MODEL_GRAPH}{hint}.")
    for name in (MODEL_WEIGHTS, *TOKENIZER_FILES):
        if name not in present:
            raise ModelError(f"{folder} is not complete: {name} is missing. Export the model with its tokenizer again.")
    return Source(folder, folder.resolve().name)


def _gguf_source(file: Path, work_folder: Path, cancelled: Callable[[], bool]) -> Source:
    head = read_head(file)
    converted = work_folder / _conversion_key(file)
    if not converted.is_dir():
        _convert(file, converted, cancelled)
    return Source(converted, file.stem, head)


def _conversion_key(file: Path) -> str:
    """Changes with the file's place, length and time, and with the reader's version."""
    status = file.stat()
    text = f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{openvino_genai.__version__}"
    return f"{file.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _convert(file: Path, destination: Path, cancelled: Callable[[], bool]) -> None:
    size = file.stat().st_size
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(destination.parent).free
        if free < 2 * size:
            raise ModelError(
                f"Converting {file.name} needs about {2 * size:,} bytes on the disk of {destination.parent}, "
                f"which has {free:,} free."
            )
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=destination.parent))
    except OSError as error:
        raise ModelError(f"{destination.parent} cannot be written: {error.strerror}.") from None
    try:
        link = scratch / "model.gguf"
        _link(file, link)
        _run_conversion(link, file, cancelled)
        link.unlink()
        for name in (MODEL_GRAPH, MODEL_WEIGHTS, *TOKENIZER_FILES):
            if not (scratch / name).is_file():
                raise ModelError(f"OpenVINO GenAI's GGUF reader made no {name} of {file}; it does not know this model.")
        try:
            scratch.rename(destination)
        except OSError:
            if not destination.is_dir():  # else another build converted the same file meanwhile
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _link(file: Path, link: Path) -> None:
    """A symbolic link; on Windows without the right to make one a hard link, and on another drive a copy."""
    target = file.resolve()
    try:
        link.symlink_to(target)
    except OSError:
        try:
            os.link(target, link)
        except OSError:
            shutil.copyfile(target, link)


def _run_conversion(link: Path, file: Path, cancelled: Callable[[], bool]) -> None:
    command = [sys.executable, "-m", "shard_builder.convert_gguf", str(link)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while True:
                try:
                    code = process.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    if cancelled():
                        raise CancelledError("The build was stopped; nothing was written.") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code:
            log.seek(0)
            lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
            reason = lines[-1].rstrip(".")[:300] if lines else f"it ended with code {code}"
            raise ModelError(f"OpenVINO GenAI's GGUF reader cannot convert {file}: {reason}.")
