"""Serves a shard folder with agents of this PC."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fleet.compiled_shards import COMPILED_FOLDER
from fleet.controller import FleetController
from fleet.errors import PlacementError
from fleet.manifest import KvPrecision, load_manifest
from fleet.placement import DEFAULT_CONTEXT_TOKENS, DEFAULT_USERS
from paceline.deploying import Demand, choose_placement, deploy_and_wait
from paceline.local_fleet import CONTROLLER, find_agents, local_fleet, tell_on_stderr, tell_placement
from paceline.unchecked import tell_if_unchecked
from paceline.with_controller import run_with_controller

_CHECK_S = 1.0


def run_serve(folder: Path, agents_wanted: int | None, http_port: int, kv_precision: KvPrecision | None) -> None:
    """Serve until Ctrl-C.

    Raises:
        PacelineError: the folder is no shard folder, or the pipeline did not start.
    """
    manifest = load_manifest(folder)
    tell_if_unchecked(folder, manifest)
    count = agents_wanted or len(manifest.stages)
    if count < len(manifest.stages):
        raise PlacementError(
            f"{folder} has {len(manifest.stages)} stages and needs as many agents; --agents {count} is too few."
        )

    demand = Demand(DEFAULT_CONTEXT_TOKENS, DEFAULT_USERS, kv_precision or manifest.kv_precision)
    names = [f"serve-{number}" for number in range(1, count + 1)]
    with local_fleet(names, folder / COMPILED_FOLDER) as (work, agents):

        async def serve(controller: FleetController) -> None:
            await find_agents(controller, agents, count, tell_on_stderr)
            placement = choose_placement(manifest, controller.placement_nodes(), demand)
            tell_placement(placement, tell_on_stderr)
            deployment = await deploy_and_wait(
                controller, folder, placement, demand.kv_precision, tell_on_stderr, http_port
            )
            print(f"http://127.0.0.1:{deployment.http_port}/v1", flush=True)  # noqa: T201
            tell_on_stderr(f"{deployment.model} is served at this address; Ctrl-C ends it.")
            while True:
                await asyncio.sleep(_CHECK_S)
                agents.check()

        run_with_controller(serve, work / CONTROLLER)
