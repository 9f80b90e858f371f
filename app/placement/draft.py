"""A placement while a person works on it: nodes in order, and where one's layers end and the next one's begin.

Pure and free of Qt. A draft never changes; every move gives a new one, which makes undo a matter of keeping the old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fleet.manifest import Manifest
from fleet.node import NodeId
from fleet.placement import Placement, PlacementNode, nodes_for_cuts


@dataclass(frozen=True)
class PlacementDraft:
    """Stage ``i`` holds layers ``cuts[i-1]`` to ``cuts[i]`` (exclusive) on ``nodes[i]``; each has at least one layer.

    Attributes:
        layer_count: layers of the model.
        nodes: the nodes that hold stages, in the order of the stages.
        cuts: the first layer of every stage but stage 0, rising.
        unused: the other nodes that are there.
    """

    layer_count: int
    nodes: tuple[PlacementNode, ...]
    cuts: tuple[int, ...]
    unused: tuple[PlacementNode, ...] = ()

    def __post_init__(self) -> None:
        edges = (0, *self.cuts, self.layer_count)
        if len(edges) != len(self.nodes) + 1:
            raise ValueError(f"{len(self.nodes)} nodes need {len(self.nodes) - 1} cuts, not {len(self.cuts)}")
        if any(end <= first for first, end in pairwise(edges)):
            raise ValueError(f"the cuts {self.cuts} do not rise within 1 to {self.layer_count - 1}")

    @classmethod
    def from_placement(cls, placement: Placement, nodes: Sequence[PlacementNode]) -> PlacementDraft:
        """The draft that shows a proposal; ``nodes`` are all that are there."""
        by_id = {node.id: node for node in nodes}
        used = tuple(by_id[stage.node] for stage in placement.stages)
        chosen = {node.id for node in used}
        return cls(
            layer_count=placement.stages[-1].end_layer,
            nodes=used,
            cuts=tuple(stage.first_layer for stage in placement.stages[1:]),
            unused=tuple(node for node in nodes if node.id not in chosen),
        )

    @classmethod
    def of_shards(
        cls, manifest: Manifest, nodes: Sequence[PlacementNode], context_tokens: int, users: int
    ) -> PlacementDraft | None:
        """The cut that a shard folder already has, on the nodes that a deployment takes; None: too few nodes."""
        if not 0 < len(manifest.stages) <= len(nodes):
            return None
        chosen = nodes_for_cuts(manifest, nodes, context_tokens, users)
        used = {node.id for node in chosen}
        return cls(
            layer_count=len(manifest.layers),
            nodes=tuple(chosen),
            cuts=manifest.cuts,
            unused=tuple(node for node in nodes if node.id not in used),
        )

    @classmethod
    def even(cls, layer_count: int, nodes: Sequence[PlacementNode]) -> PlacementDraft:
        """The same number of layers on each node, as far as it goes; more nodes than layers leaves some unused."""
        used = tuple(nodes[:layer_count])
        cuts = tuple(round(layer_count * number / len(used)) for number in range(1, len(used)))
        return cls(layer_count, used, cuts, tuple(nodes[layer_count:]))

    def layers_of(self, stage: int) -> tuple[int, int]:
        """First layer and end layer (exclusive) of a stage."""
        edges = (0, *self.cuts, self.layer_count)
        return edges[stage], edges[stage + 1]

    def limits_of(self, boundary: int) -> tuple[int, int]:
        """The least and the greatest layer at which a boundary may lie without touching its neighbours."""
        edges = (0, *self.cuts, self.layer_count)
        return edges[boundary] + 1, edges[boundary + 2] - 1

    def with_boundary(self, boundary: int, layer: int) -> PlacementDraft:
        """The boundary between stage ``boundary`` and the next one at ``layer``, or as near as it may go."""
        least, greatest = self.limits_of(boundary)
        cuts = list(self.cuts)
        cuts[boundary] = min(max(layer, least), greatest)
        return replace(self, cuts=tuple(cuts))

    def moved(self, boundary: int, layers: int) -> PlacementDraft:
        """The boundary moved by so many layers, or as far as it may go."""
        return self.with_boundary(boundary, self.cuts[boundary] + layers)

    def with_layers(self, stage: int, count: int) -> PlacementDraft:
        """A stage with ``count`` layers, or as near as its neighbour allows.

        Its end moves; the last stage's beginning does.
        """
        if not self.cuts:
            return self
        first, end = self.layers_of(stage)
        if stage < len(self.cuts):
            return self.with_boundary(stage, first + count)
        return self.with_boundary(stage - 1, end - count)

    def exchanged(self, stage: int, other: int) -> PlacementDraft:
        """Two nodes in each other's place; the layers of the stages stay."""
        nodes = list(self.nodes)
        nodes[stage], nodes[other] = nodes[other], nodes[stage]
        return replace(self, nodes=tuple(nodes))

    def without(self, stage: int) -> PlacementDraft:
        """The stage's node left out; its layers go to the neighbour. The last node stays."""
        if len(self.nodes) == 1:
            return self
        gone = min(stage, len(self.cuts) - 1)
        return replace(
            self,
            nodes=self.nodes[:stage] + self.nodes[stage + 1 :],
            cuts=self.cuts[:gone] + self.cuts[gone + 1 :],
            unused=(*self.unused, self.nodes[stage]),
        )

    def with_node(self, identity: NodeId) -> PlacementDraft:
        """An unused node takes the second half of the stage that has most layers; none to halve: the same draft."""
        node = next((node for node in self.unused if node.id == identity), None)
        sizes = [end - first for first, end in map(self.layers_of, range(len(self.nodes)))]
        stage = max(range(len(sizes)), key=lambda number: (sizes[number], -number))
        if node is None or sizes[stage] < 2:
            return self
        first, end = self.layers_of(stage)
        return replace(
            self,
            nodes=(*self.nodes[: stage + 1], node, *self.nodes[stage + 1 :]),
            cuts=(*self.cuts[:stage], (first + end + 1) // 2, *self.cuts[stage:]),
            unused=tuple(other for other in self.unused if other.id != identity),
        )
