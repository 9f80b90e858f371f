"""Lays out constants and writes them."""

from __future__ import annotations

import hashlib
import io

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from openvino import opset13

from fleet.manifest import RUN_ALIGNMENT_BYTES
from shard_builder.weights import (
    CONSTANT_ALIGNMENT_BYTES,
    SLICE_BYTES,
    Blob,
    find_runs,
    lay_out,
    place_runs,
    write_weights,
)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_blobs_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    layout = lay_out([Blob((number,), size) for number, size in enumerate(sizes)], (0,))
    end = 0
    for blob, offset in zip(layout.blobs, layout.offsets, strict=True):
        assert offset % CONSTANT_ALIGNMENT_BYTES == 0
        assert end <= offset < end + CONSTANT_ALIGNMENT_BYTES
        end = offset + blob.bytes
    assert layout.bytes == end


@given(st.lists(st.tuples(st.integers(1, 50), st.sets(st.integers(-1, 3), max_size=3)), min_size=1, max_size=12))
def test_a_written_file_holds_every_constant_at_its_place(constants: list[tuple[int, set[int]]]) -> None:
    arrays = [np.arange(size, dtype=np.int32) + 1000 * number for number, (size, _) in enumerate(constants)]
    operations = [opset13.constant(array) for array in arrays]
    runs = find_runs(operations, {number: parts for number, (_, parts) in enumerate(constants)})
    layout = place_runs(runs, range(len(operations)))
    file = io.BytesIO()
    counted = 0

    def count(size: int) -> None:
        nonlocal counted
        counted += size

    written = write_weights(file, layout, operations, b"cut", count)
    content = file.getvalue()
    for number, array in enumerate(arrays):
        offset, size = layout.places[number]
        assert content[offset : offset + size] == array.tobytes()
    for run, digest in zip(layout.runs, written.run_hashes, strict=True):
        assert run.offset % RUN_ALIGNMENT_BYTES == 0
        assert hashlib.sha256(content[run.offset : run.offset + run.layout.bytes]).hexdigest() == digest
    assert content[layout.cut_offset :] == b"cut"
    assert (written.bytes, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert counted == layout.run_bytes


def test_constants_at_one_place_of_the_file_are_written_once() -> None:
    array = np.arange(100, dtype=np.float32)
    shared = [opset13.constant(array, shared_memory=True) for _ in range(2)]
    runs = find_runs(shared, {0: {-1}, 1: {4}})
    assert [(run.parts, run.bytes, run.kind(4)) for run in runs] == [((-1, 4), 400, ("shared", None))]


def test_large_constants_are_written_in_slices() -> None:
    constant = opset13.constant(np.zeros(SLICE_BYTES + 5, dtype=np.uint8))
    sizes: list[int] = []
    write_weights(io.BytesIO(), place_runs(find_runs([constant], {0: {0}}), [0]), [constant], b"", sizes.append)
    assert sizes == [SLICE_BYTES, 5]
