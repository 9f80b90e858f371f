"""What the CPU plugin keeps of a constant follows from what the graph does with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from shard_builder.anonymous_memory import AnonymousMemory
from shard_builder.cut.opened_model import open_model
from shard_builder.weights import Blob, lay_out

ROWS, COLUMNS, GROUP = 64, 32, 8
GROUPS = COLUMNS // GROUP


def compressed(name: str, *, zero_points: bool) -> ov.Output:
    """A matrix [ROWS, COLUMNS] in u8 with a scale, and perhaps a zero point, per group."""
    shape = [ROWS, GROUPS, GROUP]
    weights = ops.constant(np.arange(ROWS * COLUMNS, dtype=np.uint8).reshape(shape), name=name)
    values = ops.convert(weights, "f16")
    if zero_points:
        zeros = ops.constant(np.full([ROWS, GROUPS, 1], 8, np.uint8), name=f"{name}.zeros")
        values = ops.subtract(values, ops.convert(zeros, "f16"))
    scales = ops.constant(np.full([ROWS, GROUPS, 1], 0.5, np.float16), name=f"{name}.scales")
    whole = ops.reshape(ops.multiply(values, scales), ops.constant([ROWS, COLUMNS]), special_zero=False)
    return ops.convert(whole, "f32").output(0)


def kept(model: ov.Model, folder: Path) -> dict[str, int]:
    """Bytes kept of every constant by its name; each is a run of its own, read by part 0."""
    path = folder / "model.xml"
    ov.save_model(model, path, compress_to_fp16=False)
    opened = open_model(ov.Core(), path)
    numbers = range(len(opened.operations))
    memory = AnonymousMemory(opened.operations, opened.graph, dict.fromkeys(numbers, (0,)))
    return {
        opened.operations[number].get_friendly_name(): sum(
            memory.of_run(lay_out([Blob((number,), opened.operations[number].get_byte_size())], (0,)))
        )
        for number in numbers
        if opened.operations[number].get_type_name() == "Constant"
    }


def test_a_matrix_is_kept_once_more_and_its_parameters_in_f32(tmp_path: Path) -> None:
    hidden = ops.parameter([-1, COLUMNS], np.float32, "hidden")
    product = ops.matmul(hidden, compressed("matrix", zero_points=True), False, True)
    found = kept(ov.Model([product], [hidden]), tmp_path)
    assert found["matrix"] == ROWS * COLUMNS
    assert found["matrix.scales"] == found["matrix.zeros"] == ROWS * GROUPS * 4


def test_of_a_table_only_the_parameters_are_kept(tmp_path: Path) -> None:
    tokens = ops.parameter([-1], np.int64, "tokens")
    rows = ops.gather(compressed("table", zero_points=False), tokens, ops.constant(0))
    found = kept(ov.Model([rows], [tokens]), tmp_path)
    assert found["table"] == 0
    assert found["table.scales"] == ROWS * GROUPS * 4


def test_a_matrix_of_short_floats_is_kept_in_its_own_type_and_a_norm_in_f32(tmp_path: Path) -> None:
    hidden = ops.parameter([-1, COLUMNS], np.float32, "hidden")
    norm = ops.constant(np.full([1, COLUMNS], 0.5, np.float16), name="norm")
    matrix = ops.constant(np.arange(ROWS * COLUMNS, dtype=np.float16).reshape(ROWS, COLUMNS), name="matrix")
    product = ops.matmul(ops.multiply(hidden, ops.convert(norm, "f32")), ops.convert(matrix, "f32"), False, True)
    found = kept(ov.Model([product], [hidden]), tmp_path)
    assert found["matrix"] == ROWS * COLUMNS * 2
    assert found["norm"] == COLUMNS * 4
