"""Finds the layers of a decoder and the tensors between them, from the flow of data alone.

The dominators of the logits, seen from the token input, are the tensors through which all data flows. Each state hangs
on the last of them from which its new value derives. The states that hang on one dominator form a layer, and that
dominator is the residual stream that enters the layer. Names of nodes are never looked at: they differ by exporter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.errors import ModelError
from shard_builder.graph import (
    ASSIGN,
    NOWHERE,
    READ_VALUE,
    Graph,
    dominator_chain,
    downstream,
    immediate_dominators,
    upstream,
)


@dataclass(frozen=True)
class State:
    """A variable: the node that reads it and the node that stores it."""

    variable: str
    read: int
    assign: int


@dataclass(frozen=True)
class Tensor:
    """An output port of a node; the port is NOWHERE where more than one carries the data."""

    node: int
    port: int


@dataclass(frozen=True)
class LayerMap:
    """Where a model may be cut.

    ``entries[k]`` is the tensor that enters layer k and ``states[k]`` what the layer keeps between calls. ``chain`` are
    the dominators of the logits, the token input first; ``data_nodes`` all nodes that depend on a token's value.
    """

    graph: Graph
    token_input: int
    logits: Tensor
    chain: tuple[int, ...]
    data_nodes: frozenset[int]
    entries: tuple[Tensor, ...]
    states: tuple[tuple[State, ...], ...]


def find_layers(graph: Graph, token_input: int, logits: Tensor) -> LayerMap:
    """The layers between the token input and the logits.

    Raises:
        ModelError: the logits do not depend on the tokens, or there are no states, or a state belongs to no layer.
    """
    data_nodes = downstream(graph, [token_input])
    if logits.node not in data_nodes:
        raise ModelError("The model's logits do not depend on its input_ids, so it is not a language model to cut.")
    dominator = immediate_dominators(graph, token_input, data_nodes)
    chain = dominator_chain(dominator, logits.node)
    place_in_chain = {number: place for place, number in enumerate(chain)}
    grouped: dict[int, list[State]] = {}
    for state in find_states(graph):
        if state.assign not in data_nodes:
            raise ModelError(
                f"The state '{state.variable}' does not derive from the tokens, so no layer owns it; "
                "a model with such states cannot be cut."
            )
        owner = state.assign
        while owner not in place_in_chain:
            owner = dominator[owner]
        grouped.setdefault(owner, []).append(state)
    if not grouped:
        raise ModelError(
            "The model keeps no state between calls (no ReadValue and Assign); export it as a stateful model."
        )
    entries = []
    for owner in sorted(grouped, key=place_in_chain.__getitem__):
        ports = graph.data_ports(owner, data_nodes)
        # Where more than one tensor leaves the node, there is no cut; that is said when a cut is asked for there.
        entries.append(Tensor(owner, ports.pop() if len(ports) == 1 else NOWHERE))
    return LayerMap(
        graph=graph,
        token_input=token_input,
        logits=logits,
        chain=chain,
        data_nodes=frozenset(data_nodes),
        entries=tuple(entries),
        states=tuple(tuple(grouped[entry.node]) for entry in entries),
    )


def find_states(graph: Graph) -> list[State]:
    """All variables, in an order in which a later one's value may derive from an earlier one's but not the reverse.

    Raises:
        ModelError: a variable is read or stored more than once, or is never stored.
    """
    reads: dict[str, int] = {}
    assigns: dict[str, int] = {}
    for number, node in enumerate(graph.nodes):
        for kind, found in ((READ_VALUE, reads), (ASSIGN, assigns)):
            if node.kind == kind:
                if node.variable in found:
                    raise ModelError(f"The state '{node.variable}' is used in several places; it cannot be cut.")
                found[node.variable] = number
    if set(reads) != set(assigns):
        odd = sorted(set(reads) ^ set(assigns))[0]
        raise ModelError(f"The state '{odd}' is read or stored but not both; the model cannot be cut.")
    states = [State(variable, read, assigns[variable]) for variable, read in reads.items()]
    return sorted(states, key=lambda state: graph.nodes[state.assign].inputs[0])


def describe_entangled(layers: LayerMap) -> str:
    """A sentence on layers that cannot be cut apart, led by a space; empty where there are none.

    They are told by holding more states than others, or where all of them are entangled, more than a key and a value.
    """
    usual = min(2, *(len(group) for group in layers.states)) if len(layers.states) > 1 else 2
    for group in layers.states:
        if len(group) > usual:
            return (
                f" What holds the states '{group[0].variable}' to '{group[-1].variable}' counts as one layer, because "
                "more than one tensor leads from part to part there."
            )
    return ""


@dataclass(frozen=True)
class StagePlan:
    """What one stage holds: layers ``first`` to ``end`` (exclusive).

    ``source`` is the tensor that enters it (None: the token input) and ``result`` the one that leaves it. The shapes
    that ``foreign_shapes`` (ShapeOf nodes) read belong to other stages and have to be rebuilt from the stage's inputs.
    """

    first: int
    end: int
    source: Tensor | None
    result: Tensor
    states: tuple[State, ...]
    nodes: frozenset[int]
    foreign_shapes: tuple[int, ...]


def plan_stage(layers: LayerMap, first: int, end: int) -> StagePlan:
    """Layers ``first`` to ``end`` as a stage of their own.

    Raises:
        ModelError: the stage would need more than one tensor of an earlier stage, or a state of another one.
    """
    graph = layers.graph
    count = len(layers.entries)
    source = layers.entries[first] if first else None
    result = layers.entries[end] if end < count else layers.logits
    for tensor, layer in ((source, first), (result, end)):
        if tensor is not None and tensor.port == NOWHERE:
            raise ModelError(f"More than one tensor enters layer {layer}; this model cannot be cut there.")
    states = tuple(state for group in layers.states[first:end] for state in group)
    blocked = source.node if source else NOWHERE
    own = {state.read for state in states}
    outside = [state.read for group in layers.states for state in group if state.read not in own]
    foreign = downstream(graph, [layers.token_input, *outside] if source else outside, blocked)
    targets = [result.node, *(state.assign for state in states)]
    nodes = upstream(graph, targets, blocked, foreign)
    stray = sorted(nodes & foreign)
    if stray:
        raise ModelError(describe_stray(layers, stray, first, end))
    shapes = tuple(
        number
        for number in sorted(nodes)
        if graph.nodes[number].kind == "ShapeOf" and graph.nodes[number].inputs[0][0] in foreign
    )
    return StagePlan(first, end, source, result, states, frozenset(nodes), shapes)


def describe_stray(layers: LayerMap, stray: Sequence[int], first: int, end: int) -> str:
    """Why layers ``first`` to ``end`` cannot stand alone, given nodes of other layers that they read."""
    variables = sorted({layers.graph.nodes[number].variable for number in stray} - {""})
    what = f"the state '{variables[0]}' of another layer" if variables else "more than one tensor of earlier layers"
    return f"Layers {first} to {end - 1} read {what}; this model cannot be cut there."


def layers_exit(layers: LayerMap, head_entry: int) -> int:
    """The node that leaves the last layer, where the layers repeat so that it can be told; else ``head_entry``.

    It lies as far behind the last layer's entry, counted in dominators, as that lies behind the one before. What
    follows up to the head (a final norm) then counts as the head's.
    """
    if len(layers.entries) < 2:
        return head_entry
    before, last = (layers.chain.index(entry.node) for entry in layers.entries[-2:])
    place = 2 * last - before
    kinds = layers.graph.nodes
    if place <= layers.chain.index(head_entry) and kinds[layers.chain[place]].kind == kinds[layers.chain[last]].kind:
        return layers.chain[place]
    return head_entry


def readers(layers: LayerMap, exit_node: int) -> dict[int, frozenset[int]]:
    """For every node the parts of the whole model that need it: -1 the embedding, k layer k, ``len(entries)`` the head.

    A part's own nodes and those that it shares with others (masks, positions, a tied embedding) are in it; what it
    needs only for a shape is not, because a stage rebuilds that. The head begins after ``exit_node``.
    """
    graph = layers.graph
    count = len(layers.entries)
    found: dict[int, set[int]] = {}
    reads = [state.read for group in layers.states for state in group]
    opaque = downstream(graph, [layers.token_input, *reads])
    parts: list[tuple[int, list[int], int]] = [(-1, [layers.entries[0].node], NOWHERE)]
    for layer, entry in enumerate(layers.entries):
        following = layers.entries[layer + 1].node if layer + 1 < count else exit_node
        parts.append((layer, [following, *(state.assign for state in layers.states[layer])], entry.node))
    parts.append((count, [layers.logits.node], exit_node))
    for part, targets, blocked in parts:
        for number in upstream(graph, targets, blocked, opaque):
            found.setdefault(number, set()).add(part)
    return {number: frozenset(who) for number, who in found.items()}
