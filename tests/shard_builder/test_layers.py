"""Finds layers and stages in hand-made graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fleet.errors import ModelError
from shard_builder.graph import ASSIGN, READ_VALUE, SHAPE_OF, Graph, Node
from shard_builder.layers import LayerMap, Tensor, find_layers, layers_exit, plan_stage, readers


class Sketch:
    """Collects nodes; each call returns the number of the new one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, kind: str, *sources: int | tuple[int, int], variable: str = "") -> int:
        inputs = tuple(source if isinstance(source, tuple) else (source, 0) for source in sources)
        self.nodes.append(Node(kind, inputs, variable))
        return len(self.nodes) - 1

    def cache(self, name: str, new: int) -> int:
        whole = self.add("Concat", self.add(READ_VALUE, variable=name), new)
        self.add(ASSIGN, whole, variable=name)
        return whole


def decoder(layers: int, *, mask_from_first: bool = True) -> tuple[Sketch, list[int]]:
    """A decoder whose later layers read a mask that is made of shapes of the first; and what enters each layer."""
    sketch = Sketch()
    tokens = sketch.add("Parameter")
    hidden = sketch.add("Gather", sketch.add("Constant"), tokens)
    entries = []
    mask = None
    for layer in range(layers):
        entries.append(hidden)
        normal = sketch.add("Norm", hidden)
        key = sketch.cache(f"key{layer}", sketch.add("MatMul", normal, sketch.add("Constant")))
        value = sketch.cache(f"value{layer}", sketch.add("MatMul", normal))
        if mask is None or not mask_from_first:
            mask = sketch.add("Range", sketch.add(SHAPE_OF, key), sketch.add(SHAPE_OF, normal))
        middle = sketch.add("Add", hidden, sketch.add("Attention", normal, key, value, mask))
        hidden = sketch.add("Add", middle, sketch.add("MatMul", sketch.add("Norm", middle)))
    sketch.add("Logits", sketch.add("Norm", hidden), sketch.add("Constant"))
    return sketch, entries


def find(nodes: Sequence[Node]) -> LayerMap:
    return find_layers(Graph(tuple(nodes)), 0, Tensor(len(nodes) - 1, 0))


def test_layers_are_the_groups_of_states_on_the_residual_stream() -> None:
    sketch, entries = decoder(4)
    layers = find(sketch.nodes)
    assert [entry.node for entry in layers.entries] == entries
    assert [[state.variable for state in group] for group in layers.states] == [
        [f"key{layer}", f"value{layer}"] for layer in range(4)
    ]


def test_a_later_stage_rebuilds_shapes_of_the_first_layer() -> None:
    sketch, entries = decoder(4)
    layers = find(sketch.nodes)
    first, last = plan_stage(layers, 0, 2), plan_stage(layers, 2, 4)
    assert first.foreign_shapes == ()
    assert [sketch.nodes[shape].kind for shape in last.foreign_shapes] == [SHAPE_OF, SHAPE_OF]
    assert last.source == Tensor(entries[2], 0)
    assert not any(sketch.nodes[node].variable in ("key0", "value1") for node in last.nodes)
    own, _ = decoder(4, mask_from_first=False)
    assert plan_stage(find(own.nodes), 2, 4).foreign_shapes == ()


def test_what_only_a_shape_needs_is_not_read_by_a_layer() -> None:
    sketch, _ = decoder(3)
    layers = find(sketch.nodes)
    who = readers(layers, layers_exit(layers, layers.chain[-2]))
    constants = [number for number, node in enumerate(sketch.nodes) if node.kind == "Constant"]
    assert [sorted(who[number]) for number in constants] == [[-1], [0], [1], [2], [3]]


def test_the_final_norm_belongs_to_the_head() -> None:
    sketch, _ = decoder(3)
    layers = find(sketch.nodes)
    exit_node = layers_exit(layers, layers.chain[-2])
    assert sketch.nodes[layers.chain[-2]].kind == "Norm"
    assert exit_node == layers.chain[-3]
    alone = find(decoder(1)[0].nodes)
    assert layers_exit(alone, alone.chain[-2]) == alone.chain[-2]


def test_a_state_of_another_stage_is_refused_by_name() -> None:
    sketch = Sketch()
    hidden = sketch.add("Gather", sketch.add("Parameter"))
    past = sketch.add(READ_VALUE, variable="first")
    sketch.add(ASSIGN, sketch.add("Concat", past, hidden), variable="first")
    middle = sketch.add("Add", hidden, sketch.add("Attention", hidden, past))
    key = sketch.cache("second", middle)
    sketch.add("Logits", sketch.add("Add", middle, sketch.add("Attention", middle, key, past)))
    layers = find(sketch.nodes)
    assert len(layers.entries) == 2
    with pytest.raises(ModelError, match="Layers 1 to 1 read the state 'first' of another layer"):
        plan_stage(layers, 1, 2)


def test_a_cut_through_two_outputs_is_refused() -> None:
    sketch = Sketch()
    split = sketch.add("Split", sketch.add("Parameter"))
    first = sketch.cache("first", split)
    both = sketch.add("Split", sketch.add("Add", (split, 0), (split, 1), first))
    key = sketch.cache("second", sketch.add("MatMul", (both, 0)))
    sketch.add("Logits", sketch.add("Attention", key, (both, 1)))
    with pytest.raises(ModelError, match="More than one tensor enters layer 1"):
        plan_stage(find(sketch.nodes), 1, 2)


def test_faults_of_states_are_named() -> None:
    sketch = Sketch()
    tokens = sketch.add("Parameter")
    sketch.cache("counter", sketch.add("Constant"))
    logits = sketch.add("Logits", tokens)
    graph = Graph(tuple(sketch.nodes))
    with pytest.raises(ModelError, match="'counter' does not derive from the tokens"):
        find_layers(graph, tokens, Tensor(logits, 0))
    sketch.add(READ_VALUE, variable="counter")
    with pytest.raises(ModelError, match="'counter' is used in several places"):
        find_layers(Graph(tuple(sketch.nodes)), tokens, Tensor(logits, 0))
    nodes = [Node("Parameter", ()), Node(READ_VALUE, (), "lost"), Node("Logits", ((0, 0),))]
    with pytest.raises(ModelError, match="'lost' is read or stored but not both"):
        find(nodes)
    with pytest.raises(ModelError, match="keeps no state"):
        find([Node("Parameter", ()), Node("Logits", ((0, 0),))])
    with pytest.raises(ModelError, match="do not depend on its input_ids"):
        find([Node("Parameter", ()), Node("Constant", ()), Node("Logits", ((1, 0),))])
