"""Follows every key or value cache of a graph: from its ReadValue to the Concat, to the Assign, and to the attention.

Nothing is judged here. A path is told by two facts alone: the Assign stores (perhaps changed) a Concat that grows along
a dynamic axis of the state, and one input of that Concat derives from a ReadValue. Whatever lies on the way is listed,
so that :mod:`shard_builder.fusion.rules` can say which node should not be there. States that do not grow with the
tokens (recurrent, convolution) have no path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shard_builder.cut.graph import ASSIGN, READ_VALUE, SHAPE_OF
from shard_builder.cut.opened_model import OpenedModel

ATTENTION = "ScaledDotProductAttention"
REPEAT_KINDS = frozenset({"Unsqueeze", "Reshape", "Broadcast", "Multiply", "Transpose"})
"""What may lie between a cache and its attention: repeating grouped heads, and laying dimensions in another order."""
SLICING_KINDS = frozenset({"Slice", "StridedSlice", "ScatterElementsUpdate", "ScatterUpdate"})
_MOVING_KINDS = (
    SLICING_KINDS | REPEAT_KINDS | {"Convert", "Gather", "Squeeze", "FakeQuantize", "VariadicSplit", "Split"}
)
"""What changes a tensor's form but not what it is: through these a cache is still the same cache."""

Broken = Iterator[tuple[int, str]]
"""Nodes that break a rule, each with the reason."""


@dataclass(frozen=True)
class CachePath:
    """One cache. All numbers are nodes of the graph; tuples are in the order in which the data flows."""

    variable: str
    """Of the Assign."""
    read: int
    past: tuple[int, ...]
    """Between the ReadValue and the Concat."""
    past_port: int
    """Which input of the Concat the past is."""
    concat: int
    present: tuple[int, ...]
    """Between the Concat and the Assign."""
    assign: int
    repeat: tuple[int, ...] = ()
    """Between the Concat and the attention, or the obstacle."""
    attention: int | None = None
    """The ScaledDotProductAttention; None where none reads the cache."""
    attention_port: int = 0
    """1 for a key, 2 for a value; 0 where there is no attention."""
    obstacle: int | None = None
    """The node at which the way to an attention ended; None where it did not, or nothing reads the cache."""


class CacheGraph:
    """A model's graph with the paths of all its caches."""

    def __init__(self, opened: OpenedModel) -> None:
        self.opened = opened
        self.nodes = opened.graph.nodes

    @cached_property
    def paths(self) -> tuple[CachePath, ...]:
        """In the order of the Assigns."""
        found = (self._path(number) for number, node in enumerate(self.nodes) if node.kind == ASSIGN)
        return tuple(path for path in found if path is not None)

    @cached_property
    def reads(self) -> Mapping[str, tuple[int, ...]]:
        """The ReadValues of every variable."""
        found: dict[str, tuple[int, ...]] = defaultdict(tuple)
        for number, node in enumerate(self.nodes):
            if node.kind == READ_VALUE:
                found[node.variable] += (number,)
        return found

    @cached_property
    def attentions(self) -> dict[int, tuple[CachePath, ...]]:
        """The paths that end at each ScaledDotProductAttention, its key first."""
        found: dict[int, list[CachePath]] = defaultdict(list)
        for path in self.paths:
            if path.attention is not None:
                found[path.attention].append(path)
        return {
            attention: tuple(sorted(paths, key=lambda path: path.attention_port)) for attention, paths in found.items()
        }

    def name(self, number: int) -> str:
        """What the graph calls a node."""
        return str(self.opened.operations[number].get_friendly_name())

    def consumers(self, number: int) -> list[int]:
        """The nodes that read a node, each once per input that does."""
        return [consumer for consumer, _ in self.opened.graph.consumers[number]]

    def data_consumers(self, number: int) -> list[int]:
        """The same without those that read its shape alone."""
        return [consumer for consumer in self.consumers(number) if self.nodes[consumer].kind != SHAPE_OF]

    def element_type(self, number: int) -> str:
        """As OpenVINO names it."""
        return str(self.opened.operations[number].get_output_element_type(0).get_type_name())

    def axis(self, concat: int) -> int:
        """The axis of a Concat, counted from the front where its rank is known."""
        operation = self.opened.operations[concat]
        axis = int(operation.get_attributes()["axis"])
        rank = operation.get_output_partial_shape(0).rank
        return axis % rank.get_length() if rank.is_static else axis

    def constant(self, number: int, port: int) -> list[int] | None:
        """The integers of the constant at an input of a node; None where another node is there."""
        source, _ = self.nodes[number].inputs[port]
        operation: Any = self.opened.operations[source]
        if self.nodes[source].kind != "Constant":
            return None
        return [int(value) for value in operation.get_vector()]

    def shape(self, number: int) -> str:
        """As OpenVINO writes it, dynamic dimensions as ``?``."""
        return str(self.opened.operations[number].get_output_partial_shape(0))

    def order(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The order of dimensions that the Transposes among some nodes leave; empty where they change nothing."""
        order: list[int] = []
        for number in numbers:
            if self.nodes[number].kind == "Transpose":
                step = self.constant(number, 1) or []
                order = [order[axis] for axis in step] if order else step
        return () if order == sorted(order) else tuple(order)

    def gather(self, path: CachePath) -> int | None:
        """The Gather that reorders a cache before it grows."""
        return next((number for number in path.past if self.nodes[number].kind == "Gather"), None)

    def stores(self, consumer: int, path: CachePath) -> bool:
        """Whether a consumer of the Concat is on the way to the Assign."""
        return consumer == path.assign or consumer in path.present

    def _path(self, assign: int) -> CachePath | None:
        present: list[int] = []
        number = self.nodes[assign].inputs[0][0]
        while self.nodes[number].kind in _MOVING_KINDS:
            present.insert(0, number)
            number = self.nodes[number].inputs[0][0]
        if self.nodes[number].kind != "Concat":
            return None
        for port, (source, _) in enumerate(self.nodes[number].inputs):
            past = self._past(source)
            if past is not None and self._grows(past[0], number):
                variable = self.nodes[assign].variable
                path = CachePath(variable, past[0], past[1:], port, number, tuple(present), assign)
                return self._with_attention(path)
        return None

    def _past(self, number: int) -> tuple[int, ...] | None:
        """The nodes from a ReadValue, itself included, to this one; None where no ReadValue lies behind it."""
        found = [number]
        while self.nodes[found[0]].kind in _MOVING_KINDS:
            found.insert(0, self.nodes[found[0]].inputs[0][0])
        return tuple(found) if self.nodes[found[0]].kind == READ_VALUE else None

    def _grows(self, read: int, concat: int) -> bool:
        """Whether the state has no fixed length along the axis of the Concat."""
        shape = self.opened.operations[read].get_output_partial_shape(0)
        if shape.rank.is_dynamic:
            return True
        axis = self.axis(concat)
        return axis >= len(shape) or bool(shape[axis].is_dynamic)

    def _with_attention(self, path: CachePath) -> CachePath:
        """The path with what lies between the Concat and its attention, or with what is in the way."""
        blocked = path
        for *between, last in self._ways(path.concat, (), path):
            if self.nodes[last].kind == ATTENTION:
                source = between[-1] if between else path.concat
                port = [number for number, _ in self.nodes[last].inputs].index(source)
                return replace(path, repeat=tuple(between), attention=last, attention_port=port)
            if blocked is path:
                blocked = replace(path, repeat=tuple(between), obstacle=last)
        return blocked

    def _ways(self, number: int, before: tuple[int, ...], path: CachePath) -> Iterator[tuple[int, ...]]:
        """Every way on from a node through what repeats heads, up to and with the first node that is something else."""
        for consumer in self.data_consumers(number):
            if self.stores(consumer, path) or self.nodes[consumer].kind == "Result":
                continue
            if self.nodes[consumer].kind in REPEAT_KINDS:
                yield from self._ways(consumer, (*before, consumer), path)
            else:
                yield (*before, consumer)
