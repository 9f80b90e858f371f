"""The demo in the control panel."""

from __future__ import annotations

from app.run import run_app
from paceline.demo import agent_names, bring_up
from paceline.local_fleet import CONTROLLER, local_fleet


def run_window(count: int) -> int:
    """Open the control panel on the demo's fleet, with the chat once it is ready; the exit code."""
    with local_fleet(agent_names(count)) as (folder, agents):
        return run_app(
            folder / CONTROLLER,
            background=lambda controller, tell: bring_up(controller, agents, folder, count, tell),
            page_afterwards="chat",
        )
