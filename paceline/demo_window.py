"""The demo in the control panel, page by page as an admin would go."""

from __future__ import annotations

import asyncio

from app.background import WindowGuide
from app.run import run_app
from fleet.controller import FleetController
from paceline.demo import SHARDS, Step, agent_names, bring_up
from paceline.local_fleet import CONTROLLER, local_fleet

_LOOK_S = 3.0
"""How long the placement is shown before the shards are sent."""


def run_window(count: int) -> int:
    """Open the control panel on the demo's fleet, with the chat once it is ready; the exit code."""
    with local_fleet(agent_names(count)) as (folder, agents):

        async def work(controller: FleetController, guide: WindowGuide) -> None:
            async def on_step(step: Step) -> None:
                match step:
                    case "placed":
                        guide.open_model(folder / SHARDS)
                        guide.show_page("placement")
                        await asyncio.sleep(_LOOK_S)
                    case "sending":
                        guide.show_page("deploy")
                    case "ready":
                        guide.show_page("chat")

            await bring_up(controller, agents, folder, count, guide.tell, on_step)

        return run_app(folder / CONTROLLER, background=work)
