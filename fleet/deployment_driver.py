"""Carries one deployment out: sends to nodes what its state machine asks for, and serves them the files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fleet.control_messages import (
    ControlRequest,
    DeploymentId,
    NodeStatus,
    PrepareStage,
    StartGateway,
    StartStage,
    Undeploy,
)
from fleet.deployment_machine import (
    Ask,
    AskGateway,
    AskPrepare,
    AskStart,
    AskUndeploy,
    DeploymentMachine,
    StageTarget,
)
from fleet.errors import PacelineError, RefusedError
from fleet.manifest import KvPrecision, Manifest
from fleet.node import NodeId, PeerAddress
from fleet.node_link import NodeLink
from fleet.placement import Placement
from fleet.views import DeploymentState

TICK_S = 1.0
_log = logging.getLogger("paceline.controller")


@dataclass(frozen=True)
class DeploymentOrder:
    """What shall be deployed, where, and how."""

    id: DeploymentId
    folder: Path
    manifest: Manifest
    placement: Placement
    kv_precision: KvPrecision
    http_port: int = 0
    exact: bool = False


class FileServer(Protocol):
    """Serves the files of an order to one node until it is closed."""

    async def close(self) -> None:
        """Stop serving."""


class DeploymentDriver:
    """One deployment. Lives in the controller's event loop.

    Args:
        links: the nodes, by id; may grow and change.
        client_keys: tells who may chat with the gateway.
        serve: begins to serve the order's files to a node over its transfer port.
        on_change: called after every change of ``machine``.
    """

    def __init__(
        self,
        order: DeploymentOrder,
        links: Mapping[NodeId, NodeLink],
        client_keys: Callable[[], Collection[str]],
        serve: Callable[[DeploymentOrder, NodeLink], FileServer],
        on_change: Callable[[], None],
    ) -> None:
        self.order = order
        targets = [
            StageTarget(stage.stage, stage.node, links[stage.node].name if stage.node in links else stage.node_name)
            for stage in order.placement.stages
        ]
        self._loop = asyncio.get_running_loop()
        self.machine = DeploymentMachine(targets, self._loop.time())
        self._links = links
        self._client_keys = client_keys
        self._serve = serve
        self._on_change = on_change
        self._servers: dict[NodeId, FileServer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker = self._loop.create_task(self._tick(), name=f"deployment {order.id}")
        for node in self.nodes:
            if node in links:
                links[node].beat_now()

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way."""
        return self.machine.finished or self.machine.state == "ready"

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes that have a stage, each once."""
        return tuple(dict.fromkeys(target.node for target in self.machine.targets))

    def on_heartbeat(self, link: NodeLink, status: NodeStatus) -> None:
        """A node told how it is."""
        if link.node_id not in self.nodes:
            return
        stages = [stage for stage in status.stages if stage.deployment == self.order.id]
        gateway = next((gateway for gateway in status.gateways if gateway.deployment == self.order.id), None)
        self._carry_out(self.machine.observe(link.node_id, stages, gateway, self._loop.time()))
        if any(stage.state == "receiving" for stage in stages):
            self._begin_serving(link)
        else:
            self._stop_serving(link.node_id)

    async def end(self, state: DeploymentState) -> None:
        """Take it off all nodes, and wait until those that answer have been told."""
        self._carry_out(self.machine.cancel(state))
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    async def close(self) -> None:
        """Let go of the deployment; what runs goes on running."""
        self._ticker.cancel()
        tasks = [self._ticker, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        servers, self._servers = list(self._servers.values()), {}
        await asyncio.gather(*(server.close() for server in servers))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._loop.time()
            for node in self.nodes:
                if node not in self._links or self._links[node].gone:
                    self._carry_out(self.machine.lost(node, now_s))
                    self._stop_serving(node)
            self._carry_out(self.machine.tick(now_s))

    def _carry_out(self, asks: list[Ask]) -> None:
        for ask in asks:
            self._spawn(self._ask(ask))
        if self.machine.finished:
            for node in self.nodes:
                self._stop_serving(node)
        self._on_change()

    async def _ask(self, ask: Ask) -> None:
        try:
            node, request = self._request(ask)
            await self._link(node).request(request)
        except RefusedError as error:
            self._carry_out(self.machine.answered(ask, str(error), self._loop.time()))
        except PacelineError as error:
            _log.info("%s", error)
            self.machine.unanswered(ask, self._loop.time())
        else:
            self._carry_out(self.machine.answered(ask, None, self._loop.time()))

    def _request(self, ask: Ask) -> tuple[NodeId, ControlRequest]:
        order, targets = self.order, self.machine.targets
        match ask:
            case AskPrepare(stage):
                request: ControlRequest = PrepareStage(
                    number=0, deployment=order.id, manifest=order.manifest, stage=stage
                )
                return targets[stage].node, request
            case AskStart(stage):
                # The gateway runs on the node of stage 0, and each stage is sent to by the one before it.
                senders = {self._key(targets[0].node), self._key(targets[max(stage - 1, 0)].node)}
                request = StartStage(
                    number=0,
                    deployment=order.id,
                    stage=stage,
                    device=order.placement.stages[stage].device,
                    kv_precision=order.kv_precision,
                    allowed_keys=tuple(sorted(senders)),
                    exact=order.exact,
                )
                return targets[stage].node, request
            case AskGateway():
                request = StartGateway(
                    number=0,
                    deployment=order.id,
                    stages=tuple(self._address(target) for target in targets),
                    allowed_keys=tuple(sorted(self._client_keys())),
                    http_port=order.http_port,
                    context_tokens=order.placement.context_tokens,
                    kv_capacity_tokens=order.placement.context_tokens * order.placement.users,
                )
                return targets[0].node, request
            case AskUndeploy(node):
                return node, Undeploy(number=0, deployment=order.id)

    def _key(self, node: NodeId) -> str:
        return self._link(node).public_key

    def _address(self, target: StageTarget) -> PeerAddress:
        link, status = self._link(target.node), self.machine.stages.get(target.stage)
        if status is None or status.port is None:
            raise PacelineError(f"Stage {target.stage} on {target.node_name} does not listen.")
        return PeerAddress(target.node_name, link.addresses, status.port, link.public_key)

    def _link(self, node: NodeId) -> NodeLink:
        link = self._links.get(node)
        if link is None:
            raise PacelineError(f"The node {node} is not there.")
        return link

    def _begin_serving(self, link: NodeLink) -> None:
        if link.node_id in self._servers:
            return
        try:
            self._servers[link.node_id] = self._serve(self.order, link)
        except PacelineError as error:
            self._carry_out(self.machine.fail(f"The shard folder {self.order.folder} cannot be sent: {error}"))

    def _stop_serving(self, node: NodeId) -> None:
        server = self._servers.pop(node, None)
        if server is not None:
            self._spawn(server.close())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
