"""Finds layers and stages in hand-made graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from fleet.errors import ModelError
from shard_builder.cut.crossing import crossing_tensors
from shard_builder.cut.graph import ASSIGN, READ_VALUE, SHAPE_OF, Graph, Node, Tensor
from shard_builder.cut.layers import LayerMap, find_layers, layers_exit
from shard_builder.cut.parts import HEAVY_CONSTANT_BYTES, find_parts
from shard_builder.cut.stage_plan import StagePlan, plan_stage


class Sketch:
    """Collects nodes; each call returns the number of the new one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, kind: str, *sources: int | tuple[int, int], variable: str = "", size: int = 0, name: str = "") -> int:
        inputs = tuple(source if isinstance(source, tuple) else (source, 0) for source in sources)
        self.nodes.append(Node(kind, inputs, variable, size, name))
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


def crossing(layers: LayerMap, layer: int, widths: Mapping[int, int | None] | None = None) -> tuple[Tensor, ...]:
    """What crosses the cut in front of a layer; every tensor is 8 wide unless ``widths`` says otherwise."""
    parts = find_parts(layers, layers_exit(layers, layers.chain[-2]))
    return crossing_tensors(layers, parts, layer, lambda tensor: (widths or {}).get(tensor.node, 8))


def plan(layers: LayerMap, first: int, end: int) -> StagePlan:
    sources = crossing(layers, first) if first else ()
    return plan_stage(layers, first, end, sources, crossing(layers, end) if end < len(layers.entries) else ())


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
    first, last = plan(layers, 0, 2), plan(layers, 2, 4)
    assert first.foreign_shapes == ()
    assert [sketch.nodes[shape].kind for shape in last.foreign_shapes] == [SHAPE_OF, SHAPE_OF]
    assert last.sources == first.results == (Tensor(entries[2], 0),)
    assert not any(sketch.nodes[node].variable in ("key0", "value1") for node in last.nodes)
    own, _ = decoder(4, mask_from_first=False)
    assert plan(find(own.nodes), 2, 4).foreign_shapes == ()


def test_what_only_a_shape_needs_is_not_read_by_a_layer() -> None:
    sketch, _ = decoder(3)
    layers = find(sketch.nodes)
    who = find_parts(layers, layers_exit(layers, layers.chain[-2])).readers
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


def decoder_with_side_tensors(layers: int, *, shared: bool = False) -> tuple[Sketch, list[int], list[int]]:
    """A decoder that adds its own slice of a token table in every layer, and whose last layer reads the first's cache.

    Gives what enters each layer and the slices.
    """
    sketch = Sketch()
    tokens = sketch.add("Parameter")
    hidden = sketch.add("Gather", sketch.add("Constant", size=HEAVY_CONSTANT_BYTES), tokens)
    table = sketch.add("Gather", sketch.add("Constant", size=HEAVY_CONSTANT_BYTES), tokens)
    scaled = sketch.add("Multiply", table, sketch.add("Constant"))
    entries, slices = [], []
    first_key = None
    for layer in range(layers):
        entries.append(hidden)
        slices.append(sketch.add("Slice", scaled, sketch.add("Constant"), name=f"slice {layer}"))
        normal = sketch.add("Norm", hidden)
        weight = sketch.add("Constant", size=HEAVY_CONSTANT_BYTES)
        key = sketch.cache(f"key{layer}", sketch.add("MatMul", normal, weight, name=f"new {layer}"))
        first_key = key if first_key is None else first_key
        read = first_key if shared and layer == layers - 1 else key
        middle = sketch.add("Add", hidden, sketch.add("Attention", sketch.add("MatMul", normal), read))
        hidden = sketch.add("Add", middle, sketch.add("Multiply", sketch.add("MatMul", middle), slices[-1]))
    sketch.add("Logits", sketch.add("Norm", hidden), sketch.add("Constant"))
    return sketch, entries, slices


def test_slices_of_a_token_table_cross_with_the_stream() -> None:
    sketch, entries, slices = decoder_with_side_tensors(4)
    layers = find(sketch.nodes)
    assert [entry.node for entry in layers.entries] == entries
    narrow = dict.fromkeys(slices, 2)
    assert crossing(layers, 1, narrow) == (Tensor(entries[1], 0), *(Tensor(node, 0) for node in slices[1:]))
    assert crossing(layers, 3, narrow) == (Tensor(entries[3], 0), Tensor(slices[3], 0))
    [stream, whole] = crossing(layers, 1)
    assert (stream.node, sketch.nodes[whole.node].kind) == (entries[1], "Multiply")
    assert not {entries[0], sketch.nodes[whole.node].inputs[0][0]} & plan(layers, 1, 4).nodes


def test_a_token_table_belongs_to_the_embedding_and_what_is_cheap_to_all_that_may_need_it() -> None:
    sketch, _, slices = decoder_with_side_tensors(3)
    layers = find(sketch.nodes)
    who = find_parts(layers, layers_exit(layers, layers.chain[-2])).readers
    heavy = [number for number, node in enumerate(sketch.nodes) if node.bytes]
    assert [sorted(who[number]) for number in heavy] == [[-1], [-1], [0], [1], [2]]
    for number in slices:
        assert who[sketch.nodes[number].inputs[1][0]] == {-1, 0, 1, 2}


def test_a_cache_that_a_later_stage_reads_is_copied_there() -> None:
    sketch, entries, _ = decoder_with_side_tensors(3, shared=True)
    layers = find(sketch.nodes)
    assert [entry.node for entry in layers.entries] == entries
    for stage in (plan(layers, 1, 2), plan(layers, 2, 3)):
        assert "new 0" in {sketch.nodes[tensor.node].name for tensor in stage.sources}
    last = plan(layers, 2, 3)
    assert [state.variable for state in last.states] == ["key0", "key2"]
    assert [state.variable for state in last.copied] == ["key0"]
    assert plan(layers, 1, 2).copied == ()
    assert plan(layers, 0, 3).copied == ()


def test_layers_without_a_cache_of_their_own_are_layers() -> None:
    sketch = Sketch()
    hidden = sketch.add("Gather", sketch.add("Constant"), sketch.add("Parameter"))
    entries = []
    for layer in range(5):
        entries.append(hidden)
        normal = sketch.add("Norm", hidden)
        if layer < 3:
            key = sketch.cache(f"key{layer}", sketch.add("MatMul", normal))
        hidden = sketch.add("Add", hidden, sketch.add("Attention", sketch.add("MatMul", normal), key))
    sketch.add("Logits", sketch.add("Norm", hidden))
    layers = find(sketch.nodes)
    assert [entry.node for entry in layers.entries] == entries
    assert [len(group) for group in layers.states] == [1, 1, 1, 0, 0]
    assert [state.variable for state in plan(layers, 4, 5).copied] == ["key2"]


def fused_attention(sketch: Sketch, normal: int, layer: int) -> int:
    key, value = (sketch.cache(f"{kind}{layer}", sketch.add("MatMul", normal)) for kind in ("key", "value"))
    return sketch.add("Attention", sketch.add("MatMul", normal), key, value)


def attention_in_single_operations(sketch: Sketch, normal: int, layer: int) -> int:
    """With a mask that is made of the tokens: the value is read behind what depends on a state and on tokens."""
    key, value = (sketch.cache(f"{kind}{layer}", sketch.add("MatMul", normal)) for kind in ("key", "value"))
    scores = sketch.add("MatMul", sketch.add("MatMul", normal), key)
    masked = sketch.add("Add", scores, sketch.add("Unsqueeze", 0))
    return sketch.add("MatMul", sketch.add("SoftMax", masked), value)


def linear_attention(sketch: Sketch, normal: int, layer: int) -> int:
    """A convolution over a state, and a recurrent state that is updated behind it, with a gate."""
    row = sketch.add("Concat", sketch.add(READ_VALUE, variable=f"key{layer}"), sketch.add("MatMul", normal))
    sketch.add(ASSIGN, sketch.add("Slice", row), variable=f"key{layer}")
    split = sketch.add("Split", sketch.add("Swish", sketch.add("Convolution", row)))
    past = sketch.add(READ_VALUE, variable=f"value{layer}")
    loop = sketch.add("Loop", (split, 0), (split, 1), past, sketch.add("Sigmoid", normal))
    both = sketch.add("Concat", (loop, 0), (loop, 1))
    sketch.add(ASSIGN, sketch.add("Slice", both), variable=f"value{layer}")
    return sketch.add("Multiply", sketch.add("Slice", both), sketch.add("Swish", normal))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("attention", [fused_attention, attention_in_single_operations, linear_attention])
def test_a_layer_is_one_however_few_there_are(attention: Callable[[Sketch, int, int], int], count: int) -> None:
    sketch = Sketch()
    hidden = sketch.add("Gather", sketch.add("Parameter"))
    for layer in range(count):
        mixed = sketch.add("MatMul", attention(sketch, sketch.add("Norm", hidden), layer))
        middle = sketch.add("Add", hidden, mixed)
        hidden = sketch.add("Add", middle, sketch.add("MatMul", sketch.add("Norm", middle)))
    sketch.add("Logits", sketch.add("Norm", hidden))
    groups = [{state.variable for state in group} for group in find(sketch.nodes).states]
    assert groups == [{f"key{layer}", f"value{layer}"} for layer in range(count)]


def test_a_layer_that_reads_the_only_cache_again_is_a_second_one() -> None:
    sketch = Sketch()
    first = sketch.add("Gather", sketch.add("Parameter"))
    key = sketch.cache("key", sketch.add("MatMul", first))
    second = sketch.add("Add", first, sketch.add("Attention", sketch.add("MatMul", first), key))
    last = sketch.add("Add", second, sketch.add("Attention", sketch.add("MatMul", second), key))
    sketch.add("Logits", last)
    layers = find(sketch.nodes)
    assert [entry.node for entry in layers.entries] == [first, second]
    assert [len(group) for group in layers.states] == [1, 0]


def test_a_recurrent_state_of_another_stage_is_refused_by_name() -> None:
    sketch = Sketch()
    hidden = sketch.add("Gather", sketch.add("Parameter"))
    past = sketch.add(READ_VALUE, variable="first")
    update = sketch.add("Multiply", past, hidden, name="the update")
    sketch.add(ASSIGN, update, variable="first")
    middle = sketch.add("Add", hidden, update)
    key = sketch.cache("second", middle)
    sketch.add("Logits", sketch.add("Add", middle, sketch.add("Attention", middle, key, past)))
    layers = find(sketch.nodes)
    assert len(layers.entries) == 2
    with pytest.raises(ModelError, match="before layer 1: what follows needs 'the update' of earlier layers"):
        crossing(layers, 1, {update: None})


def test_all_outputs_of_a_node_at_the_cut_cross() -> None:
    sketch = Sketch()
    split = sketch.add("Split", sketch.add("Parameter"))
    first = sketch.cache("first", split)
    both = sketch.add("Split", sketch.add("Add", (split, 0), (split, 1), first))
    key = sketch.cache("second", sketch.add("MatMul", (both, 0)))
    sketch.add("Logits", sketch.add("Attention", key, (both, 1)))
    layers = find(sketch.nodes)
    assert crossing(layers, 1) == (Tensor(both, 0), Tensor(both, 1))
    assert plan(layers, 1, 2).sources == (Tensor(both, 0), Tensor(both, 1))


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
