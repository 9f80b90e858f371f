"""Reads the head of a GGUF file: its metadata, and whether the file is whole.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fleet.errors import ModelError

MAGIC = b"GGUF"
MAX_ENTRIES = 1 << 20
MAX_TEXT_BYTES = 64 << 20
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
"""GGML_MAX_DIMS of ggml."""
MAX_ELEMENTS = 1 << 48
DEFAULT_ALIGNMENT_BYTES = 32
_NAME_CHARACTERS = 100
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
}  # fmt: skip
"""Per tensor type of ggml: elements in a block, bytes of a block."""
_FLOATING = {0, 1, 30}
"""f32, f16 and bf16."""


@dataclass(frozen=True)
class GgufHead:
    """The metadata by key, the bytes that the file must have at least, and what its tensors are."""

    metadata: dict[str, Any]
    needed_bytes: int
    elements: int
    """Numbers in all tensors together."""
    is_quantised: bool
    """Whether a tensor is of another type than f32, f16 and bf16."""

    @property
    def architecture(self) -> str:
        """The model's family as llama.cpp names it."""
        return str(self.metadata.get("general.architecture", ""))

    def number(self, key: str) -> int:
        """A whole number under ``<architecture>.<key>``; 0 where the file does not give it."""
        value = self.metadata.get(f"{self.architecture}.{key}", 0)
        return value if isinstance(value, int) else 0


class _RefusedError(Exception):
    """What the file is, other than damaged: the words behind its name."""


def is_gguf(path: Path) -> bool:
    """Whether the file begins as GGUF files do.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None


def read_head(path: Path) -> GgufHead:
    """The head of a GGUF file.

    Raises:
        ModelError: not a GGUF file of a known version, damaged, or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            head = _Reader(content).head()
            size = len(content)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except _RefusedError as refused:
        raise ModelError(f"{path} {refused}.") from None
    except (struct.error, UnicodeDecodeError, ValueError, KeyError):
        raise ModelError(f"{path} is not a whole GGUF file: its head is damaged or cut short; get it again.") from None
    if size < head.needed_bytes:
        raise ModelError(
            f"{path} is cut short: it has {size:,} bytes and its tensors need {head.needed_bytes:,}; get it again."
        )
    return head


def shorten(name: str) -> str:
    """A name of a file's own, fit for a sentence: 100 characters that can be printed."""
    shown = "".join(character if character.isprintable() else "?" for character in name[:_NAME_CHARACTERS])
    return f"'{shown}…'" if len(name) > _NAME_CHARACTERS else f"'{shown}'"


def _check_metadata(metadata: dict[str, Any], tensors: set[str]) -> None:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise _RefusedError(
            "does not say its model's architecture: its key general.architecture is missing; get it again"
        )
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise _RefusedError(f"is one of the {parts} parts of a model; join them with llama-gguf-split --merge")
    blocks = {int(found[1]) for name in tensors if (found := re.match(r"blk\.([0-9]{1,9})\.", name))}
    if blocks:
        key = f"{architecture}.block_count"
        count, predicting = metadata.get(key), metadata.get(f"{architecture}.nextn_predict_layers", 0)
        counts = [count]
        if isinstance(count, int) and isinstance(predicting, int):
            # Layers that predict further tokens are counted, and some files lack them.
            counts.append(count - predicting)
        if len(blocks) not in counts or blocks != set(range(len(blocks))):
            raise _RefusedError(
                f"does not hold together: its key {shorten(key)} does not match the layers of its tensors, "
                f"of which there are {len(blocks)}; get it again"
            )
    for name in ("attention.head_count", "attention.head_count_kv"):
        if metadata.get(f"{architecture}.{name}", 1) == 0:
            raise _RefusedError(
                f"does not hold together: its key {shorten(f'{architecture}.{name}')} is 0; get it again"
            )


class _Reader:
    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0

    def head(self) -> GgufHead:
        if self._take(len(MAGIC)) != MAGIC:
            raise ValueError("no GGUF magic")
        version = self._scalar("<I")
        if version and not version & 0xFFFF:
            raise _RefusedError("is a big-endian GGUF file, which is not read here; get the little-endian one")
        if version not in (2, 3):
            raise _RefusedError(f"is of version {version} of GGUF, and only 2 and 3 are read; convert the model again")
        tensors, entries = self._count(), self._count()
        metadata = {}
        for _ in range(entries):
            key = self._text()
            metadata[key] = self._value(self._scalar("<I"))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise _RefusedError("has a general.alignment that is no power of two; get it again")
        total = 0
        kinds = set()
        names = set()
        places = []
        for _ in range(tensors):
            name = self._text()
            if name in names:
                raise _RefusedError(f"has two tensors of the name {shorten(name)}; get it again")
            names.add(name)
            dimensions = self._scalar("<I")
            if dimensions > MAX_DIMENSIONS:
                raise _RefusedError(
                    f"has a tensor of {dimensions} dimensions, {shorten(name)}, and GGUF has at most "
                    f"{MAX_DIMENSIONS}; get it again"
                )
            shape = [self._scalar("<Q") for _ in range(dimensions)]
            elements = prod(shape)
            if elements > MAX_ELEMENTS:
                raise _RefusedError(f"has a tensor of impossible size, {shorten(name)}; get it again")
            total += elements
            kind = self._scalar("<I")
            kinds.add(kind)
            block, block_bytes = _BLOCKS[kind]
            place = self._scalar("<Q")
            if place % alignment:
                raise _RefusedError(f"has a tensor at an unaligned place, {shorten(name)}; get it again")
            places.append((place, place + -(-elements // block) * block_bytes, name))
        end = 0
        for place, place_end, name in sorted(places):
            if place < end:
                raise _RefusedError(f"has a tensor that overlaps another, {shorten(name)}; get it again")
            end = place_end
        _check_metadata(metadata, names)
        start = -(-self._at // alignment) * alignment
        return GgufHead(metadata, start + end, total, not kinds <= _FLOATING)

    def _take(self, size: int) -> bytes:
        if size > MAX_TEXT_BYTES or self._at + size > len(self._content):
            raise ValueError("beyond the end")
        piece = self._content[self._at : self._at + size]
        self._at += size
        return piece

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _count(self) -> int:
        count: int = self._scalar("<Q")
        if count > MAX_ENTRIES:
            raise ValueError("too many entries")
        return count

    def _text(self) -> str:
        return self._take(self._scalar("<Q")).decode()

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self._take(self._scalar("<Q")).decode(errors="replace")
        if kind == _ARRAY:
            if depth == MAX_ARRAY_DEPTH:
                raise ValueError("arrays within arrays")
            item, count = self._scalar("<I"), self._count()
            return [self._value(item, depth + 1) for _ in range(count)]
        return self._scalar(_SCALARS[kind])
