"""``paceline fleet token`` and ``paceline nodes``: who may join, and who is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.command import command, print_json

if TYPE_CHECKING:
    from fleet.views import FleetView, NodeView

_DAY_S = 86_400
_MOST_USES = 100_000
_LONGEST_S = 3650 * _DAY_S


def register(app: typer.Typer) -> None:
    """Add the subcommands."""
    fleet = typer.Typer(help="Who may join the fleet.", no_args_is_help=True)
    app.add_typer(fleet, name="fleet")

    @command(fleet, "token")
    def token(
        uses: Annotated[
            int, typer.Option("--uses", metavar="N", min=1, max=_MOST_USES, help="How many PCs may join with it.")
        ] = 1,
        expires: Annotated[
            int,
            typer.Option(
                "--expires", metavar="S", min=1, max=_LONGEST_S, help="Seconds after which it is worth nothing."
            ),
        ] = _DAY_S,
    ) -> None:
        """Print an enrolment token: an agent started with it joins the fleet of this data folder."""
        from fleet.data_dir import default_data_dir
        from fleet.enrolment import create_token
        from fleet.identity import load_or_create_identity

        data_dir = default_data_dir()
        print(create_token(data_dir, load_or_create_identity(data_dir), uses, expires))  # noqa: T201

    @command(app, "nodes")
    def nodes(
        wait: Annotated[
            float, typer.Option("--wait", metavar="S", min=0, max=3600, help="Seconds to listen for agents.")
        ] = 3.0,
        json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    ) -> None:
        """List the PCs that run an agent."""
        import asyncio

        import msgspec

        from fleet.controller import FleetController
        from paceline.with_controller import run_with_controller

        async def listen(controller: FleetController) -> FleetView:
            await asyncio.sleep(wait)
            return controller.view

        view = run_with_controller(listen)
        if json:
            print_json(msgspec.json.encode({"nodes": [node_document(node) for node in view.nodes]}))
        else:
            show_nodes(view)


def node_document(node: NodeView) -> dict[str, Any]:
    """The form in which ``paceline nodes --json`` gives a node; fields are null until the node has told them."""
    inventory, load = node.inventory, node.load
    return {
        "id": node.id,
        "name": node.name,
        "state": node.state,
        "detail": node.detail,
        "addresses": list(node.addresses),
        "cpu": None if inventory is None else inventory.cpu,
        "devices": [
            {
                "device": device.device,
                "name": device.name,
                "driver": device.driver,
                "memory_bytes": device.memory_bytes,
            }
            for device in (() if inventory is None else inventory.devices)
        ],
        "memory": {
            "total_bytes": None if inventory is None else inventory.memory_total_bytes,
            "free_bytes": None if load is None else load.memory_free_bytes,
            "budget_bytes": None if inventory is None else inventory.memory_budget_bytes,
        },
        "stages": [
            {
                "deployment": stage.deployment,
                "model": stage.model,
                "stage": stage.stage,
                "first_layer": stage.first_layer,
                "end_layer": stage.end_layer,
                "state": stage.state,
                "device": stage.device,
                "loaded": stage.loaded,
            }
            for stage in node.stages
        ],
    }


def show_nodes(view: FleetView) -> None:
    """A table of the nodes, whatever they call themselves."""
    from rich.table import Table

    from paceline.terminal import PlainConsole

    console = PlainConsole()
    if not view.nodes:
        console.print(
            "No agents were seen. Start one with 'paceline agent --enrol TOKEN' (a token: 'paceline fleet token'); on "
            "another PC, check that its firewall lets UDP port 5353 through."
        )
        return
    table = Table()
    for title in ("name", "state", "address", "cpu", "devices", "memory free / budget", "stages"):
        table.add_column(title)
    for node in view.nodes:
        inventory, load = node.inventory, node.load
        memory = (
            f"{load.memory_free_bytes / 1e9:.1f} / {inventory.memory_budget_bytes / 1e9:.1f} GB"
            if inventory is not None and load is not None
            else ""
        )
        table.add_row(
            node.name,
            f"{node.state}: {node.detail}" if node.detail else node.state,
            ", ".join(node.addresses),
            inventory.cpu if inventory is not None else "",
            ", ".join(device.device for device in inventory.devices) if inventory is not None else "",
            memory,
            ", ".join(
                f"{stage.model} {stage.first_layer}-{stage.end_layer - 1} {stage.state} ({stage.deployment})"
                for stage in node.stages
            ),
        )
    console.print(table)
