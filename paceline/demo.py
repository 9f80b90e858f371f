"""The demo: agents on this PC are found, enrolled and sent the small model's shards, and then it chats."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from fleet.build_messages import BuildProgress
from fleet.controller import FleetController
from fleet.gateway_client import GatewayClient
from fleet.manifest import Manifest
from fleet.placement import DEFAULT_CONTEXT_TOKENS, DEFAULT_USERS
from fleet.views import DeploymentView
from paceline.build_shards import PHASE_WORDS, build_shards
from paceline.deploying import Demand, choose_placement, deploy_and_wait
from paceline.local_agents import LocalAgents
from paceline.local_fleet import CONTROLLER, Tell, find_agents, local_fleet, tell_on_stderr, tell_placement
from paceline.small_model import small_model_path
from paceline.terminal_chat import answer_prompt, converse, typed_lines
from paceline.with_controller import run_with_controller

SHARDS = "shards"
"""The shard folder, in the demo's folder."""

Step = Literal["placed", "sending", "ready"]


def agent_names(count: int) -> list[str]:
    """Names of the demo's agents."""
    return [f"demo-pc-{number}" for number in range(1, count + 1)]


async def bring_up(
    controller: FleetController,
    agents: LocalAgents,
    folder: Path,
    count: int,
    tell: Tell,
    on_step: Callable[[Step], Awaitable[None]] | None = None,
) -> DeploymentView:
    """The deployment of the small model over ``count`` agents, ready to chat. ``on_step`` is awaited at each step.

    Raises:
        PacelineError: an agent ended or was not found, or building, sending or starting the shards failed.
    """
    cancelled = threading.Event()
    build = asyncio.create_task(_build(folder, count, tell, cancelled))
    try:
        await find_agents(controller, agents, count, tell)
        manifest = await build
    except BaseException:
        cancelled.set()
        await asyncio.gather(build, return_exceptions=True)
        raise
    demand = Demand(DEFAULT_CONTEXT_TOKENS, DEFAULT_USERS, manifest.kv_precision)
    placement = choose_placement(manifest, controller.placement_nodes(), demand)
    tell_placement(placement, tell)
    step = on_step or _take_no_notice
    await step("placed")
    await step("sending")
    deployment = await deploy_and_wait(controller, folder / SHARDS, placement, manifest.kv_precision, tell)
    await step("ready")
    return deployment


async def _take_no_notice(step: Step) -> None:
    pass


async def _build(folder: Path, count: int, tell: Tell, cancelled: threading.Event) -> Manifest:
    phases: set[str] = set()

    def on_progress(progress: BuildProgress) -> None:
        if progress.phase not in phases:
            phases.add(progress.phase)
            tell(PHASE_WORDS[progress.phase])

    return await asyncio.to_thread(
        build_shards,
        small_model_path(),
        folder / SHARDS,
        stages=count,
        work_folder=folder / "model",
        on_progress=on_progress,
        cancelled=cancelled,
    )


def run_headless(count: int, prompt: str | None) -> None:
    """The demo in the terminal: progress on standard error, answers on standard output."""
    with local_fleet(agent_names(count)) as (folder, agents):
        run_with_controller(lambda controller: _chat(controller, agents, folder, count, prompt), folder / CONTROLLER)


async def _chat(controller: FleetController, agents: LocalAgents, folder: Path, count: int, prompt: str | None) -> None:
    deployment = await bring_up(controller, agents, folder, count, tell_on_stderr)
    async with GatewayClient(controller.identity, controller.gateway_address(deployment.id)) as client:
        if prompt is not None:
            await answer_prompt(client, prompt)
            return
        tell_on_stderr(
            f"{deployment.model} answers over {count} agents; OpenAI clients reach it at "
            f"http://127.0.0.1:{deployment.http_port}/v1. Ask something; /new starts afresh, /quit ends."
        )
        await converse(client, typed_lines())
