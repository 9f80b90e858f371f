"""Checks the questions about graphs against definitions, on random graphs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shard_builder.cut.graph import (
    SHAPE_OF,
    Graph,
    Node,
    dominator_chain,
    downstream,
    immediate_dominators,
    upstream,
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs in topological order; some nodes read only shapes."""
    count = draw(st.integers(1, 24))
    nodes = [Node("Parameter", ())]
    for number in range(1, count):
        kind = draw(st.sampled_from(["Add", "Add", "Add", SHAPE_OF]))
        fan_in = 1 if kind == SHAPE_OF else draw(st.integers(0, 3))
        sources = draw(st.lists(st.integers(0, number - 1), min_size=fan_in, max_size=fan_in))
        nodes.append(Node(kind, tuple((source, 0) for source in sources)))
    return Graph(tuple(nodes))


def reaches(graph: Graph, without: int | None) -> set[int]:
    """Nodes that data from node 0 reaches when one node is taken away; the plain definition, edge by edge."""
    reached = {0} - {without}
    for number, node in enumerate(graph.nodes):
        if number != without and node.kind != SHAPE_OF and any(source in reached for source, _ in node.inputs):
            reached.add(number)
    return reached


@given(graphs())
def test_downstream_is_what_data_reaches(graph: Graph) -> None:
    assert downstream(graph, [0]) == reaches(graph, None)
    for number in range(1, len(graph.nodes)):
        assert downstream(graph, [0], {(number, 0)}) - {number} == reaches(graph, number)


@given(graphs())
def test_dominators_are_the_nodes_without_which_data_does_not_arrive(graph: Graph) -> None:
    within = downstream(graph, [0])
    dominator = immediate_dominators(graph, {0}, within)
    assert set(dominator) == within
    for target in within:
        without_arrival = {number for number in within if target not in reaches(graph, number)}
        assert set(dominator_chain(dominator, target)) == without_arrival | {0, target}


@given(graphs(), st.data())
def test_upstream_is_closed_and_minimal(graph: Graph, data: st.DataObject) -> None:
    numbers = st.integers(0, len(graph.nodes) - 1)
    target, blocked = data.draw(numbers), data.draw(numbers)
    opaque = data.draw(st.sets(numbers))
    found = upstream(graph, [target], {(blocked, 0)}, opaque)
    assert (blocked in found) == (blocked == target)
    assert target in found
    for number in found:
        node = graph.nodes[number]
        for source, _ in node.inputs:
            assert source in found or source == blocked or (node.kind == SHAPE_OF and source in opaque)
        read = any(number in {source for source, _ in graph.nodes[consumer].inputs} for consumer in found)
        assert read or number == target


def test_a_graph_of_many_thousand_nodes_is_quick() -> None:
    """The chain of an 80-layer model with long side branches; the time limit of the test run is the check."""
    nodes = [Node("Parameter", ())]
    for _ in range(20_000):
        last = len(nodes) - 1
        nodes.append(Node("MatMul", ((last, 0),)))
        nodes.append(Node("Add", ((last, 0), (last + 1, 0))))
    graph = Graph(tuple(nodes))
    chain = dominator_chain(immediate_dominators(graph, {0}, downstream(graph, [0])), len(nodes) - 1)
    assert chain == tuple(range(0, len(nodes), 2))
