"""Which parts of a model need which nodes: the embedding, every layer, the head. Runs of weights rest on it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shard_builder.cut.graph import NOWHERE, SHAPE_OF, Graph, Tensor, upstream
from shard_builder.cut.layers import LayerMap

EMBEDDING_PART = -1
HEAVY_CONSTANT_BYTES = 64 << 10
"""What reads a constant from this size on is computed in one stage only."""


@dataclass(frozen=True)
class Need:
    """What some targets need behind the tensors that enter: ``nodes``, and ``strays`` that do not derive from those.

    Strays depend on tokens or states. They have to be carried along, or made again from what is.
    """

    nodes: frozenset[int]
    strays: frozenset[int]


def find_need(layers: LayerMap, targets: Iterable[int], entering: Collection[Tensor]) -> Need:
    """What the targets need when the tensors of ``entering`` are there. What they need only for a shape is left out.

    Where a cache is read, what stores it is needed too.
    """
    graph = layers.graph
    assigns = {state.read: state.assign for group in layers.states for state in group}
    wanted = set(targets)
    floor = min((tensor.node for tensor in entering), default=NOWHERE)
    region = set(wanted)
    waiting = list(region)
    while waiting:
        number = waiting.pop()
        if number in layers.stateful and number < floor and number not in wanted:
            continue
        if number in assigns and assigns[number] not in region:
            region.add(assigns[number])
            wanted.add(assigns[number])
            waiting.append(assigns[number])
        node = graph.nodes[number]
        for tensor in node.inputs:
            if tensor in entering or tensor[0] in region or (node.kind == SHAPE_OF and tensor[0] in layers.varying):
                continue
            region.add(tensor[0])
            waiting.append(tensor[0])
    strays = _underived(layers, region, entering) - wanted if entering else frozenset()
    blocked = {Tensor(number, port) for number in strays for _, port in graph.consumers[number]}
    return Need(frozenset(upstream(graph, wanted, blocked.union(entering), layers.varying)), strays)


def _underived(layers: LayerMap, region: Collection[int], entering: Collection[Tensor]) -> frozenset[int]:
    """Nodes of a region that depend on tokens or states, are no caches, and do not derive from what enters."""
    graph = layers.graph
    derived: set[int] = set()
    found = []
    for number in sorted(region):
        if number not in layers.data_nodes and number not in layers.stateful:
            continue
        node = graph.nodes[number]
        if node.kind == SHAPE_OF:
            continue
        if any(tensor in entering or tensor[0] in derived for tensor in node.inputs):
            derived.add(number)
        elif number not in layers.caches:
            found.append(number)
    return frozenset(found)


@dataclass(frozen=True)
class Parts:
    """``readers``: for every node the parts of the whole model that need it.

    Parts are -1 the embedding, k layer k, ``len(entries)`` the head. A part's own nodes and those that it shares with
    others (masks, positions, a tied embedding) are in it; what it needs only for a shape is not, because a stage
    rebuilds that. ``anchored`` are nodes that are computed beside the residual stream by large constants, each with the
    only part that needs it, or the embedding where several do. ``borrowed`` are, per layer, the other layers whose
    states it reads.
    """

    readers: dict[int, frozenset[int]]
    anchored: dict[int, int]
    borrowed: tuple[tuple[int, ...], ...]


def find_parts(layers: LayerMap, exit_node: int) -> Parts:
    """The parts of a model whose head begins after ``exit_node``.

    What runs beside the residual stream is computed from the tokens for several layers. Where large constants make it,
    it belongs to the embedding, so that no later stage needs those. The rest is cheap: any stage may do it over, and
    its constants form a run of their own.
    """
    count = len(layers.entries)
    readers: dict[int, set[int]] = {}
    strays: dict[int, set[int]] = {}
    owners = {state.read: layer for layer, group in enumerate(layers.states) for state in group}
    borrowed = []
    for part in range(EMBEDDING_PART, count + 1):
        need = _part_need(layers, part, exit_node)
        for number in need.nodes:
            readers.setdefault(number, set()).add(part)
        if 0 <= part < count:
            borrowed.append(tuple(sorted({owners[number] for number in need.nodes & owners.keys()} - {part})))
        for number in need.strays - layers.stateful:
            strays.setdefault(number, set()).add(part)
    heavy = _heavy(layers) if strays else frozenset()
    everyone = {EMBEDDING_PART}.union(*strays.values())
    anchored: dict[int, int] = {}
    for number, parts in strays.items():
        needing = parts | readers.get(number, set())
        if number in heavy:
            anchored[number] = min(needing) if len(needing) == 1 else EMBEDDING_PART
        belongs_to = {anchored[number]} if number in heavy else everyone
        for source in _constant_side(layers, number):
            readers.setdefault(source, set()).update(belongs_to)
    return Parts({number: frozenset(who) for number, who in readers.items()}, anchored, tuple(borrowed))


def _part_need(layers: LayerMap, part: int, exit_node: int) -> Need:
    count = len(layers.entries)
    if part == EMBEDDING_PART:
        return find_need(layers, [layers.entries[0].node], ())
    if part == count:
        return find_need(layers, [layers.logits.node], _ports(layers.graph, exit_node))
    following = layers.entries[part + 1].node if part + 1 < count else exit_node
    targets = [following, *(state.assign for state in layers.states[part])]
    return find_need(layers, targets, _ports(layers.graph, layers.entries[part].node))


def _ports(graph: Graph, number: int) -> frozenset[Tensor]:
    return frozenset(Tensor(number, port) for _, port in graph.consumers[number])


def _heavy(layers: LayerMap) -> frozenset[int]:
    """Nodes that read a large constant, at once or through what depends on neither tokens nor states."""
    found: set[int] = set()
    for number, node in enumerate(layers.graph.nodes):
        if node.bytes >= HEAVY_CONSTANT_BYTES or (
            node.kind != SHAPE_OF and any(source in found and source not in layers.varying for source, _ in node.inputs)
        ):
            found.add(number)
    return frozenset(found)


def _constant_side(layers: LayerMap, number: int) -> set[int]:
    """What a node needs that depends on neither tokens nor states."""
    sources = [source for source, _ in layers.graph.nodes[number].inputs if source not in layers.varying]
    return upstream(layers.graph, sources, (), layers.varying)
