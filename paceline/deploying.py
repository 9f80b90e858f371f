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
from fleet.placement import LeftOut, Placement, PlacementNode, nodes_for_cuts, placement_for_cuts
from fleet.views import DeploymentView, FleetView, NodeView

_PROGRESS_STEP = 0.1
_SEARCH_S = 5.0
_STOP_S = 30.0


class Demand(msgspec.Struct, frozen=True):
    """What the memory of a placement is to be enough for: ``users`` chats of ``context_tokens`` each."""

    context_tokens: int
    users: int
    kv_precision: KvPrecision


def choose_placement(
    manifest: Manifest, nodes: Sequence[PlacementNode], demand: Demand, names: str | None = None
) -> Placement:
    """A placement of the folder's stages: on the named nodes (``A,B``), or on whichever of them fit.

    Raises:
        PlacementError: a node is not there, or a stage exceeds its node's budget.
    """
    if names is not None:
        chosen = [_find(nodes, name.strip()) for name in names.split(",")]
        if len(chosen) != len(manifest.stages):
            raise PlacementError(f"The folder has {len(manifest.stages)} stages, but --nodes names {len(chosen)}.")
    else:
        chosen = nodes_for_cuts(manifest, nodes, demand.context_tokens, demand.users, demand.kv_precision)
    placement = placement_for_cuts(
        manifest, chosen, manifest.cuts, demand.context_tokens, demand.users, demand.kv_precision
    )
    reason = f"The shards are cut into {len(chosen)} stages, and each is on another node already."
    left_out = tuple(LeftOut(node.id, node.name, reason) for node in nodes if node not in chosen)
    return msgspec.structs.replace(placement, left_out=left_out)


def _find(nodes: Sequence[PlacementNode], name: str) -> PlacementNode:
    matching = [node for node in nodes if name in (node.id, node.name)]
    if len(matching) != 1:
        there = ", ".join(f"{node.name} ({node.id})" for node in nodes)
        problem = "several nodes are" if matching else "no node that answers is"
        raise PlacementError(f"{problem.capitalize()} called {name!r}; there are: {there}.")
    return matching[0]


def read_plan(path: Path, manifest: Manifest, nodes: Sequence[PlacementNode], kv_precision: KvPrecision) -> Placement:
    """The placement of a plan file, with the budgets that its nodes have now.

    Raises:
        PlacementError: plan and folder are cut differently, a node is not there, or a stage exceeds its node's budget.
    """
    try:
        placement = msgspec.json.decode(path.read_bytes(), type=Placement)
    except OSError as error:
        raise PlacementError(f"The plan {path} cannot be read: {error.strerror}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PlacementError(f"{path} is not a plan as 'paceline plan --json' gives it: {error}.") from None
    cuts = _cuts_of(placement)
    if placement.model_id != manifest.model_id:
        raise PlacementError(f"The plan {path} is for another model than the shard folder's; plan again.")
    if cuts != manifest.cuts:
        raise PlacementError(
            f"The plan {path} cuts at {_words(cuts)}, the shard folder at {_words(manifest.cuts)}. "
            f"{rebuild_sentence(placement)}"
        )
    there = {node.id: node for node in nodes}
    for stage in placement.stages:
        if stage.node not in there:
            raise PlacementError(
                f"The plan {path} uses {stage.node_name}, which does not answer; see 'paceline nodes'."
            )
    chosen = [there[stage.node] for stage in placement.stages]
    return placement_for_cuts(manifest, chosen, cuts, placement.context_tokens, placement.users, kv_precision)


def rebuild_sentence(placement: Placement) -> str:
    """How to make the shards that a placement needs."""
    cuts = _cuts_of(placement)
    option = f"--cuts {','.join(map(str, cuts))}" if cuts else "--stages 1"
    return f"Build the shards as planned: paceline shard build MODEL -o DIR {option}."


def _cuts_of(placement: Placement) -> tuple[int, ...]:
    return tuple(stage.first_layer for stage in placement.stages[1:])


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


async def stop_everywhere(controller: FleetController, deployment: DeploymentId, tell: Callable[[str], None]) -> None:
    """Stop a deployment on every node that answers, and wait until none of them has a stage of it any more.

    Raises:
        DeployError: no node runs it, or a node did not stop its stage.
    """

    def all_answered(view: FleetView) -> bool:
        # Stages are known from the nodes themselves: one that has not answered yet may hold one, too.
        return deployment_of(view, deployment) is not None and not _silent_nodes(view)

    def gone(view: FleetView) -> bool:
        return deployment_of(view, deployment) is None

    with contextlib.suppress(TimeoutError):
        await controller.wait_for(all_answered, _SEARCH_S)
    if gone(controller.view):
        running = ", ".join(one.id for one in controller.view.deployments) or "none"
        raise DeployError(f"No node that answers runs a deployment {deployment!r}; running: {running}.")
    silent = _silent_nodes(controller.view)
    await controller.undeploy(deployment)
    try:
        await controller.wait_for(gone, _STOP_S)
    except TimeoutError:
        holders = ", ".join(
            node.name for node in controller.view.nodes if any(stage.deployment == deployment for stage in node.stages)
        )
        raise DeployError(f"{holders} still runs a stage of {deployment} after {_STOP_S:.0f} s; try again.") from None
    if silent:
        tell(
            f"Without an answer: {', '.join(silent)}. If it runs a stage of {deployment}, repeat this when it is back."
        )


def _silent_nodes(view: FleetView) -> list[str]:
    """Names of the fleet's own nodes that have not said yet what they run."""
    return [node.name for node in view.nodes if node.state in ("connecting", "suspect", "lost")]


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
        elif status.state == "ready" and status.loaded:
            text += f" ({status.loaded})"
        news.append(text)
    if deployment.state in ("probing", "ready"):
        news.append(f"{deployment.model}: {deployment.state}")
    return news
