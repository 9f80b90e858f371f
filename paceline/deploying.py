"""Choosing a placement for shards that are already cut, and following a deployment until it answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from fleet.control_messages import DeploymentId
from fleet.controller import FleetController
from fleet.errors import DeployError, PlacementError
from fleet.manifest import KvPrecision, Manifest
from fleet.placement import Placement, PlacementNode, assess_cuts, placement_for_cuts, problem_of
from fleet.views import DeploymentView, FleetView, NodeView

_PROGRESS_STEP = 0.1


def choose_placement(
    manifest: Manifest, nodes: Sequence[PlacementNode], plan: Path | None, names: str | None
) -> Placement:
    """A placement of the folder's stages: from a plan file, on the named nodes, or largest stage to largest node.

    Raises:
        PlacementError: plan and folder are cut differently, a node is not there, or a stage exceeds its node's budget.
    """
    if plan is not None:
        return _read_plan(plan, manifest, nodes)
    if names is not None:
        chosen = [_find(nodes, name.strip()) for name in names.split(",")]
        if len(chosen) != len(manifest.stages):
            raise PlacementError(f"The folder has {len(manifest.stages)} stages, but {len(chosen)} nodes are named.")
    else:
        chosen = _by_size(manifest, nodes)
    return placement_for_cuts(manifest, chosen, manifest.cuts)


def _by_size(manifest: Manifest, nodes: Sequence[PlacementNode]) -> list[PlacementNode]:
    """The nodes in their own order where that fits, else the largest stage on the largest node, and so on."""
    count = len(manifest.stages)
    if len(nodes) < count:
        there = ", ".join(node.name for node in nodes)
        raise PlacementError(
            f"The folder has {count} stages and needs as many nodes; there are {len(nodes)}: {there}. "
            "Build it with fewer stages, or start more agents."
        )
    if not problem_of(assess_cuts(manifest, nodes[:count], manifest.cuts)):
        return list(nodes[:count])
    largest_nodes = sorted(nodes, key=lambda node: -node.budget_bytes)
    order = sorted(range(count), key=lambda index: -manifest.stages[index].bytes)
    chosen = dict(zip(order, largest_nodes, strict=False))
    return [chosen[index] for index in range(count)]


def _find(nodes: Sequence[PlacementNode], name: str) -> PlacementNode:
    matching = [node for node in nodes if name in (node.id, node.name)]
    if len(matching) != 1:
        there = ", ".join(f"{node.name} ({node.id})" for node in nodes)
        problem = "several nodes are" if matching else "no node that answers is"
        raise PlacementError(f"{problem.capitalize()} called {name!r}; there are: {there}.")
    return matching[0]


def _read_plan(path: Path, manifest: Manifest, nodes: Sequence[PlacementNode]) -> Placement:
    try:
        placement = msgspec.json.decode(path.read_bytes(), type=Placement)
    except OSError as error:
        raise PlacementError(f"The plan {path} cannot be read: {error.strerror}.") from None
    except msgspec.MsgspecError as error:
        raise PlacementError(f"{path} is not a plan as 'paceline plan --json' gives it: {error}.") from None
    cuts = tuple(stage.first_layer for stage in placement.stages[1:])
    if cuts != manifest.cuts or placement.model_id != manifest.model_id:
        raise PlacementError(
            f"The plan {path} cuts at {_words(cuts)}, the shard folder at {_words(manifest.cuts)}, or they are of "
            f"different models. Build the shards as planned: paceline shard build MODEL -o DIR --cuts {_words(cuts)}."
        )
    for stage in placement.stages:
        if all(node.id != stage.node for node in nodes):
            raise PlacementError(
                f"The plan {path} uses {stage.node_name}, which does not answer; see 'paceline nodes'."
            )
    return placement


def _words(cuts: Sequence[int]) -> str:
    return ",".join(map(str, cuts)) or "no layer"


def deployment_of(view: FleetView, deployment: DeploymentId) -> DeploymentView | None:
    """The deployment in a snapshot."""
    return next((one for one in view.deployments if one.id == deployment), None)


def ready_nodes(view: FleetView) -> list[NodeView]:
    """The nodes of a snapshot that may take a stage."""
    return [node for node in view.nodes if node.state == "ready"]


async def deploy_and_wait(
    controller: FleetController,
    folder: Path,
    placement: Placement,
    kv_precision: KvPrecision,
    tell: Callable[[str], None],
    http_port: int = 0,
) -> DeploymentView:
    """The deployment once a probe token has gone through all its stages; what happens meanwhile is told in words.

    Raises:
        DeployError: it failed or was cancelled; the text names the node and the step.
    """
    deployment = await controller.deploy(folder, placement, kv_precision=kv_precision, http_port=http_port)
    told: set[str] = set()

    def settled(view: FleetView) -> bool:
        one = deployment_of(view, deployment)
        if one is None:
            return False
        for text in _news(one):
            if text not in told:
                told.add(text)
                tell(text)
        return one.state in ("ready", "failed", "cancelled", "stopped")

    try:
        await controller.wait_for(settled, None)
    except BaseException:
        with contextlib.suppress(DeployError):
            await controller.cancel(deployment)
        raise
    final = deployment_of(controller.view, deployment)
    assert final is not None
    if final.state != "ready":
        raise DeployError(final.detail or f"The deployment is {final.state}.")
    return final


def _news(deployment: DeploymentView) -> list[str]:
    """What there is to say of a deployment, in steps coarse enough to read."""
    news = []
    for stage in deployment.stages:
        status = stage.status
        if status is None:
            continue
        text = f"stage {stage.stage} on {stage.node_name}: {status.state}"
        if status.state == "receiving" and status.progress is not None and status.progress.total_bytes:
            fraction = status.progress.done_bytes / status.progress.total_bytes
            percent = int(fraction / _PROGRESS_STEP) * _PROGRESS_STEP * 100
            text += f" {percent:.0f} % of {status.progress.total_bytes / 1e6:,.0f} MB"
        news.append(text)
    if deployment.state in ("probing", "ready"):
        news.append(f"{deployment.model}: {deployment.state}")
    return news
