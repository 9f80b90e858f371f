"""The planner against every placement there is, on small cases, and its words."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import PlacementError
from fleet.manifest import Layer, Manifest, Run
from fleet.memory_need import CHUNK_TOKENS, GATEWAY_BYTES, LATER_KERNELS_BYTES, PROCESS_BYTES, ModelNeed
from fleet.node import NodeId
from fleet.placement import PlacementNode, assess_cuts, placement_for_cuts, plan, problem_of
from fleet.placement_search import PlacementSearch

MB = 1_000_000
BASE = PROCESS_BYTES + LATER_KERNELS_BYTES


def model(
    layer_bytes: Sequence[int],
    *,
    embedding: int = 0,
    head: int = 0,
    shared: Sequence[int] = (),
    tied: int = 0,
    kv_elements: int = 100,
) -> Manifest:
    runs = [Run(f"{index:064x}", size, "layer", index) for index, size in enumerate(layer_bytes)]
    if embedding:
        runs.append(Run("e" * 64, embedding, "embedding"))
    if head:
        runs.append(Run("d" * 64, head, "head"))
    runs += [Run(f"{index:x}" * 64, size, "shared") for index, size in enumerate(shared, start=10)]
    if tied:
        # The embedding is read from the file; the head keeps a copy.
        runs.append(Run("f" * 64, tied, "shared", parts=(-1, len(layer_bytes)), anonymous_bytes=(tied // 10, tied)))
    return Manifest(
        manifest_version=1,
        model_id="m",
        name="Model",
        architecture="llama",
        hidden_size=8,
        vocabulary_size=8,
        context_tokens=0,
        kv_precision="f16",
        layers=tuple(Layer(index, size, kv_elements, kv_elements * 2) for index, size in enumerate(layer_bytes)),
        runs=tuple(runs),
        stages=(),
        tokenizer=(),
        stop_token_ids=(),
    )


def nodes_of(*budgets: int) -> list[PlacementNode]:
    return [PlacementNode(NodeId(f"{index:016x}"), f"PC-{index}", "CPU", size) for index, size in enumerate(budgets)]


def all_placements(layers: int, nodes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Every ordered choice of nodes with every cut: (node, first, end) per stage."""
    for count in range(1, min(layers, nodes) + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            for order in itertools.permutations(range(nodes), count):
                yield list(zip(order, (0, *cuts), (*cuts, layers), strict=True))


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 8),
    st.integers(0, 8),
    st.lists(st.integers(0, 25), min_size=1, max_size=4),
    st.booleans(),
)
def test_the_search_finds_what_trying_everything_finds(
    layer_bytes: list[int], first_extra: int, last_extra: int, budgets: list[int], most_nodes: bool
) -> None:
    layers = len(layer_bytes)

    def needed(first: int, end: int) -> int:
        return (
            1 + sum(layer_bytes[first:end]) + (first_extra if first == 0 else 0) + (last_extra if end == layers else 0)
        )

    def load(first: int, end: int) -> int:
        return sum(layer_bytes[first:end]) + (last_extra if end == layers else 0)

    fitting = [
        placement
        for placement in all_placements(layers, len(budgets))
        if all(needed(first, end) <= budgets[node] for node, first, end in placement)
    ]
    search = PlacementSearch(layers, needed, load, budgets)
    found = search.best(most_nodes=most_nodes)
    assert search.fits() is bool(fitting)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert [stage.first_layer for stage in found] == [0, *(stage.end_layer for stage in found[:-1])]
    assert found[-1].end_layer == layers
    assert len({stage.node for stage in found}) == len(found)
    assert all(needed(stage.first_layer, stage.end_layer) <= budgets[stage.node] for stage in found)
    count = (max if most_nodes else min)(len(placement) for placement in fitting)
    best = min(max(load(first, end) for _, first, end in placement) for placement in fitting if len(placement) == count)
    assert len(found) == count
    assert max(load(stage.first_layer, stage.end_layer) for stage in found) == best


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.integers(0, 500),
    st.integers(0, 500),
    st.lists(st.integers(0, 9000), min_size=1, max_size=7),
    st.integers(1, 4096),
    st.integers(1, 4),
    st.booleans(),
)
def test_no_budget_is_exceeded_and_every_layer_is_placed_once(
    layer_mb: list[int], embedding_mb: int, head_mb: int, budget_mb: list[int], context: int, users: int, spread: bool
) -> None:
    manifest = model([size * MB for size in layer_mb], embedding=embedding_mb * MB, head=head_mb * MB, shared=[5 * MB])
    nodes = nodes_of(*(size * MB for size in budget_mb))
    need = ModelNeed(manifest, context, users)
    fits = PlacementSearch(
        need.layers, lambda first, end: need.of(first, end).bytes, need.load, [node.budget_bytes for node in nodes]
    ).fits()
    if not fits:
        with pytest.raises(PlacementError, match="does not fit") as raised:
            plan(manifest, nodes, context, users, spread=spread)
        assert all(node.name in str(raised.value) for node in nodes)
        return
    placement = plan(manifest, nodes, context, users, spread=spread)
    edges = [stage.first_layer for stage in placement.stages]
    assert edges[0] == 0
    assert placement.stages[-1].end_layer == len(layer_mb)
    assert edges[1:] == [stage.end_layer for stage in placement.stages[:-1]]
    assert all(stage.needed_bytes <= stage.budget_bytes for stage in placement.stages)
    assert problem_of(placement) == ""
    assert {stage.node for stage in placement.stages} | {left.node for left in placement.left_out} == {
        node.id for node in nodes
    }
    assert sum(stage.weight_bytes for stage in placement.stages) >= sum(run.bytes for run in manifest.runs)


def test_equal_nodes_get_equal_shares_and_the_head_counts() -> None:
    manifest = model([10 * MB] * 30, embedding=100 * MB, head=100 * MB)
    stages = plan(manifest, nodes_of(9000 * MB, 9000 * MB)).stages
    assert [(stage.first_layer, stage.end_layer) for stage in stages] == [(0, 20), (20, 30)]


def test_few_nodes_are_used_if_asked_and_the_reason_is_given() -> None:
    manifest = model([10 * MB] * 8)
    placement = plan(manifest, nodes_of(9000 * MB, 9000 * MB, 10 * MB), spread=False)
    assert [stage.node_name for stage in placement.stages] == ["PC-0"]
    assert [left.node_name for left in placement.left_out] == ["PC-1", "PC-2"]
    assert "fits without it" in placement.left_out[0].reason
    assert "one layer needs" in placement.left_out[1].reason


def test_more_nodes_than_layers() -> None:
    placement = plan(model([MB, MB]), nodes_of(*[9000 * MB] * 4))
    assert len(placement.stages) == 2
    assert all("2 layers" in left.reason for left in placement.left_out)


def test_a_small_node_is_not_put_where_the_embedding_goes() -> None:
    manifest = model([10 * MB] * 10, embedding=1000 * MB, head=10 * MB)
    placement = plan(manifest, nodes_of(300 * MB, 3000 * MB))
    assert [stage.node_name for stage in placement.stages] == ["PC-1", "PC-0"]


def test_a_tied_embedding_is_counted_at_both_ends_and_not_between() -> None:
    manifest = model([10 * MB] * 9, tied=200 * MB)
    need = ModelNeed(manifest, 1, 1)
    assert need.of(0, 3).weight_bytes == 50 * MB
    assert need.of(3, 6).weight_bytes == 30 * MB
    assert need.of(6, 9).weight_bytes == 230 * MB
    assert need.of(0, 9).weight_bytes == 310 * MB
    mapped = [need.memory(first, end).mapped_bytes for first, end in ((0, 3), (3, 6), (6, 9), (0, 9))]
    assert mapped == [230 * MB, 30 * MB, 230 * MB, 290 * MB]
    assert need.load(0, 3) == need.load(3, 6) == 30 * MB
    assert need.load(6, 9) == 230 * MB


def test_kv_and_runtime_follow_context_users_and_precision() -> None:
    manifest = model([100 * MB] * 4, kv_elements=1000)
    need = ModelNeed(manifest, 1000, 3).of(1, 3)
    assert need.kv_bytes == 2 * 1000 * 2 * 1000 * 3
    assert ModelNeed(manifest, 1000, 3, "f32").of(1, 3).kv_bytes == 2 * need.kv_bytes
    # u8 keeps scales beside the values.
    assert ModelNeed(manifest, 1000, 3, "u8").of(1, 3).kv_bytes == need.kv_bytes * 9 // 16
    # In a step of several tokens the attention keeps one sequence's cache once more.
    assert need.runtime_bytes == BASE + need.kv_bytes // 3
    assert ModelNeed(manifest, 1000, 3).of(0, 2).runtime_bytes == BASE + need.kv_bytes // 3 + GATEWAY_BYTES


def test_a_step_takes_memory_by_its_tokens_but_not_more_than_there_are() -> None:
    manifest = msgspec.structs.replace(model([100 * MB] * 4, kv_elements=0), step_bytes_per_token=1000)
    assert ModelNeed(manifest, 10_000, 1).memory(0, 2).step_bytes == CHUNK_TOKENS * 1000
    assert ModelNeed(manifest, 100, 1).memory(0, 2).step_bytes == 100 * 1000
    memory = ModelNeed(manifest, 100, 1, chunk_tokens=8).memory(0, 2)
    assert memory.step_bytes == 8 * 1000
    assert memory.anonymous_bytes == 200 * MB + 8 * 1000 + PROCESS_BYTES


def test_the_failing_term_is_named() -> None:
    manifest = model([100 * MB] * 4, kv_elements=100_000)
    nodes = nodes_of(1200 * MB, 100 * MB)
    with pytest.raises(PlacementError, match=r"The KV cache is what is too large: [\d,]+ tokens of context would fit"):
        plan(manifest, nodes, 100_000)
    with pytest.raises(PlacementError, match="The weights and the runtime alone are too large") as raised:
        plan(manifest, nodes_of(200 * MB, 100 * MB))
    assert "PC-1 has 100 MB and needs" in str(raised.value)
    with pytest.raises(PlacementError, match="There is no node"):
        plan(manifest, [])


def test_hand_made_cuts_are_checked() -> None:
    manifest = model([100 * MB] * 4)
    nodes = nodes_of(9000 * MB, 300 * MB)
    assert placement_for_cuts(manifest, nodes, [3], users=1).stages[1].first_layer == 3
    with pytest.raises(PlacementError, match=r"PC-1 needs \d+ MB for layers 1 to 3 .* too much"):
        placement_for_cuts(manifest, nodes, [1])
    assessed = assess_cuts(manifest, nodes, [1])
    assert [stage.needed_bytes > stage.budget_bytes for stage in assessed.stages] == [False, True]
    for cuts in ([], [0], [4], [1, 2]):
        with pytest.raises(PlacementError):
            placement_for_cuts(manifest, nodes, cuts)
    with pytest.raises(PlacementError, match="do not rise"):
        assess_cuts(manifest, nodes_of(1, 1, 1), [3, 2])
    with pytest.raises(PlacementError, match="twice"):
        assess_cuts(manifest, [nodes[0], nodes[0]], [2])


def test_a_room_full_of_different_pcs_is_planned_in_seconds() -> None:
    manifest = model([(200 + index % 3) * MB for index in range(80)], embedding=500 * MB, head=500 * MB)
    nodes = nodes_of(*(900 * MB + index * 137 * MB for index in range(24)))
    begun = time.monotonic()
    placement = plan(manifest, nodes, 2048)
    assert time.monotonic() - begun < 20
    assert problem_of(placement) == ""
    assert len(placement.stages) + len(placement.left_out) == 24


def test_a_stage_needs_memory_for_the_caches_that_it_copies() -> None:
    plain = model((100, 100, 100), kv_elements=8)
    borrowing = msgspec.structs.replace(
        plain, layers=(*plain.layers[:2], msgspec.structs.replace(plain.layers[2], borrowed_caches=(0,)))
    )
    without, within = (ModelNeed(manifest, 1000, 2) for manifest in (plain, borrowing))
    one = without.of(1, 2).kv_bytes
    assert within.of(2, 3).kv_bytes == without.of(2, 3).kv_bytes + one
    assert within.of(1, 2).kv_bytes == one
    assert within.of(0, 3).kv_bytes == without.of(0, 3).kv_bytes
