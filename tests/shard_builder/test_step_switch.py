"""Positions from which on a model computes a whole step otherwise are found in its graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openvino as ov
import pytest

from fleet.errors import ModelError
from shard_builder import build, prepare_npu
from shard_builder.cut.opened_model import open_model
from shard_builder.cut.step_switch import find_step_switch

Writer = Callable[..., Path]


@pytest.mark.parametrize("switch", [1, 8, 4096, 100_000])
def test_a_switch_is_found(tiny_model: Writer, switch: int) -> None:
    graph = tiny_model(step_switch=switch) / "openvino_model.xml"
    core = ov.Core()
    assert find_step_switch(core, open_model(core, graph), graph) == switch


@pytest.mark.parametrize("traits", [{}, {"sliding_window": 8}], ids=str)
def test_comparisons_of_single_positions_are_none(tiny_model: Writer, traits: dict[str, int]) -> None:
    graph = tiny_model(**traits) / "openvino_model.xml"
    core = ov.Core()
    assert find_step_switch(core, open_model(core, graph), graph) == 0


def test_the_manifest_says_so(tiny_model: Writer, tmp_path: Path) -> None:
    manifest = build(tiny_model(step_switch=20), tmp_path / "shards", stages=2)
    assert manifest.step_switch_tokens == 20
    assert any("more than 20 tokens" in note for note in manifest.notes)
    assert manifest.paged is not None
    assert not manifest.paged.served
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0


def test_a_form_for_an_npu_stays_on_one_side(tiny_model: Writer, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    build(tiny_model(step_switch=60), shards, stages=2, check="none")
    with pytest.raises(ModelError, match="both together may be at most 60"):
        prepare_npu(shards, context_tokens=48, chunk_tokens=16)
    form = prepare_npu(shards).npu
    assert form is not None
    assert (form.context_tokens, form.chunk_tokens) == (40, 20)
