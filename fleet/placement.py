"""Which node runs which layers: contiguous layers, no budget exceeded, the slowest stage as fast as it can be.

Pure: the manifest and the nodes' budgets go in, a placement or the reason why there is none comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from fleet.errors import PlacementError
from fleet.manifest import KvPrecision, Manifest
from fleet.memory_need import ModelNeed
from fleet.node import NodeId
from fleet.placement_search import PlacementSearch

DEFAULT_CONTEXT_TOKENS = 4096
DEFAULT_USERS = 4
"""How many chats of full length a placement has memory for unless told otherwise."""
_MB = 1_000_000


class PlacementNode(msgspec.Struct, frozen=True):
    """A node that may take a stage. ``budget_bytes`` is what is free for it now."""

    id: NodeId
    name: str
    device: str
    budget_bytes: int


class PlannedStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of a placement, with what it needs of its node's budget."""

    stage: int
    node: NodeId
    node_name: str
    device: str
    first_layer: int
    end_layer: int
    weight_bytes: int
    kv_bytes: int
    runtime_bytes: int
    budget_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.runtime_bytes


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node that the placement does not use, and why."""

    node: NodeId
    node_name: str
    reason: str


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contiguous layers on an ordered list of nodes."""

    model_id: str
    context_tokens: int
    users: int
    stages: tuple[PlannedStage, ...]
    left_out: tuple[LeftOut, ...] = ()


def plan(
    manifest: Manifest,
    nodes: Sequence[PlacementNode],
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
    users: int = DEFAULT_USERS,
    kv_precision: KvPrecision | None = None,
    *,
    spread: bool = True,
) -> Placement:
    """The placement whose most loaded stage reads the fewest bytes per token, within every node's budget.

    Args:
        manifest: layers and runs are read, not the stages: a model that is not cut yet will do.
        nodes: what is offered; among equals the first is taken.
        context_tokens: tokens that each user's chat may hold.
        kv_precision: the manifest's own where it is None.
        spread: use as many of the nodes as possible; otherwise as few, since every hop costs a single user time.

    Raises:
        PlacementError: nothing fits; the text says what each node needs and has, and what is missing.
    """
    need = ModelNeed(manifest, context_tokens, users, kv_precision)
    search = _search(need, nodes)
    found = search.best(most_nodes=spread) if nodes else None
    if found is None:
        raise PlacementError(_why_nothing_fits(manifest, nodes, need, context_tokens, users, kv_precision))
    chosen = [nodes[stage.node] for stage in found]
    placement = assess_cuts(
        manifest, chosen, [stage.first_layer for stage in found[1:]], context_tokens, users, kv_precision
    )
    one_layer_bytes = search.single_layer_bytes()
    return msgspec.structs.replace(
        placement,
        left_out=tuple(
            LeftOut(node.id, node.name, _why_left_out(node, one_layer_bytes, need.layers, len(chosen), spread))
            for node in nodes
            if node not in chosen
        ),
    )


def assess_cuts(
    manifest: Manifest,
    nodes: Sequence[PlacementNode],
    cuts: Sequence[int],
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
    users: int = DEFAULT_USERS,
    kv_precision: KvPrecision | None = None,
) -> Placement:
    """What layers cut at ``cuts`` need on these nodes, in this order, whether they fit or not: see ``problem_of``.

    Raises:
        PlacementError: the cuts do not give every node at least one layer, or a node is named twice.
    """
    edges = (0, *cuts, len(manifest.layers))
    if len(edges) != len(nodes) + 1:
        raise PlacementError(f"{len(nodes)} nodes need {len(nodes) - 1} cuts between them, not {len(cuts)}.")
    if any(end <= first for first, end in pairwise(edges)):
        raise PlacementError(
            f"The cuts {', '.join(map(str, cuts))} do not rise between 1 and {len(manifest.layers) - 1}: every stage "
            "needs at least one layer."
        )
    if len({node.id for node in nodes}) != len(nodes):
        raise PlacementError("A node is named twice; each can run one stage of a model.")
    need = ModelNeed(manifest, context_tokens, users, kv_precision)
    stages = []
    for number, (node, (first, end)) in enumerate(zip(nodes, pairwise(edges), strict=True)):
        stage_need = need.of(first, end)
        stages.append(
            PlannedStage(
                stage=number,
                node=node.id,
                node_name=node.name,
                device=node.device,
                first_layer=first,
                end_layer=end,
                weight_bytes=stage_need.weight_bytes,
                kv_bytes=stage_need.kv_bytes,
                runtime_bytes=stage_need.runtime_bytes,
                budget_bytes=node.budget_bytes,
            )
        )
    return Placement(manifest.model_id, context_tokens, users, tuple(stages))


def problem_of(placement: Placement) -> str:
    """Which nodes are over their budget and by how much, in a sentence; empty where everything fits."""
    over = [stage for stage in placement.stages if stage.needed_bytes > stage.budget_bytes]
    if not over:
        return ""
    parts = [
        f"{stage.node_name} needs {_mb(stage.needed_bytes)} for layers {stage.first_layer} to {stage.end_layer - 1} "
        f"(weights {_mb(stage.weight_bytes)}, KV cache {_mb(stage.kv_bytes)}, runtime {_mb(stage.runtime_bytes)}) and "
        f"has {_mb(stage.budget_bytes)}: {_mb(stage.needed_bytes - stage.budget_bytes)} too much"
        for stage in over
    ]
    return f"{'; '.join(parts)}. Move layers to another node, or plan for a shorter context or fewer users."


def placement_for_cuts(
    manifest: Manifest,
    nodes: Sequence[PlacementNode],
    cuts: Sequence[int],
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
    users: int = DEFAULT_USERS,
    kv_precision: KvPrecision | None = None,
) -> Placement:
    """The placement of layers cut at ``cuts`` on these nodes in this order.

    Raises:
        PlacementError: the cuts are wrong, or a node is over its budget; the text says which and by how much.
    """
    placement = assess_cuts(manifest, nodes, cuts, context_tokens, users, kv_precision)
    problem = problem_of(placement)
    if problem:
        raise PlacementError(problem)
    return placement


def nodes_for_cuts(
    manifest: Manifest,
    nodes: Sequence[PlacementNode],
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
    users: int = DEFAULT_USERS,
    kv_precision: KvPrecision | None = None,
) -> list[PlacementNode]:
    """A node for every stage that the manifest has: in the nodes' own order where that fits, else roomiest to largest.

    The roomiest node then gets the largest stage, and so on; whether that fits, ``placement_for_cuts`` says.

    Raises:
        PlacementError: there are fewer nodes than stages.
    """
    count = len(manifest.stages)
    if len(nodes) < count:
        there = ", ".join(node.name for node in nodes)
        raise PlacementError(
            f"The folder has {count} stages and needs as many nodes; there are {len(nodes)}: {there}. "
            "Build it with fewer stages, or start more agents."
        )
    in_order = list(nodes[:count])
    if not problem_of(assess_cuts(manifest, in_order, manifest.cuts, context_tokens, users, kv_precision)):
        return in_order
    roomiest = sorted(nodes, key=lambda node: -node.budget_bytes)
    by_bytes = sorted(range(count), key=lambda number: -manifest.stages[number].bytes)
    chosen = dict(zip(by_bytes, roomiest, strict=False))
    return [chosen[number] for number in range(count)]


def _search(need: ModelNeed, nodes: Sequence[PlacementNode]) -> PlacementSearch:
    return PlacementSearch(
        need.layers, lambda first, end: need.of(first, end).bytes, need.load, [node.budget_bytes for node in nodes]
    )


def _why_left_out(node: PlacementNode, one_layer_bytes: int, layers: int, used: int, spread: bool) -> str:
    if node.budget_bytes < one_layer_bytes:
        return f"It has {_mb(node.budget_bytes)} free, and one layer needs {_mb(one_layer_bytes)}."
    if used == layers:
        return f"The model has {layers} layers, and each is on another node already."
    if spread:
        return "No placement that uses it and these other nodes fits."
    return "The model fits without it, and every hop costs a single user time."


def _why_nothing_fits(
    manifest: Manifest,
    nodes: Sequence[PlacementNode],
    need: ModelNeed,
    context_tokens: int,
    users: int,
    kv_precision: KvPrecision | None,
) -> str:
    if not nodes:
        return "There is no node to place the model on; start an agent on a PC and enrol it."
    whole = need.of(0, need.layers)
    one_layer_bytes = _search(need, nodes).single_layer_bytes()
    have_bytes = sum(node.budget_bytes for node in nodes)
    per_node = "; ".join(
        f"{node.name} has {_mb(node.budget_bytes)}"
        + (f" and needs {_mb(one_layer_bytes)} for one layer" if node.budget_bytes < one_layer_bytes else "")
        for node in nodes
    )
    text = (
        f"{manifest.name} does not fit: with {context_tokens:,} tokens of context for {users} "
        f"{'user' if users == 1 else 'users'} it needs {_mb(whole.bytes)} (weights {_mb(whole.weight_bytes)}, KV cache "
        f"{_mb(whole.kv_bytes)}, runtime {_mb(whole.runtime_bytes)}, and more runtime for every further node). "
        f"{per_node}."
    )
    if whole.bytes > have_bytes:
        text += f" {_mb(whole.bytes - have_bytes)} are missing."
    fitting_tokens = _longest_context(manifest, nodes, context_tokens, users, kv_precision)
    if fitting_tokens:
        return f"{text} The KV cache is what is too large: {fitting_tokens:,} tokens of context would fit."
    return f"{text} The weights and the runtime alone are too large for these nodes: add one, or free memory."


def _longest_context(
    manifest: Manifest,
    nodes: Sequence[PlacementNode],
    context_tokens: int,
    users: int,
    kv_precision: KvPrecision | None,
) -> int:
    """The longest context, below one that does not fit, that does; 0 where none does."""
    fits, too_long = 0, context_tokens
    while too_long - fits > max(1, fits // 32):
        middle = (fits + too_long) // 2
        if _search(ModelNeed(manifest, middle, users, kv_precision), nodes).fits():
            fits = middle
        else:
            too_long = middle
    return fits


def _mb(size: int) -> str:
    return f"{size / _MB:,.0f} MB"
