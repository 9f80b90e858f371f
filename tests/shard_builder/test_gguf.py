"""Reads heads of GGUF files, whole and damaged."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.errors import ModelError
from shard_builder.reporting import Reporter
from shard_builder.sources.gguf import is_gguf, read_head
from shard_builder.sources.gguf_source import convert_gguf_file


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def small_file() -> bytes:
    """Two metadata entries and one f32 tensor of 64 numbers."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("llama.context_length") + struct.pack("<II", 4, 8192)
    head += text("weight") + struct.pack("<IQQIQ", 2, 8, 8, 0, 0)
    head += b"\0" * (-len(head) % 32)
    return head + b"\0" * 256


def test_the_head_of_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_file())
    head = read_head(path)
    assert is_gguf(path)
    assert (head.architecture, head.number("context_length"), head.number("block_count")) == ("llama", 8192, 0)
    assert head.needed_bytes == len(small_file())


def test_the_bundled_model_needs_all_its_bytes(smollm2_gguf: Path) -> None:
    head = read_head(smollm2_gguf)
    assert head.needed_bytes == smollm2_gguf.stat().st_size
    assert head.number("block_count") == 30


@pytest.mark.parametrize("length", [0, 3, 4, 20, 60, 150, len(small_file()) - 1])
def test_files_cut_short_are_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_file()[:length])
    with pytest.raises(ModelError, match="cut short"):
        read_head(path)


def test_arrays_within_arrays_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("deep") + nested)
    with pytest.raises(ModelError, match="damaged"):
        read_head(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(4, 200), st.integers(0, 255)), max_size=6))
def test_damaged_heads_are_read_or_refused_in_words(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(small_file())
    for place, value in changes:
        content[place] = value
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ModelError):
        head = read_head(path)
        assert head.needed_bytes <= len(content)


def entry(key: str, value: int | str) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    return text(key) + struct.pack("<II", 4, value)


def tensor(name: str, place: int = 0, shape: tuple[int, ...] = (8,)) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, place)


def file_of(entries: list[bytes], tensors: list[bytes]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries + tensors)
    return head + bytes(-len(head) % 32 + 256)


LLAMA = entry("general.architecture", "llama")
TWO_LAYERS = [tensor("blk.0.a"), tensor("blk.1.a", 32)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<III", 1, 0, 0), "version 1 of GGUF"),
        (file_of([LLAMA], [tensor("w", 0, (2**63,) * 700)]), "700 dimensions"),
        (file_of([LLAMA], [tensor("w" * 999, 0, (1,) * 5)]), "5 dimensions, 'w{100}…'"),
        (file_of([LLAMA], [tensor("w", 0, (2**63,) * 4)]), "impossible size"),
        (file_of([LLAMA, entry("general.alignment", 24)], []), "general.alignment"),
        (file_of([LLAMA], [tensor("w", 4)]), "unaligned"),
        (file_of([LLAMA], [tensor("w"), tensor("v")]), "overlaps"),
        (file_of([LLAMA], [tensor("w"), tensor("w", 32)]), "two tensors of the name 'w'"),
        (file_of([LLAMA, entry("llama.block_count", 0)], TWO_LAYERS), "llama.block_count"),
        (file_of([LLAMA, entry("llama.block_count", 1)], TWO_LAYERS), "llama.block_count"),
        (file_of([LLAMA, entry("llama.block_count", 2**31)], TWO_LAYERS), "llama.block_count"),
        (file_of([LLAMA], TWO_LAYERS), "llama.block_count"),
        (file_of([LLAMA, entry("llama.attention.head_count", 0)], []), "llama.attention.head_count' is 0"),
        (file_of([LLAMA, entry("split.count", 3)], TWO_LAYERS), "one of the 3 parts"),
        (file_of([], []), "general.architecture is missing"),
    ],
)
def test_what_a_file_is_wrong_in_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as refused:
        read_head(path)
    assert len(str(refused.value)) < len(str(path)) + 300


@pytest.mark.parametrize(("count", "predicting"), [(2, 0), (2, 1), (3, 1)])
def test_the_layers_of_a_whole_file_are_counted(tmp_path: Path, count: int, predicting: int) -> None:
    path = tmp_path / "model.gguf"
    keys = [entry("llama.block_count", count), entry("llama.nextn_predict_layers", predicting)]
    path.write_bytes(file_of([LLAMA, *keys], TWO_LAYERS))
    assert read_head(path).number("block_count") == count


@pytest.mark.parametrize(
    "missing",
    [
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "llama.attention.head_count",
    ],
)
def test_a_key_that_the_reader_misses_is_named(smollm2_gguf: Path, tmp_path: Path, missing: str) -> None:
    head = read_head(smollm2_gguf)
    without = replace(head, metadata={key: value for key, value in head.metadata.items() if key != missing})
    with pytest.raises(ModelError, match=missing):
        convert_gguf_file(smollm2_gguf, without, tmp_path, Reporter(None, None))
    assert list(tmp_path.iterdir()) == []
