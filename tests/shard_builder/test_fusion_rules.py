"""Breaks one rule of the attention fusions after the other, and asks the CPU plugin whether it minds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

from fleet.manifest import FusionFault
from shard_builder.check.chain import count_fused_attention
from shard_builder.check.reference import exact_properties
from shard_builder.cut.opened_model import open_model
from shard_builder.fusion.rules import RULES, check_fusion
from tests.shard_builder import broken_caches
from tests.shard_builder.broken_caches import Caches
from tests.shard_builder.conftest import TinyDecoder

LAYERS = 2


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyDecoder(layers=LAYERS).write(tmp_path_factory.mktemp("decoder")) / "openvino_model.xml"


def broken(decoder: Path, change: Callable[[Caches], None], folder: Path) -> Path:
    """The decoder's graph after the change, as a file."""
    caches = Caches(ov.Core().read_model(decoder))
    change(caches)
    caches.model.validate_nodes_and_infer_types()
    ov.serialize(caches.model, folder / "broken.xml", folder / "broken.bin")
    return folder / "broken.xml"


def faults_of(graph: Path) -> tuple[FusionFault, ...]:
    return check_fusion(open_model(ov.Core(), graph))


def fused_by_cpu(graph: Path) -> int:
    return count_fused_attention(ov.Core().compile_model(graph, "CPU", exact_properties("CPU", "f32")))


def leave_alone(_: Caches) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (broken_caches.swapped_variables, {"same-variable"}),
        (broken_caches.read_by_another, {"read-value-consumers"}),
        (broken_caches.no_gather, {"beam-gather-present"}),
        (broken_caches.gather_read_twice, {"gather-single-consumer"}),
        (broken_caches.axis_from_input, {"beam-gather-axis-constant"}),
        (broken_caches.long_index, {"beam-index-is-i32-vector"}),
        (broken_caches.second_index_for_a_key, {"one-beam-index-per-attention", "one-beam-index-per-shard"}),
        (broken_caches.gathered_along_heads, {"equal-gather-axes"}),
        (broken_caches.grown_along_another_axis, {"equal-concat-axes", "equal-transposes"}),
        (broken_caches.turned_keys_and_values, {"equal-transposes"}),
        (broken_caches.converted_twice, {"no-convert-between-cache-and-gather"}),
        (broken_caches.kept_in_half_precision, {"no-convert-between-cache-and-gather", "cache-type-kept"}),
        (broken_caches.converted_after_the_gather, {"no-convert-between-gather-and-concat"}),
        (broken_caches.sliced_past, {"no-slice-in-cache"}),
        (broken_caches.sliced_present, {"no-slice-in-cache"}),
        (broken_caches.turned_past, {"only-gather-in-cache"}),
        (broken_caches.three_parts, {"concat-of-two"}),
        (broken_caches.new_first, {"past-first"}),
        (broken_caches.cache_read_by_another, {"concat-consumers"}),
        (broken_caches.two_shapes, {"one-shape-of-concat"}),
        (broken_caches.given_out, {"kv-not-exposed"}),
        (broken_caches.decomposed, {"attention-is-sdpa"}),
        (broken_caches.changed_before_attention, {"only-repeat-before-attention"}),
        (broken_caches.grouped_and_read_by_another, {"repeat-single-consumer"}),
        (broken_caches.repeated_once, {"repeat-is-complete"}),
    ],
)
def test_what_breaks_a_rule_of_the_cpu_plugin_loses_the_fusion(
    decoder: Path, tmp_path: Path, change: Callable[[Caches], None], rules: set[str]
) -> None:
    graph = broken(decoder, change, tmp_path)
    faults = faults_of(graph)
    assert {fault.rule for fault in faults} == rules
    assert any("CPU" in fault.plugins for fault in faults)
    assert fused_by_cpu(graph) < LAYERS


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (leave_alone, set()),
        (broken_caches.grouped, set()),
        (broken_caches.one_shape_twice, set()),
        (broken_caches.shapes_of_the_gather, set()),
        (broken_caches.converted_index, {"beam-index-is-parameter"}),
        (broken_caches.constant_index, {"beam-index-is-parameter"}),
        (broken_caches.second_index_for_a_layer, {"one-beam-index-per-shard"}),
    ],
)
def test_what_the_cpu_plugin_fuses_breaks_no_rule_of_it(
    decoder: Path, tmp_path: Path, change: Callable[[Caches], None], rules: set[str]
) -> None:
    graph = broken(decoder, change, tmp_path)
    faults = faults_of(graph)
    assert {fault.rule for fault in faults} == rules
    assert all(fault.plugins == ("GPU",) for fault in faults)
    assert fused_by_cpu(graph) == LAYERS


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (broken_caches.gathered_twice, "one-gather-per-cache"),
        (broken_caches.not_initialised, "read-value-initialised"),
    ],
)
def test_what_must_not_run_breaks_a_rule(
    decoder: Path, tmp_path: Path, change: Callable[[Caches], None], rule: str
) -> None:
    # What the CPU plugin does with these is undefined: it refuses, goes on, or reads beyond the cache and crashes.
    assert [fault.rule for fault in faults_of(broken(decoder, change, tmp_path))] == [rule]


def test_a_state_that_is_read_twice_breaks_a_rule(decoder: Path, tmp_path: Path) -> None:
    graph = broken(decoder, leave_alone, tmp_path)
    graph.write_text(graph.read_text().replace('variable_id="k1"', 'variable_id="k0"'))
    assert {fault.rule for fault in faults_of(graph)} == {"read-once"}


def test_a_fault_names_the_node_and_the_reason(decoder: Path, tmp_path: Path) -> None:
    faults = faults_of(broken(decoder, broken_caches.given_out, tmp_path))
    assert faults == (FusionFault("kv-not-exposed", "added_output", "it gives the cache 'k0' out of the model"),)


def test_a_state_that_does_not_grow_is_not_judged(decoder: Path, tmp_path: Path) -> None:
    def add_recurrent_state(caches: Caches) -> None:
        ops = ov.opset13
        start = ops.constant(np.zeros((1, 4), dtype=np.float32))
        read = ops.read_value(start, "recurrent", np.float32, [1, 4])
        sinks = [*caches.model.get_sinks(), ops.assign(ops.relu(read), "recurrent")]
        caches.model = ov.Model(caches.model.get_results(), sinks, caches.model.get_parameters(), "hybrid")

    def add_convolution_state(caches: Caches) -> None:
        ops = ov.opset13
        read = ops.read_value(ops.constant(np.zeros((1, 4), dtype=np.float32)), "window", np.float32, [1, 4])
        longer = ops.concat([read, ops.constant(np.ones((1, 1), dtype=np.float32))], 1)
        window = ops.slice(longer, *(broken_caches.integers(number) for number in (-4, 2**31, 1, 1)))
        sinks = [*caches.model.get_sinks(), ops.assign(window, "window")]
        caches.model = ov.Model(caches.model.get_results(), sinks, caches.model.get_parameters(), "hybrid")

    for add in (add_recurrent_state, add_convolution_state):
        assert faults_of(broken(decoder, add, tmp_path)) == ()


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.plugins and rule.serves.endswith(".") for rule in RULES)
