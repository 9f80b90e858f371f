"""The placement draft: whatever a person does, it stays a placement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.placement.draft import PlacementDraft
from fleet.node import NodeId
from fleet.placement import PlacementNode


def nodes(count: int) -> tuple[PlacementNode, ...]:
    return tuple(PlacementNode(NodeId(f"{number:016x}"), f"pc-{number}", "CPU", 1 << 33) for number in range(count))


@st.composite
def drafts(draw: st.DrawFn) -> PlacementDraft:
    layers = draw(st.integers(1, 40))
    used = draw(st.integers(1, min(layers, 6)))
    cuts = sorted(draw(st.sets(st.integers(1, max(layers - 1, 1)), min_size=used - 1, max_size=used - 1)))
    everybody = nodes(used + draw(st.integers(0, 3)))
    return PlacementDraft(layers, everybody[:used], tuple(cuts), everybody[used:])


def check(draft: PlacementDraft, like: PlacementDraft) -> None:
    """Every layer is on exactly one node, every stage has one, and no node is lost or doubled."""
    ranges = [draft.layers_of(stage) for stage in range(len(draft.nodes))]
    assert [layer for first, end in ranges for layer in range(first, end)] == list(range(like.layer_count))
    assert all(end > first for first, end in ranges)
    assert sorted(node.id for node in (*draft.nodes, *draft.unused)) == sorted(
        node.id for node in (*like.nodes, *like.unused)
    )


@given(drafts(), st.integers(0, 10), st.integers(-50, 50))
def test_a_boundary_stops_at_its_neighbours(draft: PlacementDraft, boundary: int, layers: int) -> None:
    if not draft.cuts:
        return
    boundary %= len(draft.cuts)
    moved = draft.moved(boundary, layers)
    check(moved, draft)
    least, greatest = draft.limits_of(boundary)
    assert moved.cuts[boundary] == min(max(draft.cuts[boundary] + layers, least), greatest)
    assert [cut for number, cut in enumerate(moved.cuts) if number != boundary] == [
        cut for number, cut in enumerate(draft.cuts) if number != boundary
    ]


@given(drafts(), st.integers(0, 10), st.integers(-5, 60))
def test_a_stage_gets_the_layers_that_its_neighbour_can_spare(draft: PlacementDraft, stage: int, count: int) -> None:
    stage %= len(draft.nodes)
    changed = draft.with_layers(stage, count)
    check(changed, draft)
    first, end = changed.layers_of(stage)
    if draft.cuts and count >= 1:
        assert end - first <= max(count, 1)


@given(drafts(), st.integers(0, 10), st.integers(0, 10))
def test_exchanging_twice_is_nothing(draft: PlacementDraft, stage: int, other: int) -> None:
    stage, other = stage % len(draft.nodes), other % len(draft.nodes)
    check(draft.exchanged(stage, other), draft)
    assert draft.exchanged(stage, other).exchanged(stage, other) == draft


@given(drafts(), st.integers(0, 10))
def test_leaving_a_node_out_gives_its_layers_to_a_neighbour(draft: PlacementDraft, stage: int) -> None:
    stage %= len(draft.nodes)
    changed = draft.without(stage)
    check(changed, draft)
    if len(draft.nodes) > 1:
        assert draft.nodes[stage] in changed.unused
        assert set(changed.cuts) <= set(draft.cuts)
    else:
        assert changed == draft


@given(drafts(), st.integers(0, 10))
def test_a_node_that_joins_halves_the_largest_stage(draft: PlacementDraft, number: int) -> None:
    if not draft.unused:
        return
    joining = draft.unused[number % len(draft.unused)]
    changed = draft.with_node(joining.id)
    check(changed, draft)
    if draft.layer_count > len(draft.nodes):
        assert joining in changed.nodes
        assert len(changed.nodes) == len(draft.nodes) + 1


@given(st.integers(1, 100), st.integers(1, 8))
def test_an_even_draft_differs_by_one_layer_at_most(layers: int, count: int) -> None:
    draft = PlacementDraft.even(layers, nodes(count))
    sizes = [end - first for first, end in map(draft.layers_of, range(len(draft.nodes)))]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("cuts", [(), (3, 3), (0, 4), (4, 10), (5, 4)])
def test_what_is_no_placement_is_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cuts"):
        PlacementDraft(10, nodes(3), cuts)
