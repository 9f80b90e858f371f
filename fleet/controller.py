"""The controller of a fleet: finds its nodes, keeps in touch with them, and deploys models to them.

All state that lasts lives in the agents, and the trust in the data folder; so any number of processes with the same
data folder may control the fleet at a time or one after another, and each sees what the others started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import zmq.asyncio

from fleet.control_messages import DeploymentId, NodeStatus, Undeploy
from fleet.deployment_driver import DeploymentDriver, DeploymentOrder, FileServer
from fleet.discovery import Browser, SeenNode
from fleet.enrolment import TokenStore
from fleet.errors import DeployError, PacelineError, PlacementError
from fleet.fleet_view import driven_deployment, reported_deployments
from fleet.identity import Identity, load_or_create_identity
from fleet.liveness import ResumeDetector
from fleet.manifest import KvPrecision, Manifest, load_manifest
from fleet.node import NodeId, PeerAddress
from fleet.node_link import NodeLink
from fleet.placement import Placement, PlacementNode
from fleet.transfer import TransferSource
from fleet.trust import TrustStore
from fleet.views import DeploymentState, DeploymentView, FleetView, NodeView

MAX_ENDED_DEPLOYMENTS = 20
SLEEP_CHECK_S = 5.0
_log = logging.getLogger("paceline.controller")

ViewCallback = Callable[[FleetView], None]


class FleetController:
    """One controller, in the selector event loop in which ``start`` was called. All methods belong into that loop.

    Args:
        data_dir: identity, tokens and trusted nodes are kept here.
        name: shown to the owners of the PCs.
    """

    def __init__(self, data_dir: Path, name: str) -> None:
        self.identity: Identity = load_or_create_identity(data_dir)
        self._name = name
        self._tokens = TokenStore(data_dir)
        self._trust = TrustStore(data_dir)
        self._links: dict[NodeId, NodeLink] = {}
        self._drivers: dict[str, DeploymentDriver] = {}
        self._view = FleetView()
        self._callbacks: list[ViewCallback] = []
        self._publishing: asyncio.Handle | None = None
        self._context: zmq.asyncio.Context | None = None
        self._browser: Browser | None = None
        self._sleep_watch: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def view(self) -> FleetView:
        """The fleet at this moment."""
        return self._view

    async def start(self) -> None:
        """Begin to look for nodes.

        Raises:
            UnreachableError: this PC cannot take part in mDNS.
            DataFolderError: the trust kept in the data folder cannot be read.
        """
        self._context = zmq.asyncio.Context()
        self._browser = Browser(self._on_seen, is_known=self._is_trusted)
        try:
            for node in self._trust.nodes().values():
                self._add_link(node.public_key, node.name, trusted=True)
            await self._browser.start()
            self._sleep_watch = asyncio.create_task(self._watch_for_sleep(), name="sleep watch")
        except BaseException:
            await self.close()
            raise
        self._publish()

    async def close(self) -> None:
        """Let go of everything; what was deployed goes on running."""
        if self._sleep_watch is not None:
            self._sleep_watch.cancel()
            await asyncio.gather(self._sleep_watch, return_exceptions=True)
            self._sleep_watch = None
        if self._browser is not None:
            await self._browser.close()
            self._browser = None
        await asyncio.gather(*(driver.close() for driver in self._drivers.values()))
        await asyncio.gather(*(link.close() for link in self._links.values()), *self._closing)
        self._drivers.clear()
        self._links.clear()
        if self._publishing is not None:
            self._publishing.cancel()
            self._publishing = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def subscribe(self, callback: ViewCallback) -> Callable[[], None]:
        """Call ``callback`` in the loop with each new snapshot. Returns what ends the subscription."""
        self._callbacks.append(callback)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return unsubscribe

    async def wait_for(self, predicate: Callable[[FleetView], bool], timeout_s: float | None) -> FleetView:
        """The first snapshot for which ``predicate`` holds. What the predicate raises is raised here.

        Raises:
            TimeoutError: there is none within ``timeout_s``.
        """
        found: asyncio.Future[FleetView] = asyncio.get_running_loop().create_future()

        def check(view: FleetView) -> None:
            error: Exception | None = None
            holds = False
            try:
                holds = not found.done() and predicate(view)
            except Exception as raised:
                error = raised
            # Asked again: an interrupt may have cancelled the wait while the predicate ran.
            if found.done():
                return
            if error is not None:
                found.set_exception(error)
            elif holds:
                found.set_result(view)

        unsubscribe = self.subscribe(check)
        try:
            check(self._view)
            async with asyncio.timeout(timeout_s):
                return await found
        finally:
            unsubscribe()

    def create_token(self, uses: int, expires_s: float) -> str:
        """An enrolment token of this fleet.

        Raises:
            EnrolmentError: ``uses`` or ``expires_s`` makes no sense.
        """
        return self._tokens.create(self.identity, uses, expires_s)

    def placement_nodes(self) -> list[PlacementNode]:
        """The nodes that may take a stage now, each with what is free for it of its budget and of its memory."""
        return [_placement_node(node) for node in self._view.nodes if node.state == "ready" and node.inventory]

    async def deploy(
        self,
        shard_folder: Path,
        placement: Placement,
        *,
        kv_precision: KvPrecision,
        http_port: int = 0,
        exact: bool = False,
    ) -> DeploymentId:
        """Begin to deploy a shard folder; how it goes shows in the view.

        Args:
            exact: compute in f32 without dynamic quantization, for comparisons token by token.

        Raises:
            ModelError: the folder is not a shard folder.
            PlacementError: the placement is for other shards.
            DeployError: a node of the placement is not there.
        """
        manifest = await asyncio.to_thread(load_manifest, shard_folder)
        _check(manifest, placement)
        for stage in placement.stages:
            link = self._links.get(stage.node)
            if link is None or not link.alive:
                raise DeployError(f"{stage.node_name} does not answer; look with 'paceline nodes' and plan again.")
        order = DeploymentOrder(
            id=secrets.token_hex(6),
            folder=shard_folder,
            manifest=manifest,
            placement=placement,
            kv_precision=kv_precision,
            http_port=http_port,
            exact=exact,
        )
        self._drivers[order.id] = DeploymentDriver(order, self._links, self._client_keys, self._serve, self._changed)
        self._publish()
        return order.id

    async def cancel(self, deployment: DeploymentId) -> None:
        """Stop deploying and take it off all nodes.

        Raises:
            DeployError: there is no such deployment.
        """
        await self._end(deployment, "cancelled")

    async def undeploy(self, deployment: DeploymentId) -> None:
        """Take a deployment off all nodes, whoever started it.

        Raises:
            DeployError: there is no such deployment, or a node could not be told.
        """
        await self._end(deployment, "stopped")

    def gateway_address(self, deployment: DeploymentId) -> PeerAddress:
        """Where a deployment's gateway is reached.

        Raises:
            DeployError: there is no such deployment, or its gateway does not listen yet.
        """
        found = self._find(deployment)
        node = next((node for node in self._view.nodes if node.id == found.gateway_node), None)
        if node is None or found.gateway_port is None or not found.gateway_addresses:
            raise DeployError(f"The gateway of {found.model} is not there yet: the deployment is {found.state}.")
        return PeerAddress(node.name, found.gateway_addresses, found.gateway_port, found.gateway_public_key)

    def forget(self, node: NodeId) -> None:
        """Trust a node no longer. It may come back with a new enrolment token."""
        link = self._links.pop(node, None)
        if link is not None:
            self._trust.forget_node(link.public_key)
            self._spawn_close(link)
            self._publish()

    async def _end(self, deployment: DeploymentId, state: DeploymentState) -> None:
        driver = self._drivers.get(deployment)
        if driver is not None and not driver.machine.finished:
            await driver.end(state)
            return
        holders = [
            link
            for link in self._links.values()
            if link.status is not None and deployment in _deployments_of(link.status)
        ]
        if not holders:
            if driver is not None:
                return
            self._find(deployment)
        results = await asyncio.gather(
            *(link.request(Undeploy(number=0, deployment=deployment)) for link in holders), return_exceptions=True
        )
        for result in results:
            if isinstance(result, PacelineError):
                raise DeployError(str(result)) from None
            if isinstance(result, BaseException):
                raise result

    def _find(self, deployment: DeploymentId) -> DeploymentView:
        for found in self._view.deployments:
            if found.id == deployment:
                return found
        raise DeployError(f"There is no deployment {deployment} on the nodes that answer.")

    def _is_trusted(self, public_key: str) -> bool:
        return any(link.public_key == public_key and link.trusted for link in self._links.values())

    def _client_keys(self) -> set[str]:
        """Who may chat: this controller, and the PCs of the fleet."""
        return {self.identity.public_key, *(link.public_key for link in self._links.values() if link.trusted)}

    def _serve(self, order: DeploymentOrder, link: NodeLink) -> FileServer:
        assert self._context is not None
        assert link.welcome is not None
        peer = PeerAddress(link.name[:256], link.addresses, link.welcome.transfer_port, link.public_key)
        return TransferSource(self._context, self.identity, peer, [order.id], order.folder)

    def _on_seen(self, nodes: tuple[SeenNode, ...]) -> None:
        seen_now = {node.node_id: node for node in nodes if node.public_key != self.identity.public_key}
        for node_id, node in seen_now.items():
            link = self._links.get(node_id) or self._add_link(node.public_key, node.name, trusted=False)
            link.update(node)
        for node_id, link in list(self._links.items()):
            if node_id in seen_now or link.seen is None:
                continue
            if link.trusted:
                link.update(None)
            else:
                del self._links[node_id]
                self._spawn_close(link)
        self._changed()

    def _add_link(self, public_key: str, name: str, *, trusted: bool) -> NodeLink:
        assert self._context is not None
        link = NodeLink(
            self._context,
            self.identity,
            self._name,
            public_key,
            name,
            self._trust,
            self._tokens,
            trusted=trusted,
            on_change=self._changed,
            on_heartbeat=self._on_heartbeat,
            is_busy=self._is_busy,
        )
        self._links[link.node_id] = link
        return link

    def _is_busy(self, node: NodeId) -> bool:
        return any(node in driver.nodes and not driver.settled for driver in self._drivers.values())

    def _on_heartbeat(self, link: NodeLink, status: NodeStatus) -> None:
        for driver in list(self._drivers.values()):
            driver.on_heartbeat(link, status)

    def _spawn_close(self, link: NodeLink) -> None:
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _watch_for_sleep(self) -> None:
        detector = ResumeDetector(time.monotonic(), time.time())
        while True:
            await asyncio.sleep(SLEEP_CHECK_S)
            if detector.resumed(time.monotonic(), time.time()):
                _log.info("this PC slept; connecting to all nodes anew")
                for link in self._links.values():
                    link.on_resumed()

    def _changed(self) -> None:
        """Publish a snapshot soon: many changes in a row make one."""
        if self._publishing is None and self._context is not None:
            self._publishing = asyncio.get_running_loop().call_soon(self._publish)

    def _publish(self) -> None:
        self._publishing = None
        self._forget_ended()
        nodes = sorted((link.view() for link in self._links.values()), key=lambda node: (node.name, node.id))
        by_id = {node.id: node for node in nodes}
        driven = [
            driven_deployment(key, driver.order.manifest.name, driver.machine, by_id)
            for key, driver in self._drivers.items()
        ]
        view = FleetView(nodes=tuple(nodes), deployments=(*driven, *reported_deployments(nodes, self._drivers.keys())))
        if view != self._view:
            self._view = view
            for callback in list(self._callbacks):
                callback(view)

    def _forget_ended(self) -> None:
        """Keep the last few that ended, so that their reasons can be read."""
        ended = [key for key, driver in self._drivers.items() if driver.machine.finished]
        for key in ended[:-MAX_ENDED_DEPLOYMENTS]:
            driver = self._drivers.pop(key)
            task = asyncio.get_running_loop().create_task(driver.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _deployments_of(status: NodeStatus) -> set[str]:
    return {stage.deployment for stage in status.stages} | {gateway.deployment for gateway in status.gateways}


def _placement_node(node: NodeView) -> PlacementNode:
    assert node.inventory is not None
    used_bytes = sum(
        max(stage.memory_bytes, stage.progress.total_bytes if stage.progress is not None else 0)
        for stage in node.stages
    )
    budget_bytes = node.inventory.memory_budget_bytes - used_bytes
    if node.load is not None:
        budget_bytes = min(budget_bytes, node.load.memory_free_bytes)
    return PlacementNode(id=node.id, name=node.name, device="CPU", budget_bytes=max(0, budget_bytes))


def _check(manifest: Manifest, placement: Placement) -> None:
    layers = [(stage.first_layer, stage.end_layer) for stage in placement.stages]
    cut = [(stage.first_layer, stage.end_layer) for stage in manifest.stages]
    if placement.model_id != manifest.model_id or layers != cut:
        raise PlacementError(
            "The placement was made for another model or another cut than the shard folder's; plan again, or build "
            "the shards as planned."
        )
