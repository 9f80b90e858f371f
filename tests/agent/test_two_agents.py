"""The whole way on one PC: two agent processes, real mDNS, a real model, real stage and gateway processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fleet.controller import FleetController
from fleet.errors import UnreachableError
from fleet.gateway_client import GatewayClient
from fleet.gateway_messages import ChatMessage, Delta, Failed, Generate
from fleet.identity import Identity
from fleet.manifest import load_manifest
from fleet.node import PeerAddress
from fleet.placement import placement_for_cuts
from fleet.sockets import pick_address
from fleet.views import DeploymentView, FleetView

DEADLINE_S = 120.0
NAMES = ("two-agents-1", "two-agents-2")


def start_agent(folder: Path, name: str, token: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "agent", "--data-dir", str(folder / name), "--name", name, "--enrol", token,
         "--stop-with-stdin"],
        stdin=subprocess.PIPE,
    )  # fmt: skip


def stage_process(agent: subprocess.Popen[bytes]) -> psutil.Process:
    (process,) = [child for child in psutil.Process(agent.pid).children() if "pipeline.stage" in child.cmdline()]
    return process


async def ask(client: GatewayClient, question: str) -> str:
    text = ""
    request = Generate(
        number=client.next_number(), messages=(ChatMessage(role="user", content=question),), max_tokens=16
    )
    async for message in client.generate(request):
        if isinstance(message, Delta):
            text += message.text
        assert not isinstance(message, Failed), message
    return text


def find(view: FleetView, deployment: str) -> DeploymentView | None:
    return next((one for one in view.deployments if one.id == deployment), None)


async def until(controller: FleetController, deployment: str, state: str, restarts: int = 0) -> DeploymentView:
    def wanted(view: FleetView) -> bool:
        found = find(view, deployment)
        if found is None:
            return False
        assert found.state not in ("failed", "cancelled"), found.detail
        counted = sum(stage.status.restarts for stage in found.stages if stage.status is not None)
        return found.state == state and counted >= restarts

    found = find(await controller.wait_for(wanted, DEADLINE_S), deployment)
    assert found is not None
    return found


@pytest.mark.timeout(400)
def test_two_agents_serve_a_model_and_survive_a_killed_stage(tmp_path: Path, smollm2_two_stages: Path) -> None:
    async def test() -> None:
        controller = FleetController(tmp_path / "controller", "desk")
        await controller.start()
        token = controller.create_token(2, 3600)
        agents = [start_agent(tmp_path, name, token) for name in NAMES]
        try:
            await controller.wait_for(
                lambda view: sum(node.name in NAMES and node.state == "ready" for node in view.nodes) == 2, DEADLINE_S
            )
            manifest = load_manifest(smollm2_two_stages)
            nodes = sorted(controller.placement_nodes(), key=lambda node: node.name)
            nodes = [node for node in nodes if node.name in NAMES]
            placement = placement_for_cuts(manifest, nodes, manifest.cuts)
            deployment = await controller.deploy(smollm2_two_stages, placement, kv_precision="f32", exact=True)
            view = await until(controller, deployment, "ready")
            assert [stage.node_name for stage in view.stages] == list(NAMES)

            address = controller.gateway_address(deployment)
            async with GatewayClient(controller.identity, address) as client:
                answer = await ask(client, "What is the capital of France?")
                assert "Paris" in answer
                first_pid = stage_process(agents[1]).pid
                stage_process(agents[1]).kill()
                restarted = await until(controller, deployment, "ready", restarts=1)
                assert stage_process(agents[1]).pid != first_pid
                ports = [[stage.status.port for stage in one.stages if stage.status] for one in (view, restarted)]
                assert ports[0] == ports[1]
                loaded = [[stage.status.loaded for stage in one.stages if stage.status] for one in (view, restarted)]
                assert all(words.endswith("; kept for the next start") for words in loaded[0])
                assert loaded[1] == [loaded[0][0], "imported the compiled shard"]
                assert await ask(client, "What is the capital of France?") == answer

            await strangers_are_refused(view, address)
            await controller.undeploy(deployment)
            await controller.wait_for(
                lambda view: not any(node.stages for node in view.nodes if node.name in NAMES), DEADLINE_S
            )
        finally:
            children = [child for agent in agents for child in psutil.Process(agent.pid).children(recursive=True)]
            for agent in agents:
                assert agent.stdin is not None
                agent.stdin.close()
            codes = [agent.wait(DEADLINE_S) for agent in agents]
            await controller.close()
        assert codes == [0, 0]
        assert not any(child.is_running() for child in children)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(test())


async def strangers_are_refused(view: DeploymentView, gateway: PeerAddress) -> None:
    """Someone without the fleet's keys reaches the port and nothing behind it."""
    assert await asyncio.to_thread(pick_address, gateway)
    with pytest.raises(UnreachableError, match="does not know this client's key"):
        async with GatewayClient(Identity.generate(), gateway, connect_timeout_s=5.0) as stranger:
            await stranger.status()
