"""Immutable snapshots of the fleet, for everyone who shows it: the control panel, the command line, the tests."""

from __future__ import annotations

from typing import Literal

import msgspec

from fleet.control_messages import DeploymentId, GatewayStatus, StageStatus
from fleet.node import Inventory, LiveLoad, NodeId

NodeState = Literal["found", "connecting", "ready", "paused", "suspect", "lost", "refused", "foreign"]
"""``found``: seen through mDNS, not enrolled here. ``foreign``: enrolled with another controller. ``ready``: alive."""

DeploymentState = Literal[
    "planning", "sending", "starting", "probing", "ready", "degraded", "failed", "cancelled", "stopped"
]


class NodeView(msgspec.Struct, frozen=True):
    """One node as the controller knows it."""

    id: NodeId
    name: str
    state: NodeState
    detail: str
    """Why, in words, where the state needs it."""
    addresses: tuple[str, ...]
    public_key: str
    inventory: Inventory | None = None
    load: LiveLoad | None = None
    stages: tuple[StageStatus, ...] = ()
    gateways: tuple[GatewayStatus, ...] = ()


class StageProgress(msgspec.Struct, frozen=True):
    """A stage of a deployment as the controller follows it."""

    stage: int
    node: NodeId
    node_name: str
    status: StageStatus | None


class DeploymentView(msgspec.Struct, frozen=True):
    """One deployment: what it serves, how far it is, and where its gateway listens once it is ready."""

    id: DeploymentId
    model: str
    state: DeploymentState
    detail: str
    stages: tuple[StageProgress, ...]
    gateway_node: NodeId | None = None
    gateway_addresses: tuple[str, ...] = ()
    gateway_port: int | None = None
    gateway_public_key: str = ""
    http_port: int | None = None


class FleetView(msgspec.Struct, frozen=True):
    """The whole fleet at one moment."""

    nodes: tuple[NodeView, ...] = ()
    deployments: tuple[DeploymentView, ...] = ()
