"""Models whose inputs and outputs are not as a pipeline feeds and reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from fleet.errors import ModelError
from shard_builder import build, inspect
from shard_builder.cut.surgery import HIDDEN_INPUT
from tests.shard_builder.broken_caches import Caches

Writer = Callable[..., Path]
Change = Callable[[ov.Model], None]


def changed(folder: Path, change: Change) -> Path:
    """The model of a folder, changed in its place."""
    graph = folder / "openvino_model.xml"
    model = ov.Core().read_model(graph)
    change(model)
    ov.serialize(model, folder / "changed.xml", folder / "changed.bin")
    del model
    (folder / "changed.xml").replace(graph)
    (folder / "changed.bin").replace(folder / "openvino_model.bin")
    return folder


def parameter_of(model: ov.Model, name: str) -> Any:
    return next(one for one in model.get_parameters() if name in one.output(0).get_names())


def retyped(name: str, element_type: str) -> Change:
    def change(model: ov.Model) -> None:
        old = parameter_of(model, name)
        new = ops.parameter(old.get_partial_shape(), getattr(ov.Type, element_type))
        converted = ops.convert(new, old.get_element_type().get_type_name())
        for target in list(old.output(0).get_target_inputs()):
            target.replace_source_output(converted.output(0))
        model.remove_parameter(old)
        new.output(0).get_tensor().set_names({name})
        model.add_parameters([new])

    return change


@pytest.mark.parametrize(
    ("name", "element_type"),
    [("input_ids", "i32"), ("attention_mask", "i32"), ("position_ids", "i32"), ("beam_idx", "i64")],
)
def test_inputs_of_another_integer_type_are_fed_as_all_are(
    tiny_model: Writer, tmp_path: Path, name: str, element_type: str
) -> None:
    model = changed(tiny_model(), retyped(name, element_type))
    manifest = build(model, tmp_path / "shards", stages=2)
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    assert any(f"'{name}'" in note for note in manifest.notes)
    for stage in manifest.stages:
        for port in ov.Core().read_model(tmp_path / "shards" / stage.graph.name).inputs:
            expected = {"beam_idx": "i32", HIDDEN_INPUT: "f32"}.get(port.any_name, "i64")
            assert port.get_element_type().get_type_name() == expected


def test_outputs_before_the_logits_are_left_out(tiny_model: Writer, tmp_path: Path) -> None:
    def change(model: ov.Model) -> None:
        logits = model.get_results()[0]
        first = ops.result(ops.relu(parameter_of(model, "input_ids")))
        first.output(0).get_tensor().set_names({"something"})
        model.remove_result(logits)
        model.add_results([first, logits])

    manifest = build(changed(tiny_model(), change), tmp_path / "shards", stages=1)
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    assert any("'something'" in note for note in manifest.notes)
    assert len(ov.Core().read_model(tmp_path / "shards" / "stage-0.xml").outputs) == 1


@pytest.mark.parametrize(("axis", "words"), [(0, "a batch of 3 alone"), (1, "a number of tokens of 3 alone")])
def test_static_shapes_are_refused_at_once(tiny_model: Writer, axis: int, words: str) -> None:
    def change(model: ov.Model) -> None:
        shape = [3, -1] if axis == 0 else [-1, 3]
        model.reshape(dict.fromkeys(("input_ids", "position_ids"), shape))

    with pytest.raises(ModelError, match=words):
        inspect(changed(tiny_model(attention_mask=False), change))


@pytest.mark.parametrize("port", [1, 2])
def test_a_cache_whose_gather_fits_nothing_is_a_sentence(tiny_model: Writer, tmp_path: Path, port: int) -> None:
    def change(model: ov.Model) -> None:
        value = ops.constant(np.array([0], np.int32)) if port == 1 else ops.constant(np.array(1, np.int64))
        Caches(model).gather().input(port).replace_source_output(value.output(0))

    with pytest.raises(ModelError, match=r"cut"):
        build(changed(tiny_model(), change), tmp_path / "shards", stages=2)
    assert not (tmp_path / "shards").exists()
