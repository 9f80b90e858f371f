"""What a placement is asked and answered with."""

from __future__ import annotations

import msgspec

from fleet.node import NodeId


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
