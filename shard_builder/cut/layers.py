"""Finds the layers of a decoder and the tensor that enters each, from the flow of data alone.

What is left of the flow of data once the caches are taken out, and with them all that does not depend on a state, is
the residual stream: the dominators of the logits there are the tensors through which it flows, whatever else runs
beside it (per-layer inputs, a skip connection from the embedding, a cache that several layers read). Each state hangs
on the last of them from which its new value derives, or on which what reads it first depends; what reads a cache again
hangs on the stream likewise. The states that hang on one dominator form a layer, and that dominator is the residual
stream that enters the layer. Names of nodes are never looked at: they differ by exporter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from fleet.errors import ModelError
from shard_builder.cut.graph import (
    ASSIGN,
    NOWHERE,
    READ_VALUE,
    SHAPE_OF,
    Graph,
    Tensor,
    dominator_chain,
    downstream,
    immediate_dominators,
    nearest_common,
)

_BEFORE_THE_STREAM = -1


@dataclass(frozen=True)
class State:
    """A variable: the node that reads it and the node that stores it."""

    variable: str
    read: int
    assign: int


@dataclass(frozen=True)
class LayerMap:
    """Where a model may be cut.

    ``entries[k]`` is the tensor that enters layer k and ``states[k]`` what the layer keeps between calls; empty for a
    layer that attends to other layers' caches alone. ``chain`` are the dominators of the logits, the token input first,
    and ``stream`` those of the residual stream.
    """

    graph: Graph
    token_input: int
    logits: Tensor
    chain: tuple[int, ...]
    stream: tuple[int, ...]
    entries: tuple[Tensor, ...]
    states: tuple[tuple[State, ...], ...]
    data_nodes: frozenset[int]
    """All nodes that depend on a token's value."""
    caches: frozenset[int]
    """Reads of states, stored caches, and what is made of those alone: a stage can have a copy of them."""
    stateful: frozenset[int]
    """Nodes that depend on a state, without ``caches``."""

    @cached_property
    def varying(self) -> frozenset[int]:
        """Nodes that depend on tokens or states."""
        return self.data_nodes | self.caches | self.stateful


def find_layers(graph: Graph, token_input: int, logits: Tensor) -> LayerMap:
    """The layers between the token input and the logits.

    Raises:
        ModelError: the logits do not depend on the tokens, or there are no states, or a state belongs to no layer.
    """
    data_nodes = downstream(graph, [token_input])
    if logits.node not in data_nodes:
        raise ModelError("The model's logits do not depend on its input_ids, so it is not a language model to cut.")
    states = find_states(graph)
    for state in states:
        if state.assign not in data_nodes:
            raise ModelError(
                f"The state '{state.variable}' does not derive from the tokens, so no layer owns it; "
                "a model with such states cannot be cut."
            )
    if not states:
        raise ModelError(
            "The model keeps no state between calls (no ReadValue and Assign); export it as a stateful model."
        )
    caches = _find_caches(graph, states, data_nodes)
    stateful = downstream(graph, caches) - caches
    dominator = immediate_dominators(graph, {token_input}, data_nodes)
    chain = dominator_chain(dominator, logits.node)
    stream = _find_stream(graph, caches, stateful, logits)
    grouped = _group(graph, states, caches, data_nodes, stream)
    places = sorted(grouped)
    entries = [stream.chain[place] for place in places if place != _BEFORE_THE_STREAM]
    if _BEFORE_THE_STREAM in grouped:
        new_values = {node for state in grouped[-1] for node in _new_values(graph, state, caches)} & data_nodes
        entries.insert(0, _first_entry(graph, dominator, stream, new_values, entries, grouped, caches, logits))
    tensors = []
    for entry in entries:
        ports = graph.data_ports(entry, data_nodes)
        tensors.append(Tensor(entry, ports.pop() if len(ports) == 1 else NOWHERE))
    return LayerMap(
        graph=graph,
        token_input=token_input,
        logits=logits,
        chain=chain,
        stream=stream.chain,
        entries=tuple(tensors),
        states=tuple(tuple(grouped[place]) for place in places),
        data_nodes=frozenset(data_nodes),
        caches=frozenset(caches),
        stateful=frozenset(stateful),
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


def grown_by(graph: Graph, state: State) -> int | None:
    """The Concat of the past and the new part that is stored in a cache; None for a state that does not grow."""
    concat = graph.nodes[state.assign].inputs[0][0]
    while graph.nodes[concat].kind == "Convert":
        concat = graph.nodes[concat].inputs[0][0]
    if graph.nodes[concat].kind != "Concat" or len(graph.nodes[concat].inputs) != 2:
        return None
    past = graph.nodes[concat].inputs[0][0]
    while graph.nodes[past].kind in ("Convert", "Gather"):
        past = graph.nodes[past].inputs[0][0]
    return concat if past == state.read else None


def _find_caches(graph: Graph, states: Sequence[State], data_nodes: Collection[int]) -> set[int]:
    """Reads of states, what caches grow to, and what is made of those alone."""
    found = {state.read for state in states}
    found |= {concat for state in states if (concat := grown_by(graph, state)) is not None}
    for number in sorted(downstream(graph, found)):
        node = graph.nodes[number]
        if number in found or node.kind == SHAPE_OF:
            continue
        sources = {source for source, _ in node.inputs}
        if sources & found and not any(source in data_nodes and source not in found for source in sources):
            found.add(number)
    return found


@dataclass(frozen=True)
class _Stream:
    """``dominator`` and ``chain``: of the logits, among what depends on a state, seen without the caches."""

    dominator: dict[int, int]
    chain: tuple[int, ...]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {node: place for place, node in enumerate(self.chain) if node != NOWHERE}

    def place(self, number: int) -> int:
        """The place in the chain of the last node through which all data to a node flows."""
        while number not in self._places:
            if self.dominator[number] == number:
                return _BEFORE_THE_STREAM
            number = self.dominator[number]
        return self._places[number]


def _find_stream(graph: Graph, caches: Collection[int], stateful: set[int], logits: Tensor) -> _Stream:
    if logits.node not in stateful:
        return _Stream({NOWHERE: NOWHERE}, ())
    roots = {number for number in stateful if not any(source in stateful for source, _ in graph.nodes[number].inputs)}
    dominator = immediate_dominators(graph, roots, stateful)
    return _Stream(dominator, dominator_chain(dominator, logits.node))


def _new_values(graph: Graph, state: State, caches: Collection[int]) -> list[int]:
    """The nodes that give what a state is to hold next, but for what it held before."""
    return _beyond_caches(state.assign, lambda number: graph.nodes[number].inputs, caches)


def _readers(graph: Graph, state: State, caches: Collection[int]) -> list[int]:
    """The nodes that take in what a state holds, as it is or with what is stored next to it."""
    return _beyond_caches(state.read, lambda number: graph.consumers[number], caches)


def _beyond_caches(
    start: int, neighbours: Callable[[int], Iterable[tuple[int, int]]], caches: Collection[int]
) -> list[int]:
    """The first nodes that are no caches on all ways from a node on; neighbours come with a port."""
    found = []
    waiting = [start]
    seen = set(waiting)
    while waiting:
        for number, _ in neighbours(waiting.pop()):
            if number in seen:
                continue
            seen.add(number)
            if number in caches:
                waiting.append(number)
            else:
                found.append(number)
    return found


def _group(
    graph: Graph, states: Sequence[State], caches: Collection[int], data_nodes: Collection[int], stream: _Stream
) -> dict[int, list[State]]:
    """The states by the place in the stream on which they hang, and an empty list where only others' caches are read.

    Who reads a state first is the layer that keeps it; who reads it again, further on in the stream, is another one.
    What hangs on the stream before it is whole counts as the first layer.
    """
    begin = _whole_from(graph, caches, data_nodes, stream)
    dominator = stream.dominator
    grouped: dict[int, list[State]] = {}
    for state in states:
        readers = [node for node in _readers(graph, state, caches) if node in dominator]
        read_at = sorted({stream.place(dominator[node]) for node in readers})
        made_of = [stream.place(node) for node in _new_values(graph, state, caches) if node in dominator]
        place = min((min(made_of, default=_BEFORE_THE_STREAM), *read_at[:1]))
        grouped.setdefault(place if place >= begin else _BEFORE_THE_STREAM, []).append(state)
        for place in read_at[1:]:
            if place >= begin:
                grouped.setdefault(place, [])
    return grouped


def _whole_from(graph: Graph, caches: Collection[int], data_nodes: Collection[int], stream: _Stream) -> int:
    """The first place in the stream that can be the end of a layer.

    Inside the first layer the stream is what comes of its states alone (scores, their softmax, a convolution), until
    data that depends on no state joins it: what the layer is added to, at the latest.
    """
    joined_after = [
        stream.place(dominator)
        for number, dominator in stream.dominator.items()
        if number != NOWHERE
        and (sources := {source for source, _ in graph.nodes[number].inputs}) & stream.dominator.keys()
        and any(source in data_nodes and source not in stream.dominator and source not in caches for source in sources)
    ]
    return 1 + max(0, min(joined_after, default=0))


def _first_entry(
    graph: Graph,
    dominator: dict[int, int],
    stream: _Stream,
    new_values: Collection[int],
    entries: Sequence[int],
    grouped: dict[int, list[State]],
    caches: Collection[int],
    logits: Tensor,
) -> int:
    """What enters the first layer: the last node through which all data to its states and to the next layer flows.

    Where something else runs beside the stream from the tokens on, that is the token input. The entry is then as far
    ahead of a new value, counted in dominators, as it is in a later layer whose dominators are of the same kinds.
    """
    common = entries[0] if entries else logits.node
    for node in new_values:
        common = nearest_common(dominator, common, node)
    if dominator[common] != common:
        return common
    ours = [dominator_chain(dominator, node) for node in sorted(new_values)]
    for place, entry in zip(sorted(set(grouped) - {_BEFORE_THE_STREAM}), entries, strict=True):
        for state in grouped[place]:
            for node in _new_values(graph, state, caches):
                if node not in stream.dominator:
                    continue
                chain = dominator_chain(stream.dominator, node)
                behind = chain[chain.index(entry) + 1 :]
                for own in ours:
                    split = len(own) - len(behind)
                    if split > 0 and _kinds(graph, own[split:]) == _kinds(graph, behind):
                        return own[split - 1]
    return common


def _kinds(graph: Graph, numbers: Sequence[int]) -> list[str]:
    return [graph.nodes[number].kind for number in numbers]


def describe_entangled(layers: LayerMap) -> str:
    """A sentence on layers that cannot be cut apart, led by a space; empty where there are none.

    They are told by holding more states than others, or where all of them are entangled, more than a key and a value.
    """
    usual = min(2, *(len(group) for group in layers.states if group)) if len(layers.states) > 1 else 2
    for group in layers.states:
        if len(group) > usual:
            return (
                f" What holds the states '{group[0].variable}' to '{group[-1].variable}' counts as one layer, because "
                "more than one tensor that depends on them leads from part to part there."
            )
    return ""


def layers_exit(layers: LayerMap, head_entry: int) -> int:
    """The node that leaves the last layer, where the layers repeat so that it can be told; else ``head_entry``.

    It lies as far behind the last layer's entry, counted in dominators, as that lies behind the one before. What
    follows up to the head (a final norm) then counts as the head's.
    """
    if len(layers.entries) < 2:
        return head_entry
    for chain in (layers.chain, layers.stream):
        places = {number: place for place, number in enumerate(chain)}
        if any(number not in places for number in (layers.entries[-2].node, layers.entries[-1].node, head_entry)):
            continue
        before, last = (places[entry.node] for entry in layers.entries[-2:])
        place = 2 * last - before
        kinds = layers.graph.nodes
        if place <= places[head_entry] and kinds[chain[place]].kind == kinds[chain[last]].kind:
            return chain[place]
    return head_entry
