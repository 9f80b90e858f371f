"""Run a coroutine with a fleet controller, for subcommands that look at the fleet or change it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from fleet.controller import FleetController
from fleet.data_dir import default_data_dir
from fleet.errors import UnreachableError
from fleet.views import DeploymentView, FleetView
from paceline.temporary import uninterrupted

Result = TypeVar("Result")

_SEARCH_S = 10.0


def run_with_controller(work: Callable[[FleetController], Awaitable[Result]], data_dir: Path | None = None) -> Result:
    """The result of ``work``, with a controller of the data folder's identity, closed afterwards."""

    async def run() -> Result:
        controller = FleetController(data_dir or default_data_dir(), socket.gethostname())
        await controller.start()
        try:
            return await work(controller)
        finally:
            with uninterrupted():
                await controller.close()

    # The selector loop is the one that ZeroMQ's sockets work with on Windows too.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        return runner.run(run())


async def ready_deployment(controller: FleetController) -> DeploymentView:
    """The deployment that answers, once it has been seen.

    Raises:
        UnreachableError: none was seen in time; the text says what was seen instead.
    """

    def some_ready(view: FleetView) -> bool:
        return any(deployment.state == "ready" for deployment in view.deployments)

    try:
        await controller.wait_for(some_ready, _SEARCH_S)
    except TimeoutError:
        seen = ", ".join(f"{one.model} is {one.state}" for one in controller.view.deployments)
        reachable = sum(node.state == "ready" for node in controller.view.nodes)
        raise UnreachableError(
            f"Nothing answers after {_SEARCH_S:.0f} s: {seen or 'no model is deployed'} "
            f"({reachable} nodes ready). Deploy one with 'paceline deploy' or in the control panel."
        ) from None
    return next(deployment for deployment in controller.view.deployments if deployment.state == "ready")
