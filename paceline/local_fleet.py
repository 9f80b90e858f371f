"""What the demo and ``paceline serve`` share: a fleet of agents on this PC, for as long as the command runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fleet.controller import FleetController
from fleet.enrolment import create_token
from fleet.errors import UnreachableError
from fleet.identity import load_or_create_identity
from fleet.placement import Placement
from fleet.views import FleetView
from paceline.deploying import ready_nodes
from paceline.local_agents import LocalAgents
from paceline.temporary import temporary_folder
from paceline.terminal import printable

CONTROLLER = "controller"
"""Data folder of the local fleet's controller, in the fleet's folder."""

_TOKEN_LIFETIME_S = 3600
_FIND_S = 60.0

Tell = Callable[[str], None]


@contextlib.contextmanager
def local_fleet(names: Sequence[str], compiled_folder: Path | None = None) -> Iterator[tuple[Path, LocalAgents]]:
    """A temporary folder and agents in it, enrolled with the controller whose data folder is ``CONTROLLER`` in it.

    ``compiled_folder`` is where the agents look for shards that were compiled beforehand.
    """
    with temporary_folder() as folder:
        identity = load_or_create_identity(folder / CONTROLLER)
        token = create_token(folder / CONTROLLER, identity, len(names), _TOKEN_LIFETIME_S)
        with LocalAgents(folder, names, token, compiled_folder=compiled_folder) as agents:
            yield folder, agents


async def find_agents(controller: FleetController, agents: LocalAgents, count: int, tell: Tell) -> None:
    told: set[str] = set()

    def all_ready(view: FleetView) -> bool:
        nodes = ready_nodes(view)
        for node in nodes:
            if node.name not in told:
                told.add(node.name)
                devices = ", ".join(device.device for device in node.inventory.devices) if node.inventory else ""
                tell(f"found {node.name} at {node.addresses[0]} ({devices})")
        agents.check()
        return len(nodes) >= count

    tell(f"looking for {count} agents on the LAN")
    try:
        await controller.wait_for(all_ready, _FIND_S)
    except TimeoutError:
        seen = ", ".join(f"{node.name} is {node.state}: {node.detail}" for node in controller.view.nodes)
        raise UnreachableError(
            f"Only {len(ready_nodes(controller.view))} of {count} agents were found within {_FIND_S:.0f} s "
            f"({seen or 'none was seen at all'}). Check that a firewall lets UDP port 5353 through."
        ) from None


def tell_placement(placement: Placement, tell: Tell) -> None:
    """The placement, a line per stage."""
    for stage in placement.stages:
        tell(
            f"placement: layers {stage.first_layer} to {stage.end_layer - 1} on {stage.node_name} "
            f"({stage.needed_bytes / 1e6:,.0f} of {stage.budget_bytes / 1e6:,.0f} MB)"
        )


def tell_on_stderr(text: str) -> None:
    """A line of progress."""
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201
