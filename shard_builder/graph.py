"""A model's graph without its weights, and the questions that the cut asks of it. Nothing here knows OpenVINO.

Nodes are numbered in a topological order, so every edge goes from a lower to a higher number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

SHAPE_OF = "ShapeOf"
READ_VALUE = "ReadValue"
ASSIGN = "Assign"
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. ``inputs`` are (node, output port) pairs; ``variable`` is set for ReadValue and Assign."""

    kind: str
    inputs: tuple[tuple[int, int], ...]
    variable: str = ""


@dataclass(frozen=True)
class Graph:
    """All operations of a model in topological order."""

    nodes: tuple[Node, ...]

    @cached_property
    def consumers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per node the (consumer, output port that it reads) pairs."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for source, port in node.inputs:
                found[source].append((number, port))
        return tuple(tuple(pairs) for pairs in found)

    def data_ports(self, number: int, within: Collection[int]) -> set[int]:
        """Output ports of a node that are read, by nodes of ``within``, for more than their shape."""
        return {
            port
            for consumer, port in self.consumers[number]
            if consumer in within and self.nodes[consumer].kind != SHAPE_OF
        }


def downstream(graph: Graph, sources: Iterable[int], blocked: int = NOWHERE) -> set[int]:
    """Nodes to which the sources' data flows, the sources included, not counting what reads only a shape.

    The node ``blocked`` is left out, with everything that is reached through it alone.
    """
    reached = set(sources)
    reached.discard(blocked)
    waiting = list(reached)
    while waiting:
        for consumer, _ in graph.consumers[waiting.pop()]:
            if consumer != blocked and consumer not in reached and graph.nodes[consumer].kind != SHAPE_OF:
                reached.add(consumer)
                waiting.append(consumer)
    return reached


def upstream(graph: Graph, targets: Iterable[int], blocked: int = NOWHERE, opaque: Collection[int] = ()) -> set[int]:
    """Nodes that the targets need, the targets included.

    Neither the node ``blocked`` nor what it alone needs is part of it. A ShapeOf that reads a node of ``opaque`` is
    itself part of it, but what it reads is not followed.
    """
    reached = set(targets)
    reached.discard(blocked)
    waiting = list(reached)
    while waiting:
        node = graph.nodes[waiting.pop()]
        for source, _ in node.inputs:
            if source == blocked or source in reached or (node.kind == SHAPE_OF and source in opaque):
                continue
            reached.add(source)
            waiting.append(source)
    return reached


def immediate_dominators(graph: Graph, root: int, within: Collection[int]) -> dict[int, int]:
    """For every node of ``within`` the nearest other node through which all data from ``root`` to it flows.

    The root maps to itself. Edges into ShapeOf do not count. ``within`` must be the nodes to which the root's data
    flows. One pass of the algorithm of Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm" (2001), is
    enough because the graph has no cycles and its numbering is topological.
    """
    dominator = {root: root}
    for number in sorted(within):
        if number == root:
            continue
        common = NOWHERE
        for source, _ in graph.nodes[number].inputs:
            if source not in dominator:
                continue
            if common == NOWHERE:
                common = source
            while common != source:
                if common > source:
                    common = dominator[common]
                else:
                    source = dominator[source]
        dominator[number] = common
    return dominator


def dominator_chain(dominator: dict[int, int], target: int) -> tuple[int, ...]:
    """The nodes through which all data from the root to the target flows, root first, target last."""
    chain = [target]
    while dominator[chain[-1]] != chain[-1]:
        chain.append(dominator[chain[-1]])
    return tuple(reversed(chain))
