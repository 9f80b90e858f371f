"""A model's graph without its weights, and the questions that the cut asks of it. Nothing here knows OpenVINO.

Nodes are numbered in a topological order, so every edge goes from a lower to a higher number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

SHAPE_OF = "ShapeOf"
READ_VALUE = "ReadValue"
ASSIGN = "Assign"
CONSTANT = "Constant"
NOWHERE = -1


class Tensor(NamedTuple):
    """An output port of a node; the port is NOWHERE where more than one carries the data."""

    node: int
    port: int


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. ``inputs`` are (node, output port) pairs; ``variable`` is set for ReadValue and Assign.

    ``bytes`` is the size of a constant, ``name`` what people know the operation by.
    """

    kind: str
    inputs: tuple[tuple[int, int], ...]
    variable: str = ""
    bytes: int = 0
    name: str = field(default="", compare=False)


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

    def tensor_name(self, tensor: Tensor) -> str:
        """What people know a tensor by: its operation's name, with the port behind one that is not the first."""
        name = self.nodes[tensor.node].name or f"{self.nodes[tensor.node].kind} {tensor.node}"
        return f"{name}:{tensor.port}" if tensor.port > 0 else name


def downstream(graph: Graph, sources: Iterable[int], blocked: Collection[tuple[int, int]] = ()) -> set[int]:
    """Nodes to which the sources' data flows, the sources included, not counting what reads only a shape.

    Data does not flow through the tensors (node and output port) of ``blocked``.
    """
    reached = set(sources)
    waiting = list(reached)
    while waiting:
        number = waiting.pop()
        for consumer, port in graph.consumers[number]:
            if consumer in reached or graph.nodes[consumer].kind == SHAPE_OF or (number, port) in blocked:
                continue
            reached.add(consumer)
            waiting.append(consumer)
    return reached


def upstream(
    graph: Graph,
    targets: Iterable[int],
    blocked: Collection[tuple[int, int]] = (),
    opaque: Collection[int] = (),
) -> set[int]:
    """Nodes that the targets need, the targets included.

    What the tensors (node and output port) of ``blocked`` are made of is no part of it. A ShapeOf that reads a node of
    ``opaque`` is itself part of it, but what it reads is not followed.
    """
    reached = set(targets)
    waiting = list(reached)
    while waiting:
        node = graph.nodes[waiting.pop()]
        for tensor in node.inputs:
            source = tensor[0]
            if source in reached or tensor in blocked or (node.kind == SHAPE_OF and source in opaque):
                continue
            reached.add(source)
            waiting.append(source)
    return reached


def immediate_dominators(graph: Graph, roots: Collection[int], within: Collection[int]) -> dict[int, int]:
    """For every node of ``within`` the nearest other node through which all data from the roots to it flows.

    A single root maps to itself; several hang, as equals, on NOWHERE, which maps to itself. Edges into ShapeOf do not
    count. ``within`` must be the nodes to which the roots' data flows. One pass of the algorithm of Cooper, Harvey and
    Kennedy, "A Simple, Fast Dominance Algorithm" (2001), is enough because the graph has no cycles and its numbering is
    topological.
    """
    top = next(iter(roots)) if len(roots) == 1 else NOWHERE
    dominator = {top: top}
    for number in sorted(within):
        if number == top:
            continue
        common = NOWHERE if number in roots else None
        for source, _ in graph.nodes[number].inputs:
            if source in dominator:
                common = source if common is None else nearest_common(dominator, common, source)
        if common is None:
            raise ValueError(f"node {number} is not reached from the roots")
        dominator[number] = common
    return dominator


def nearest_common(dominator: dict[int, int], one: int, other: int) -> int:
    """The nearest node that is, or dominates, each of two nodes."""
    while one != other:
        if one > other:
            one = dominator[one]
        else:
            other = dominator[other]
    return one


def dominator_chain(dominator: dict[int, int], target: int) -> tuple[int, ...]:
    """The nodes through which all data from the root to the target flows, root first, target last."""
    chain = [target]
    while dominator[chain[-1]] != chain[-1]:
        chain.append(dominator[chain[-1]])
    return tuple(reversed(chain))
