"""The controller against agents that play a part: real mDNS, real sockets, no child processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import zmq.asyncio

from fleet.control import ControlServer
from fleet.control_messages import (
    ControlReply,
    ControlRequest,
    Done,
    GatewayStatus,
    Heartbeat,
    HeartbeatReply,
    Hello,
    NodeStatus,
    PrepareStage,
    StageStatus,
    StartGateway,
    StartStage,
    Undeploy,
    Welcome,
)
from fleet.controller import FleetController
from fleet.controller_thread import ControllerThread
from fleet.discovery import Announcer
from fleet.enrolment import Token, parse_token, proof
from fleet.errors import DeployError, PlacementError
from fleet.identity import Identity
from fleet.manifest import FileEntry, Layer, Manifest, Run, RunPlace, Stage, encode_manifest
from fleet.node import Inventory, LiveLoad
from fleet.placement import Placement, PlannedStage
from fleet.views import DeploymentView, FleetView, NodeView
from fleet.zap import AllowList, start_zap

DEADLINE_S = 20.0
INVENTORY = Inventory("a CPU", 2, "Linux", "2026.4", "0.1", 16 << 30, 12 << 30, 100 << 30, ())
HASH = "0" * 64


class PlayedAgent:
    """An agent without a store and without children: a stage is there when it is asked for."""

    def __init__(self, name: str, token: Token, identity: Identity | None = None) -> None:
        self.name = name
        self.identity = identity or Identity.generate()
        self.token = token
        self.secret = token.secret
        self.status = NodeStatus(load=LiveLoad(1.0, 8 << 30, 8 << 30), paused=False, stages=(), gateways=())
        self.requests: list[ControlRequest] = []
        self.asked = asyncio.Event()
        self.refuse: str | None = None
        self.inventory = INVENTORY

    async def start(self) -> None:
        self.context = zmq.asyncio.Context()
        self.allow_list = AllowList([self.token.controller_key])
        self.zap = start_zap(self.context, self.allow_list)
        self.server = ControlServer(self.context, self.identity, self.allow_list, self.answer)
        self.port = self.server.start("0.0.0.0")
        self.announcer = Announcer(self.identity, self.name, self.port, self.token.controller_key)
        await self.announcer.start()

    async def close(self) -> None:
        await self.announcer.close()
        await self.server.close()
        self.zap.close()
        self.context.destroy(0)

    async def answer(self, request: ControlRequest, sender: str) -> ControlReply:
        if not isinstance(request, Heartbeat):
            self.requests.append(request)
            self.asked.set()
        match request:
            case Hello():
                return Welcome(
                    number=0,
                    protocol=1,
                    name=self.name,
                    inventory=self.inventory,
                    transfer_port=1,
                    token_id=self.token.token_id,
                    token_proof=proof(self.secret, self.identity.public_key, sender, request.nonce),
                )
            case Heartbeat():
                return HeartbeatReply(number=0, status=self.status)
            case PrepareStage():
                if self.refuse is not None:
                    raise DeployError(self.refuse)
                self.show(
                    StageStatus(
                        deployment=request.deployment, model="m", stage=request.stage, first_layer=0, end_layer=1,
                        state="received",
                    )
                )  # fmt: skip
            case StartStage():
                self.show(msgspec.structs.replace(self.status.stages[0], state="ready", port=1000 + request.stage))
            case StartGateway():
                gateway = GatewayStatus(deployment=request.deployment, model="m", state="ready", port=2000, stages=2)
                self.status = msgspec.structs.replace(self.status, gateways=(gateway,))
            case Undeploy():
                self.status = msgspec.structs.replace(self.status, stages=(), gateways=())
        return Done(number=0)

    async def until_asked(self, request_type: type[Undeploy]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not any(isinstance(request, request_type) for request in self.requests):
                self.asked.clear()
                await self.asked.wait()

    def show(self, stage: StageStatus) -> None:
        self.status = msgspec.structs.replace(self.status, stages=(stage,))

    def find(self, view: FleetView) -> NodeView | None:
        return next((node for node in view.nodes if node.id == self.identity.node_id), None)


class Bench:
    """A controller and the agents of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.controller = FleetController(folder / "controller", "desk")
        self.agents: list[PlayedAgent] = []

    def token(self, uses: int = 4, expires_s: float = 3600) -> Token:
        return parse_token(self.controller.create_token(uses, expires_s))

    async def add(self, agent: PlayedAgent) -> PlayedAgent:
        await agent.start()
        self.agents.append(agent)
        return agent

    async def until_node(self, agent: PlayedAgent, state: str) -> NodeView:
        def wanted(view: FleetView) -> bool:
            node = agent.find(view)
            return node is not None and node.state == state

        node = agent.find(await self.controller.wait_for(wanted, DEADLINE_S))
        assert node is not None
        return node

    async def until_deployment(self, deployment: str, state: str) -> DeploymentView:
        def find(view: FleetView) -> DeploymentView | None:
            return next((one for one in view.deployments if one.id == deployment and one.state == state), None)

        found = find(await self.controller.wait_for(lambda view: find(view) is not None, DEADLINE_S))
        assert found is not None
        return found

    async def two_ready_agents(self) -> list[PlayedAgent]:
        token = self.token()
        agents = [PlayedAgent(f"played-{number}", token) for number in (1, 2)]
        await asyncio.gather(*(self.add(agent) for agent in agents))
        for agent in agents:
            await self.until_node(agent, "ready")
        return agents


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Bench]:
    bench = Bench(folder)
    await bench.controller.start()
    try:
        yield bench
    finally:
        await bench.controller.close()
        await asyncio.gather(*(agent.close() for agent in bench.agents))


def run(folder: Path, test: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        async with opened(folder) as bench:
            await test(bench)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


def shard_folder(folder: Path) -> tuple[Path, Manifest]:
    folder.mkdir()
    stages = tuple(
        Stage(
            number, number, number + 1, 10, FileEntry(f"{number}.xml", 10, HASH), FileEntry(f"{number}.bin", 10, HASH),
            (RunPlace(HASH, 0),), ("input_ids",),
        )
        for number in (0, 1)
    )  # fmt: skip
    manifest = Manifest(
        1, "id", "Model", "fake", 8, 16, 128, "f16", tuple(Layer(index, 10, 4, 8) for index in (0, 1)),
        (Run(HASH, 10, "layer", 0),), stages, (), (2,),
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    return folder, manifest


def placement_on(agents: list[PlayedAgent], model_id: str = "id") -> Placement:
    stages = tuple(
        PlannedStage(number, agent.identity.node_id, agent.name, "CPU", number, number + 1, 10, 1, 1, 1000)
        for number, agent in enumerate(agents)
    )
    return Placement(model_id, 128, 1, stages)


def test_an_agent_with_a_token_joins_and_tells_of_itself(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        agent = await bench.add(PlayedAgent("played-1", bench.token()))
        node = await bench.until_node(agent, "ready")
        assert node.name == "played-1"
        assert node.inventory == INVENTORY
        assert node.load == agent.status.load
        assert node.addresses
        mine = [node for node in bench.controller.placement_nodes() if node.id == agent.identity.node_id]
        assert [(node.device, node.budget_bytes) for node in mine] == [("CPU", 8 << 30)]
        agent.status = msgspec.structs.replace(agent.status, paused=True)
        node = await bench.until_node(agent, "paused")
        assert all(node.id != agent.identity.node_id for node in bench.controller.placement_nodes())

    run(tmp_path, test)


def test_a_joined_agent_is_known_to_the_next_controller_of_the_same_folder(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as bench:
            token = bench.token(uses=1)
            agent = await bench.add(PlayedAgent("played-1", token))
            await bench.until_node(agent, "ready")
            other = FleetController(tmp_path / "controller", "second")
            # A wrong proof does not matter any more: the node's key is trusted.
            agent.secret = b"wrong"
            await other.start()
            try:
                await other.wait_for(
                    lambda view: (node := agent.find(view)) is not None and node.state == "ready", DEADLINE_S
                )
            finally:
                await other.close()
            bench.controller.forget(agent.identity.node_id)
            assert agent.find(bench.controller.view) is None

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(main())


def test_wrong_and_expired_and_used_up_tokens_are_refused_in_words(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        wrong = PlayedAgent("wrong", bench.token())
        wrong.secret = b"guessed"
        unknown = PlayedAgent("unknown", Token(bench.controller.identity.public_key, "00" * 8, b"x" * 16, 2**40))
        once = bench.token(uses=1)
        first, second = PlayedAgent("first", once), PlayedAgent("second", once)
        expired = PlayedAgent("expired", bench.token(expires_s=0.001))
        await bench.add(first)
        await bench.until_node(first, "ready")
        await asyncio.gather(*(bench.add(agent) for agent in (wrong, unknown, second, expired)))
        for agent, reason in ((wrong, "prove"), (unknown, "not known"), (second, "used up"), (expired, "expired")):
            node = await bench.until_node(agent, "refused")
            assert reason in node.detail
            assert not any(isinstance(request, Heartbeat) for request in agent.requests)

    run(tmp_path, test)


def test_foreign_and_unenrolled_agents_are_shown_and_left_alone(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        stranger = Identity.generate()
        foreign = await bench.add(PlayedAgent("foreign", Token(stranger.public_key, "00" * 8, b"x" * 16, 2**40)))
        node = await bench.until_node(foreign, "foreign")
        assert "another controller" in node.detail
        assert foreign.requests == []
        # One that claims to be ours and does not let us in.
        liar = PlayedAgent("liar", Token(stranger.public_key, "00" * 8, b"x" * 16, 2**40))
        await bench.add(liar)
        await liar.announcer.set_fleet(bench.controller.identity.public_key)
        node = await bench.until_node(liar, "refused")
        assert "does not trust this controller" in node.detail

    run(tmp_path, test)


def test_a_lost_agent_is_not_ready_and_what_it_said_is_gone(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        agent = await bench.add(PlayedAgent("played-1", bench.token()))
        await bench.until_node(agent, "ready")
        await agent.server.close()
        node = await bench.until_node(agent, "lost")
        assert node.load is None
        assert node.inventory == INVENTORY

    run(tmp_path, test)


def test_an_impostor_that_announces_a_nodes_key_elsewhere_does_not_hide_it(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        agent = PlayedAgent("played", bench.token())
        answering = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = answering.sockets[0].getsockname()[1]
        impostor = Announcer(agent.identity, "impostor", port, agent.token.controller_key, ["127.0.0.1"])
        await impostor.start()
        try:
            await bench.controller.wait_for(lambda view: agent.find(view) is not None, DEADLINE_S)
            await bench.add(agent)
            await bench.until_node(agent, "ready")
            # The latest word is the impostor's, and the node's own record is taken back in its name.
            await impostor.set_fleet("")
            await agent.announcer.close()
            await agent.server.close()
            await bench.until_node(agent, "lost")
            agent.server = ControlServer(agent.context, agent.identity, agent.allow_list, agent.answer)
            agent.server.start("0.0.0.0", agent.port)
            await bench.until_node(agent, "ready")
        finally:
            await impostor.close()
            answering.close()
            await answering.wait_closed()

    run(tmp_path, test)


def test_a_new_inventory_is_fetched(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        agent = await bench.add(PlayedAgent("played-1", bench.token()))
        await bench.until_node(agent, "ready")
        agent.inventory = msgspec.structs.replace(INVENTORY, cpu="another CPU")
        agent.status = msgspec.structs.replace(agent.status, inventory_number=1)
        await bench.controller.wait_for(
            lambda view: (
                (node := agent.find(view)) is not None
                and node.inventory is not None
                and node.inventory.cpu == "another CPU"
            ),
            DEADLINE_S,
        )

    run(tmp_path, test)


def test_a_deployment_becomes_ready_is_seen_by_another_controller_and_undeployed_by_it(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        agents = await bench.two_ready_agents()
        folder, _ = shard_folder(tmp_path / "shards")
        deployment = await bench.controller.deploy(folder, placement_on(agents), kv_precision="f32", exact=True)
        view = await bench.until_deployment(deployment, "ready")
        assert [stage.node_name for stage in view.stages] == ["played-1", "played-2"]
        address = bench.controller.gateway_address(deployment)
        assert (address.port, address.public_key) == (2000, agents[0].identity.public_key)

        first, second = (agent.identity.public_key for agent in agents)
        starts = [request for agent in agents for request in agent.requests if isinstance(request, StartStage)]
        assert [set(start.allowed_keys) for start in starts] == [{first}, {first}]
        assert all(start.exact and start.kv_precision == "f32" for start in starts)
        (gateway,) = [request for request in agents[0].requests if isinstance(request, StartGateway)]
        assert [stage.port for stage in gateway.stages] == [1000, 1001]
        assert [stage.public_key for stage in gateway.stages] == [first, second]
        assert bench.controller.identity.public_key in gateway.allowed_keys
        assert not any(isinstance(request, StartGateway) for request in agents[1].requests)

        other = FleetController(tmp_path / "controller", "second")
        await other.start()
        try:
            await other.wait_for(
                lambda view: any(one.id == deployment and one.state == "ready" for one in view.deployments),
                DEADLINE_S,
            )
            assert other.gateway_address(deployment) == address
            await other.undeploy(deployment)
            assert all(agent.status.stages == () for agent in agents)
            with pytest.raises(DeployError, match="no deployment"):
                await other.undeploy("0123456789ab")
        finally:
            await other.close()

    run(tmp_path, test)


def test_a_refusal_fails_the_deployment_everywhere_and_names_the_node(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        agents = await bench.two_ready_agents()
        agents[1].refuse = "stage 1 needs 10 MB, and 5 MB are left."
        folder, _ = shard_folder(tmp_path / "shards")
        deployment = await bench.controller.deploy(folder, placement_on(agents), kv_precision="f16")
        view = await bench.until_deployment(deployment, "failed")
        assert view.detail == "played-2: stage 1 needs 10 MB, and 5 MB are left."
        for agent in agents:
            await agent.until_asked(Undeploy)
        assert agents[0].status.stages == ()

    run(tmp_path, test)


def test_cancel_takes_it_off_all_nodes(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        agents = await bench.two_ready_agents()
        folder, _ = shard_folder(tmp_path / "shards")
        deployment = await bench.controller.deploy(folder, placement_on(agents), kv_precision="f16")
        await bench.until_deployment(deployment, "ready")
        await bench.controller.cancel(deployment)
        await bench.until_deployment(deployment, "cancelled")
        assert all(agent.status.stages == () and agent.status.gateways == () for agent in agents)
        with pytest.raises(DeployError, match="cancelled"):
            bench.controller.gateway_address(deployment)

    run(tmp_path, test)


def test_what_cannot_be_deployed_is_refused_at_once(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        folder, _ = shard_folder(tmp_path / "shards")
        token = bench.token()
        nobody = [PlayedAgent("nobody", token), PlayedAgent("nobody", token)]
        with pytest.raises(DeployError, match="nobody does not answer"):
            await bench.controller.deploy(folder, placement_on(nobody), kv_precision="f16")
        with pytest.raises(PlacementError, match="another model"):
            await bench.controller.deploy(folder, placement_on(nobody, "other"), kv_precision="f16")
        with pytest.raises(PlacementError, match="another cut"):
            await bench.controller.deploy(folder, placement_on(nobody[:1]), kv_precision="f16")

    run(tmp_path, test)


def test_wait_for_raises_what_its_predicate_raises(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        def broken(view: FleetView) -> bool:
            raise DeployError("an agent ended")

        with pytest.raises(DeployError, match="an agent ended"):
            await bench.controller.wait_for(broken, 5.0)
        with pytest.raises(TimeoutError):
            await bench.controller.wait_for(lambda view: False, 0.05)

    run(tmp_path, test)


def test_the_controller_in_a_thread(tmp_path: Path) -> None:
    views: list[FleetView] = []
    thread = ControllerThread(tmp_path, "desk", views.append)
    controller = thread.start().result(DEADLINE_S)
    try:
        assert thread.controller is controller

        async def token() -> str:
            return controller.create_token(1, 60)

        assert parse_token(thread.call(token()).result(DEADLINE_S)).controller_key == controller.identity.public_key
    finally:
        thread.close()
    thread.close()


def test_a_thread_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "trust.json").write_bytes(b"{")
    thread = ControllerThread(tmp_path, "desk")
    with pytest.raises(Exception, match="damaged"):
        thread.start().result(DEADLINE_S)
    thread.close()
