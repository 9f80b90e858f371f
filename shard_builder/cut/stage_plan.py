"""What one stage of a cut holds, takes in and gives out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.errors import ModelError
from shard_builder.cut.graph import SHAPE_OF, Tensor, downstream, upstream
from shard_builder.cut.layers import LayerMap, State
from shard_builder.cut.parts import find_need


@dataclass(frozen=True)
class StagePlan:
    """Layers ``first`` to ``end`` (exclusive).

    ``sources`` are the tensors that enter it (none: the token input) and ``results`` those that leave it. The shapes
    that ``foreign_shapes`` (ShapeOf nodes) read belong to other stages and have to be rebuilt from the stage's inputs.
    ``copied`` are states of earlier stages of which it keeps a copy, because its layers read them too; they are among
    ``states``.
    """

    first: int
    end: int
    sources: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    states: tuple[State, ...]
    copied: tuple[State, ...]
    nodes: frozenset[int]
    foreign_shapes: tuple[int, ...]


def plan_stage(
    layers: LayerMap, first: int, end: int, sources: Sequence[Tensor] = (), results: Sequence[Tensor] = ()
) -> StagePlan:
    """Layers ``first`` to ``end`` as a stage of their own.

    ``sources`` cross the cut in front of it and ``results`` the one behind it; the last stage's result is the logits.

    Raises:
        ModelError: the stage would need something else of other stages.
    """
    graph = layers.graph
    results = tuple(results) or (layers.logits,)
    own = [state for group in layers.states[first:end] for state in group]
    blocked = frozenset(sources)
    made = [tensor.node for tensor in results if tensor not in blocked]
    need = find_need(layers, [*made, *(state.assign for state in own)], blocked)
    earlier = [state for group in layers.states[:first] for state in group]
    copied = [state for state in earlier if state.read in need.nodes]
    states = (*copied, *own)
    held = {state.read for state in states}
    outside = [state.read for group in layers.states for state in group if state.read not in held]
    foreign = downstream(graph, [layers.token_input, *outside] if sources else outside, blocked)
    foreign -= {tensor.node for tensor in blocked if graph.data_ports(tensor.node, layers.varying) == {tensor.port}}
    if sources:
        foreign |= layers.data_nodes - layers.stateful - layers.caches - need.nodes
    nodes = upstream(graph, [*made, *(state.assign for state in states)], blocked, foreign)
    stray = sorted(nodes & foreign)
    if stray:
        raise ModelError(describe_stray(layers, stray, first, end))
    shapes = tuple(
        number
        for number in sorted(nodes)
        if graph.nodes[number].kind == SHAPE_OF
        and graph.nodes[number].inputs[0][0] in foreign
        and graph.nodes[number].inputs[0] not in blocked
    )
    return StagePlan(first, end, tuple(sources), results, states, tuple(copied), frozenset(nodes), shapes)


def describe_stray(layers: LayerMap, stray: Sequence[int], first: int, end: int) -> str:
    """Why layers ``first`` to ``end`` cannot stand alone, given nodes of other layers that they read."""
    variables = sorted({layers.graph.nodes[number].variable for number in stray} - {""})
    name = layers.graph.tensor_name(Tensor(stray[-1], 0))
    what = f"the state '{variables[0]}' of another layer" if variables else f"'{name}' of earlier layers"
    return f"Layers {first} to {end - 1} read {what}; this model cannot be cut there."
