"""Windows are found in the masks of a graph, whatever its configuration says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openvino as ov
import pytest

from shard_builder.cut.layers import find_states
from shard_builder.cut.opened_model import open_model
from shard_builder.cut.sliding_window import find_sliding_window

Writer = Callable[..., Path]


@pytest.mark.parametrize("window", [2, 8, 200])
@pytest.mark.parametrize("described", [0, 8, 150])
def test_a_window_of_the_graph_is_found(tiny_model: Writer, window: int, described: int) -> None:
    graph = tiny_model(sliding_window=window) / "openvino_model.xml"
    core = ov.Core()
    states = find_states(open_model(core, graph).graph)
    assert find_sliding_window(core, graph, states, 256, described) == window


@pytest.mark.parametrize("traits", [{}, {"attention_mask": False}, {"gather": False, "initialised": False}], ids=str)
def test_a_graph_without_a_window_has_none_though_its_configuration_speaks_of_one(
    tiny_model: Writer, traits: dict[str, bool]
) -> None:
    graph = tiny_model(**traits) / "openvino_model.xml"
    core = ov.Core()
    states = find_states(open_model(core, graph).graph)
    assert find_sliding_window(core, graph, states, 256, 8) == 0
    assert find_sliding_window(core, graph, states, 0, 0) == 0
