"""Reads heads of GGUF files, whole and damaged."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.errors import ModelError
from shard_builder.sources.gguf import is_gguf, read_head


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
