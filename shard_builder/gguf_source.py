"""GGUF files: OpenVINO GenAI's reader makes an IR of those that it knows, and transformers of the others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fleet.errors import ModelError
from shard_builder.child_work import run_child_work
from shard_builder.export_extra import EXPORT_PACKAGES, LIBRARIES_BYTES, require_export_extra
from shard_builder.gguf import GgufHead
from shard_builder.kept_models import announce_needs, conversion_key, keep
from shard_builder.model_files import MODEL_GRAPH, MODEL_WEIGHTS, TOKENIZER_FILES
from shard_builder.reporting import Reporter

READER_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""What OpenVINO GenAI 2026.4 makes a graph of; tried, and as its documentation lists them."""
READER_MEMORY_FACTOR = 3.2
"""Its reader took up to three times the GGUF file's bytes: 14 GB for 4.7 GB."""
DEQUANTISING_BYTES_PER_ELEMENT = 8
"""transformers holds the dequantised weights in f32 and in f16 while it loads them, and the export a copy in f16."""
READER_PACKAGES = ("openvino", "openvino-genai", "openvino-tokenizers")
GGUF_MODULES = ("torch", "transformers", "optimum", "gguf", "accelerate")
LICENCE_NOTE = "LICENSE-in-GGUF.txt"


def convert_gguf_file(file: Path, head: GgufHead, work_folder: Path, reporter: Reporter) -> Path:
    """The folder with the model's IR, converted first where it is not kept from an earlier time.

    Raises:
        ModelError: it cannot be converted, or not on this PC; the text says why.
        CancelledError: the caller wants the build to end.
    """
    if head.architecture in READER_ARCHITECTURES:
        destination = work_folder / conversion_key(file.stem, [file], READER_PACKAGES, LICENCE_NOTE)
        memory = round(file.stat().st_size * READER_MEMORY_FACTOR)
        disk = 2 * file.stat().st_size
    else:
        require_export_extra(
            GGUF_MODULES,
            f"{file} is of the architecture '{head.architecture}', which OpenVINO GenAI's GGUF reader does not know; "
            "converting it through transformers",
        )
        destination = work_folder / conversion_key(file.stem, [file], EXPORT_PACKAGES, LICENCE_NOTE)
        memory = head.elements * DEQUANTISING_BYTES_PER_ELEMENT + LIBRARIES_BYTES
        disk = 3 * head.elements
    if destination.is_dir():
        return destination
    what = f"Converting {file.name}"
    announce_needs(reporter, what, memory, disk)

    def make(scratch: Path) -> None:
        link = scratch / "model.gguf"
        _link(file, link)
        if head.architecture in READER_ARCHITECTURES:
            _run_reader(link, file, reporter)
        else:
            _run_reader(link, file, reporter, "tokenizer")
            _run_transformers(link, file, reporter)
        link.unlink()
        for name in (MODEL_GRAPH, MODEL_WEIGHTS, *TOKENIZER_FILES):
            if not (scratch / name).is_file():
                raise ModelError(f"OpenVINO GenAI's GGUF reader made no {name} of {file}; it does not know this model.")
        _note_licence(head, scratch)

    return keep(destination, disk, what, make)


def _run_reader(link: Path, file: Path, reporter: Reporter, *options: str) -> None:
    run_child_work(
        "shard_builder.convert_gguf",
        (str(link), *options),
        complaint=f"OpenVINO GenAI's GGUF reader cannot convert {file}",
        on_progress=reporter.work("convert"),
        cancelled=reporter.cancelled,
    )


def _run_transformers(link: Path, file: Path, reporter: Reporter) -> None:
    run_child_work(
        "shard_builder.convert_checkpoint",
        (str(link.parent), str(link.parent), link.name),
        complaint=f"transformers and Optimum cannot convert {file}",
        on_progress=reporter.work("convert"),
        cancelled=reporter.cancelled,
    )


def _note_licence(head: GgufHead, folder: Path) -> None:
    """Keeps what the file says of its licence."""
    found = {key: head.metadata[key] for key in sorted(head.metadata) if key.startswith("general.license")}
    if found:
        lines = [
            "What the model's GGUF file says of its licence:",
            *(f"{key}: {value}" for key, value in found.items()),
        ]
        (folder / LICENCE_NOTE).write_text("\n".join(lines) + "\n", encoding="utf-8")


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
