"""The names of a model's files, in the forms that models come in."""

from __future__ import annotations

import re
from pathlib import Path

from fleet.errors import ModelError

MODEL_GRAPH = "openvino_model.xml"
MODEL_WEIGHTS = "openvino_model.bin"
TOKENIZER_FILES = (
    "openvino_tokenizer.xml",
    "openvino_tokenizer.bin",
    "openvino_detokenizer.xml",
    "openvino_detokenizer.bin",
)
CONFIGURATION = "config.json"
CHECKPOINT_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
CHECKPOINT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_COMPANIONS = (
    CONFIGURATION,
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_LICENCE = re.compile(r"(LICEN[SC]E|NOTICE|COPYING|USE_POLICY|USE-POLICY)[A-Za-z0-9._-]*", re.IGNORECASE)
_LICENCE_SUFFIXES = ("", ".txt", ".md", ".pdf", ".rst", ".html")
_TOKENIZER_SOURCES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


def is_companion(name: str) -> bool:
    """Whether a file is taken along with the shards: configuration, chat template, licence."""
    if name in _COMPANIONS:
        return True
    return _LICENCE.fullmatch(name) is not None and Path(name).suffix.lower() in _LICENCE_SUFFIXES


def is_tokenizer_source(name: str) -> bool:
    """Whether a file is one that a tokenizer is made from."""
    return name in _TOKENIZER_SOURCES or name.endswith(".tiktoken")


def list_files(folder: Path) -> set[str]:
    """The names in a folder.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        return {path.name for path in folder.iterdir()}
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}.") from None


def companions(folder: Path) -> list[Path]:
    """The files of a folder that are taken along, by name; of those that differ in case alone, the first."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if is_companion(path.name) and path.is_file():
            found.setdefault(path.name.lower(), path)
    return list(found.values())
