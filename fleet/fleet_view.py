"""Snapshots of deployments, from what a controller drives itself and from what nodes report. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fleet.control_messages import GatewayStatus, StageStatus
from fleet.deployment_machine import DeploymentMachine
from fleet.node import NodeId
from fleet.views import DeploymentState, DeploymentView, NodeView, StageProgress


def driven_deployment(
    deployment: str, model: str, machine: DeploymentMachine, nodes: Mapping[NodeId, NodeView]
) -> DeploymentView:
    """A deployment that this controller drives."""
    stages = tuple(
        StageProgress(target.stage, target.node, target.node_name, machine.stages.get(target.stage))
        for target in machine.targets
    )
    gateway = machine.gateway if machine.state in ("probing", "ready", "degraded") else None
    return _view(deployment, model, machine.state, machine.detail, stages, gateway, nodes.get(machine.targets[0].node))


def reported_deployments(nodes: Sequence[NodeView], driven: Collection[str]) -> list[DeploymentView]:
    """Deployments that nodes report and that this controller does not drive: other processes started them."""
    stages: dict[str, list[tuple[NodeView, StageStatus]]] = {}
    gateways: dict[str, tuple[NodeView, GatewayStatus]] = {}
    for node in nodes:
        for stage in node.stages:
            stages.setdefault(stage.deployment, []).append((node, stage))
        for gateway in node.gateways:
            gateways[gateway.deployment] = (node, gateway)
            stages.setdefault(gateway.deployment, [])
    views = []
    for deployment, found in sorted(stages.items()):
        if deployment in driven:
            continue
        found.sort(key=lambda entry: entry[1].stage)
        gateway_node, gateway_status = gateways.get(deployment, (None, None))
        state, detail = reported_state([stage for _, stage in found], gateway_status)
        model = found[0][1].model if found else gateway_status.model if gateway_status is not None else ""
        progress = tuple(StageProgress(stage.stage, node.id, node.name, stage) for node, stage in found)
        views.append(_view(deployment, model, state, detail, progress, gateway_status, gateway_node))
    return views


def reported_state(stages: Sequence[StageStatus], gateway: GatewayStatus | None) -> tuple[DeploymentState, str]:
    """State of a deployment and why, judged from what its nodes report alone."""
    by_state = {stage.state: stage for stage in stages}
    if gateway is not None and gateway.state == "failed":
        return "failed", gateway.detail
    if "failed" in by_state:
        failed = by_state["failed"]
        return "failed", f"stage {failed.stage} failed: {failed.detail}"
    if "stopping" in by_state:
        return "stopped", "is being stopped"
    if gateway is not None:
        missing = gateway.stages - len(stages)
        if gateway.state == "ready" and not missing and by_state.keys() == {"ready"}:
            return "ready", ""
        if gateway.state == "starting":
            return "probing", gateway.detail
        return "degraded", gateway.detail or (f"{missing} stages are missing" if missing > 0 else "a stage is starting")
    if "receiving" in by_state:
        return "sending", ""
    return "starting", ""


def _view(
    deployment: str,
    model: str,
    state: DeploymentState,
    detail: str,
    stages: tuple[StageProgress, ...],
    gateway: GatewayStatus | None,
    gateway_node: NodeView | None,
) -> DeploymentView:
    if gateway is None or gateway_node is None:
        return DeploymentView(id=deployment, model=model, state=state, detail=detail, stages=stages)
    return DeploymentView(
        id=deployment,
        model=model,
        state=state,
        detail=detail,
        stages=stages,
        gateway_node=gateway_node.id,
        gateway_addresses=gateway_node.addresses,
        gateway_port=gateway.port,
        gateway_public_key=gateway_node.public_key,
        http_port=gateway.http_port,
    )
