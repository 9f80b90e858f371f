"""Checks the cheapest cut of small networks against all cuts."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from shard_builder.cut.flow import UNLIMITED, FlowNetwork

VERTICES = range(6)
EDGES = st.dictionaries(
    st.tuples(st.sampled_from(VERTICES), st.sampled_from(VERTICES)).filter(lambda edge: edge[0] != edge[1]),
    st.one_of(st.integers(0, 9), st.just(UNLIMITED)),
    max_size=16,
)


def cost(edges: dict[tuple[int, int], int], behind: set[int]) -> int:
    return sum(capacity for (start, end), capacity in edges.items() if start not in behind and end in behind)


@given(EDGES)
def test_no_cut_is_cheaper_and_none_as_cheap_has_less_behind_it(edges: dict[tuple[int, int], int]) -> None:
    network = FlowNetwork()
    for (start, end), capacity in edges.items():
        network.connect(start, end, capacity)
    found, behind = network.minimum_cut(0, 5)
    between = VERTICES[1:-1]
    sides = [{5, *inner} for inner in chain.from_iterable(combinations(between, size) for size in range(5))]
    cheapest = min(cost(edges, side) for side in sides)
    assert (found >= UNLIMITED) == (cheapest >= UNLIMITED)
    if cheapest < UNLIMITED:
        assert found == cheapest
        assert all(behind <= side for side in sides if cost(edges, side) == cheapest)
        assert cost(edges, {vertex for vertex in behind if isinstance(vertex, int)}) == cheapest


def test_an_edge_without_room_is_no_edge() -> None:
    network = FlowNetwork()
    network.connect("start", "end", 0)
    assert not network.has("start", "end")
    assert network.minimum_cut("start", "end") == (0, {"end"})
