"""Agents in this process, with their real children played by small scripts, driven by a real controller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq.asyncio

from agent.agent_state import load_state
from agent.deployments import MAX_STAGES
from agent.service import AgentOptions, AgentService
from fleet.child_process import start_child
from fleet.control import ControlClient
from fleet.control_messages import (
    Heartbeat,
    HeartbeatReply,
    Leave,
    PrepareStage,
    Quit,
    SetPaused,
    StartGateway,
    StartStage,
    Undeploy,
)
from fleet.controller import FleetController
from fleet.errors import EnrolmentError, RefusedError
from fleet.identity import Identity, load_or_create_identity
from fleet.manifest import load_manifest
from fleet.node import PeerAddress
from fleet.placement import Placement, PlannedStage
from fleet.trust import TrustStore
from fleet.views import DeploymentView, FleetView, NodeView

DEADLINE_S = 30.0
OTHER_DEPLOYMENT = "0123456789ab"


class Fleet:
    """A controller and agents that run as tasks of the same loop."""

    def __init__(self, folder: Path, memory_budget_bytes: int | None) -> None:
        self.folder = folder
        self.controller = FleetController(folder / "controller", "desk")
        self.context = zmq.asyncio.Context()
        self._memory_budget_bytes = memory_budget_bytes
        self._running: dict[str, tuple[AgentService, asyncio.Task[None]]] = {}

    def start_agent(self, name: str, token: str | None = None) -> None:
        service = AgentService(
            AgentOptions(
                data_dir=self.folder / name,
                name=name,
                enrolment_token=token,
                memory_budget_bytes=self._memory_budget_bytes,
                stage_module="played_stage",
                gateway_module="played_gateway",
            )
        )
        self._running[name] = (service, asyncio.get_running_loop().create_task(service.run()))

    async def stop_agent(self, name: str) -> None:
        service, task = self._running.pop(name)
        service.stop()
        await task

    async def until_agent_ends(self, name: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self._running.pop(name)[1]

    async def close(self) -> None:
        await asyncio.gather(*(self.stop_agent(name) for name in list(self._running)))
        await self.controller.close()
        self.context.destroy(0)

    async def until_ready(self, *names: str) -> list[NodeView]:
        def ready(view: FleetView) -> list[NodeView]:
            return [node for node in view.nodes if node.name in names and node.state == "ready"]

        view = await self.controller.wait_for(lambda view: len(ready(view)) == len(names), DEADLINE_S)
        return ready(view)

    async def until_state(self, name: str, state: str) -> None:
        await self.controller.wait_for(
            lambda view: any(node.name == name and node.state == state for node in view.nodes), DEADLINE_S
        )

    async def until_deployment(self, deployment: str, state: str, restarts: int = 0) -> DeploymentView:
        """``restarts``: of the deployment's stages together, at least."""

        def find(view: FleetView) -> DeploymentView | None:
            for one in view.deployments:
                done = sum(part.status.restarts for part in one.stages if part.status is not None)
                if one.id == deployment and one.state == state and done >= restarts:
                    return one
            return None

        found = find(await self.controller.wait_for(lambda view: find(view) is not None, DEADLINE_S))
        assert found is not None
        return found

    async def two_agents(self) -> list[NodeView]:
        token = self.controller.create_token(2, 3600)
        for name in ("pc-1", "pc-2"):
            self.start_agent(name, token)
        return await self.until_ready("pc-1", "pc-2")

    async def until_nothing_runs(self, name: str) -> None:
        await self.controller.wait_for(
            lambda view: any(node.name == name and node.load and not node.stages for node in view.nodes), DEADLINE_S
        )

    async def connect(self, name: str, identity: Identity) -> ControlClient:
        """A control connection to an agent, as whoever holds ``identity``."""
        port = load_state(self.folder / name).control_port
        assert port is not None
        agent = load_or_create_identity(self.folder / name)
        client = ControlClient(
            self.context, identity, PeerAddress(name, ("127.0.0.1",), port, agent.public_key), controller_name="test"
        )
        await client.connect()
        return client


@contextlib.asynccontextmanager
async def opened(folder: Path, memory_budget_bytes: int | None) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder, memory_budget_bytes)
    await fleet.controller.start()
    try:
        yield fleet
    finally:
        await fleet.close()


Test = Callable[[Fleet], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test with a fleet; afterwards no child is left."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "played"))
    # What devices there are does not matter here, and asking OpenVINO takes longer than most of these tests.
    monkeypatch.setattr("agent.inventory.start_child", lambda module: start_child("played_probe"))

    def run_test(test: Test, memory_budget_bytes: int | None = None) -> None:
        async def main() -> None:
            async with opened(tmp_path, memory_budget_bytes) as fleet:
                await test(fleet)

        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(main())
        assert played_children() == []

    return run_test


def played_children() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(part.startswith("played_") for part in process.cmdline()):
                found.append(process)
    return found


def stage_child() -> psutil.Process:
    (process,) = [child for child in played_children() if "played_stage" in child.cmdline()]
    return process


def placement_on(nodes: list[NodeView], shards: Path, device: str = "CPU") -> Placement:
    manifest = load_manifest(shards)
    stages = tuple(
        PlannedStage(part.stage, node.id, node.name, device, part.first_layer, part.end_layer, 1, 1, 1, 1000)
        for part, node in zip(manifest.stages, nodes, strict=True)
    )
    return Placement(manifest.model_id, 128, 1, stages)


async def until_beat(client: ControlClient, wanted: Callable[[HeartbeatReply], bool]) -> HeartbeatReply:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            reply = await client.request(Heartbeat(number=0))
            assert isinstance(reply, HeartbeatReply)
            if wanted(reply):
                return reply
            await asyncio.sleep(0.05)


def test_deploy_undeploy_and_deploy_again_without_fetching(run: Callable[..., None], shards: Path) -> None:
    async def test(fleet: Fleet) -> None:
        nodes = await fleet.two_agents()
        deployment = await fleet.controller.deploy(shards, placement_on(nodes, shards), kv_precision="f16")
        view = await fleet.until_deployment(deployment, "ready")
        for part in view.stages:
            assert part.status is not None
            assert part.status.progress is not None
            assert part.status.progress.done_bytes == part.status.progress.total_bytes
            assert part.status.progress.held_bytes == 0
            assert part.status.memory_bytes > 0
        assert fleet.controller.gateway_address(deployment).node_name == "pc-1"
        assert view.http_port == 8000
        assert len(played_children()) == 3

        await fleet.controller.undeploy(deployment)
        await fleet.until_nothing_runs("pc-1")
        await fleet.until_nothing_runs("pc-2")
        assert played_children() == []
        assert list((fleet.folder / "pc-1" / "store" / "deployments").glob("*/*")) == []

        again = await fleet.controller.deploy(shards, placement_on(nodes, shards), kv_precision="f16")
        view = await fleet.until_deployment(again, "ready")
        for part in view.stages:
            assert part.status is not None
            assert part.status.progress is not None
            assert part.status.progress.held_bytes == part.status.progress.total_bytes

    run(test)


def test_a_killed_stage_is_restarted_on_its_port(run: Callable[..., None], make_shards: Callable[..., Path]) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.start_agent("pc-1", fleet.controller.create_token(1, 3600))
        nodes = await fleet.until_ready("pc-1")
        shards = make_shards(fleet.folder / "shards", cuts=())
        deployment = await fleet.controller.deploy(shards, placement_on(nodes, shards), kv_precision="f16")
        before = (await fleet.until_deployment(deployment, "ready")).stages[0].status
        assert before is not None
        stage_child().kill()
        # That it is degraded meanwhile may go unseen: a stage that is imported is back before the next heartbeat.
        after = (await fleet.until_deployment(deployment, "ready", restarts=1)).stages[0].status
        assert after is not None
        assert after.port == before.port
        assert after.restarts == 1

    run(test)


def test_a_stage_that_cannot_run_fails_the_deployment_in_words(run: Callable[..., None], shards: Path) -> None:
    async def test(fleet: Fleet) -> None:
        nodes = await fleet.two_agents()
        placement = placement_on(nodes, shards, device="GPU")
        deployment = await fleet.controller.deploy(shards, placement, kv_precision="f16")
        failed = await fleet.until_deployment(deployment, "failed")
        assert "failed: There is no device GPU." in failed.detail
        await fleet.until_nothing_runs("pc-1")
        await fleet.until_nothing_runs("pc-2")

    run(test)


def test_an_agent_started_again_goes_on_by_itself(run: Callable[..., None], shards: Path) -> None:
    async def test(fleet: Fleet) -> None:
        nodes = await fleet.two_agents()
        deployment = await fleet.controller.deploy(shards, placement_on(nodes, shards), kv_precision="f16")
        view = await fleet.until_deployment(deployment, "ready")
        ports = [part.status.port for part in view.stages if part.status is not None]
        await fleet.stop_agent("pc-1")
        await fleet.until_deployment(deployment, "degraded")
        fleet.start_agent("pc-1")
        view = await fleet.until_deployment(deployment, "ready")
        assert [part.status.port for part in view.stages if part.status is not None] == ports

    run(test)


def test_the_memory_budget_is_kept(run: Callable[..., None], shards: Path) -> None:
    async def test(fleet: Fleet) -> None:
        nodes = await fleet.two_agents()
        assert nodes[0].inventory is not None
        assert nodes[0].inventory.memory_budget_bytes == 30_000
        deployment = await fleet.controller.deploy(shards, placement_on(nodes, shards), kv_precision="f16")
        await fleet.until_deployment(deployment, "ready")
        second = await fleet.controller.deploy(shards, placement_on(nodes, shards), kv_precision="f16")
        failed = await fleet.until_deployment(second, "failed")
        assert "MB are left of the" in failed.detail
        assert failed.detail.startswith("pc-")
        await fleet.until_deployment(deployment, "ready")

    run(test, memory_budget_bytes=30_000)


def test_the_owner_pauses_resumes_and_quits_and_nobody_else_does(run: Callable[..., None], shards: Path) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.start_agent("pc-1", fleet.controller.create_token(1, 3600))
        await fleet.until_ready("pc-1")
        owner = await fleet.connect("pc-1", load_or_create_identity(fleet.folder / "pc-1"))
        controller = await fleet.connect("pc-1", fleet.controller.identity)
        for request in (SetPaused(number=0, paused=True), Quit(number=0)):
            with pytest.raises(RefusedError, match="Only the owner"):
                await controller.request(request)
        await owner.request(SetPaused(number=0, paused=True))
        await fleet.until_state("pc-1", "paused")
        prepare = PrepareStage(number=0, deployment=OTHER_DEPLOYMENT, manifest=load_manifest(shards), stage=0)
        with pytest.raises(RefusedError, match="paused by its owner"):
            await controller.request(prepare)
        await controller.close()
        await owner.close()

        await fleet.stop_agent("pc-1")
        await fleet.until_state("pc-1", "lost")
        fleet.start_agent("pc-1")
        await fleet.until_state("pc-1", "paused")
        owner = await fleet.connect("pc-1", load_or_create_identity(fleet.folder / "pc-1"))
        await owner.request(SetPaused(number=0, paused=False))
        await fleet.until_ready("pc-1")
        await owner.request(Quit(number=0))
        await fleet.until_agent_ends("pc-1")
        await owner.close()

    run(test)


def test_requests_out_of_order_are_refused_in_words(run: Callable[..., None], shards: Path) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.start_agent("pc-1", fleet.controller.create_token(1, 3600))
        await fleet.until_ready("pc-1")
        client = await fleet.connect("pc-1", fleet.controller.identity)
        manifest = load_manifest(shards)
        start = StartStage(
            number=0, deployment=OTHER_DEPLOYMENT, stage=0, device="CPU", kv_precision="f16", allowed_keys=()
        )
        with pytest.raises(RefusedError, match="has not arrived"):
            await client.request(start)
        peer = PeerAddress("pc-2", ("127.0.0.1",), 1, fleet.controller.identity.public_key)
        with pytest.raises(RefusedError, match="beside stage 0"):
            await client.request(StartGateway(number=0, deployment=OTHER_DEPLOYMENT, stages=(peer,), allowed_keys=()))
        with pytest.raises(RefusedError, match="has 2 stages"):
            await client.request(PrepareStage(number=0, deployment=OTHER_DEPLOYMENT, manifest=manifest, stage=7))
        await client.request(Undeploy(number=0, deployment=OTHER_DEPLOYMENT))
        # Nobody serves it: it waits, may be asked for again, and can be given up.
        prepare = PrepareStage(number=0, deployment=OTHER_DEPLOYMENT, manifest=manifest, stage=0)
        await client.request(prepare)
        await client.request(prepare)
        reply = await until_beat(client, lambda reply: bool(reply.status.stages))
        assert [stage.state for stage in reply.status.stages] == ["receiving"]
        with pytest.raises(RefusedError, match="has not arrived"):
            await client.request(start)
        await client.request(Undeploy(number=0, deployment=OTHER_DEPLOYMENT))
        await until_beat(client, lambda reply: not reply.status.stages)
        await client.close()

    run(test)


def test_a_controller_that_leaves_is_forgotten_with_all_it_started(run: Callable[..., None], shards: Path) -> None:
    async def test(fleet: Fleet) -> None:
        nodes = await fleet.two_agents()
        deployment = await fleet.controller.deploy(shards, placement_on(nodes, shards), kv_precision="f16")
        await fleet.until_deployment(deployment, "ready")
        client = await fleet.connect("pc-2", fleet.controller.identity)
        owner = await fleet.connect("pc-2", load_or_create_identity(fleet.folder / "pc-2"))
        await client.request(Leave(number=0))
        await until_beat(owner, lambda reply: not reply.status.stages)
        assert fleet.controller.identity.public_key not in TrustStore(fleet.folder / "pc-2").controllers()
        await client.close()
        with pytest.raises(EnrolmentError):
            await fleet.connect("pc-2", fleet.controller.identity)
        await owner.close()

    run(test)


def test_a_flood_of_deployments_ends_at_a_limit_that_heartbeats_can_report(
    run: Callable[..., None], shards: Path
) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.start_agent("pc-1", fleet.controller.create_token(1, 3600))
        await fleet.until_ready("pc-1")
        client = await fleet.connect("pc-1", fleet.controller.identity)
        prepare = PrepareStage(number=0, deployment=OTHER_DEPLOYMENT, manifest=load_manifest(shards), stage=0)
        for number in range(MAX_STAGES):
            await client.request(msgspec.structs.replace(prepare, deployment=f"{number:012x}"))
        with pytest.raises(RefusedError, match="that is the limit"):
            await client.request(prepare)
        await until_beat(client, lambda reply: len(reply.status.stages) == MAX_STAGES)
        await client.request(Undeploy(number=0, deployment="0" * 12))
        await until_beat(client, lambda reply: len(reply.status.stages) == MAX_STAGES - 1)
        await client.request(prepare)
        await client.close()

    run(test)


def test_strangers_are_not_let_in(run: Callable[..., None]) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.start_agent("pc-1", fleet.controller.create_token(1, 3600))
        await fleet.until_ready("pc-1")
        with pytest.raises(EnrolmentError, match="does not trust"):
            await fleet.connect("pc-1", Identity.generate())

    run(test)
