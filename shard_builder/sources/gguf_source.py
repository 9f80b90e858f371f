"""GGUF files: OpenVINO GenAI's reader makes an IR of those that it knows, and transformers of the others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet.errors import ModelError
from shard_builder.reporting import Reporter
from shard_builder.sources.child_work import LibraryRefusedError, run_child_work
from shard_builder.sources.export_extra import EXPORT_PACKAGES, LIBRARIES_BYTES, require_export_extra
from shard_builder.sources.gguf import GgufHead, shorten
from shard_builder.sources.kept_models import announce_needs, conversion_key, keep
from shard_builder.sources.model_files import MODEL_GRAPH, MODEL_WEIGHTS, TOKENIZER_FILES, is_tokenizer_source

READER_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""What its default reader makes a graph of: https://openvinotoolkit.github.io/openvino.genai/docs/guides/gguf."""
READER_MEMORY_FACTOR = 3.2
"""Its reader took up to three times the GGUF file's bytes: 14 GB for 4.7 GB."""
DEQUANTISING_BYTES_PER_ELEMENT = 8
"""transformers holds the dequantised weights in f32 and in f16 while it loads them, and the export a copy in f16."""
READER_PACKAGES = ("openvino", "openvino-genai", "openvino-tokenizers")
DEQUANTISED_DISK_BYTES_PER_ELEMENT = 3
"""The export in f16, and what is written meanwhile."""
GGUF_MODULES = ("torch", "transformers", "optimum", "gguf", "accelerate")
LICENCE_NOTE = "LICENSE-in-GGUF.txt"


def convert_gguf_file(file: Path, head: GgufHead, work_folder: Path, reporter: Reporter) -> Path:
    """The folder with the model's IR, converted first where it is not kept from an earlier time.

    Raises:
        ModelError: it cannot be converted, or not on this PC; the text says why.
        CancelledError: the caller wants the build to end.
    """
    if head.architecture in READER_ARCHITECTURES:
        _check_reader_keys(file, head)
        try:
            return _convert_with_reader(file, head, work_folder, reporter)
        except LibraryRefusedError as error:
            # A quantisation that the reader does not know, most likely.
            return _convert_with_transformers(file, head, work_folder, reporter, str(error).rstrip("."))
    why = (
        f"{file} is of the architecture {shorten(head.architecture)}, which OpenVINO GenAI's GGUF reader does not know"
    )
    return _convert_with_transformers(file, head, work_folder, reporter, why)


def _check_reader_keys(file: Path, head: GgufHead) -> None:
    """The reader tells of a key that it misses by no name.

    https://github.com/openvinotoolkit/openvino.genai/tree/master/src/cpp/src/gguf_utils
    """
    keys = [
        *(f"{head.architecture}.{key}" for key in ("block_count", "embedding_length", "attention.head_count")),
        f"{head.architecture}.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
    ]
    if head.metadata.get("tokenizer.ggml.model") == "gpt2":
        keys += ["tokenizer.ggml.merges", "tokenizer.ggml.token_type"]
    for key in keys:
        if key not in head.metadata:
            raise ModelError(f"{file} cannot be converted: its key {key} is missing; get it again.")


def _convert_with_reader(file: Path, head: GgufHead, work_folder: Path, reporter: Reporter) -> Path:
    size = file.stat().st_size
    destination = work_folder / conversion_key(file.stem, [file], READER_PACKAGES, LICENCE_NOTE)
    if destination.is_dir():
        return destination
    what = f"Converting {file.name}"
    announce_needs(reporter, what, round(size * READER_MEMORY_FACTOR), 2 * size)

    def make(scratch: Path) -> None:
        with _linked(file, scratch) as link:
            _run_reader(link, file, reporter)
        _complete(file, head, scratch)

    return keep(destination, 2 * size, what, make)


def _convert_with_transformers(file: Path, head: GgufHead, work_folder: Path, reporter: Reporter, why: str) -> Path:
    destination = work_folder / conversion_key(file.stem, [file], EXPORT_PACKAGES, LICENCE_NOTE)
    if destination.is_dir():
        return destination
    require_export_extra(GGUF_MODULES, f"{why}; converting it through transformers")
    what = f"Converting {file.name} through transformers"
    disk = DEQUANTISED_DISK_BYTES_PER_ELEMENT * head.elements
    announce_needs(reporter, what, head.elements * DEQUANTISING_BYTES_PER_ELEMENT + LIBRARIES_BYTES, disk)

    def make(scratch: Path) -> None:
        with _linked(file, scratch) as link:
            _run_transformers(link, file, reporter)
            for path in scratch.iterdir():
                if is_tokenizer_source(path.name):
                    path.unlink()  # what transformers takes for the file's tokenizer is another one
            _run_reader(link, file, reporter, "tokenizer")
        _complete(file, head, scratch)

    return keep(destination, disk, what, make)


def _complete(file: Path, head: GgufHead, folder: Path) -> None:
    for name in (MODEL_GRAPH, MODEL_WEIGHTS, *TOKENIZER_FILES):
        if not (folder / name).is_file():
            raise ModelError(f"Converting {file} made no {name}; OpenVINO GenAI does not know this model's tokenizer.")
    _note_licence(head, folder)


@contextmanager
def _linked(file: Path, folder: Path) -> Iterator[Path]:
    """The file under another name in a folder of ours, because the reader writes beside the file that it is given."""
    link = folder / "model.gguf"
    _link(file, link)
    yield link
    link.unlink()


def _run_reader(link: Path, file: Path, reporter: Reporter, *options: str) -> None:
    run_child_work(
        "shard_builder.sources.convert_gguf",
        (str(link), *options),
        complaint=f"OpenVINO GenAI's GGUF reader cannot convert {file}",
        on_progress=reporter.work("convert"),
        cancelled=reporter.cancelled,
    )


def _run_transformers(link: Path, file: Path, reporter: Reporter) -> None:
    run_child_work(
        "shard_builder.sources.convert_checkpoint",
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
