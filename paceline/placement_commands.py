"""``paceline plan``, ``deploy`` and ``undeploy``: which node runs which layers, and running them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fleet.errors import PlacementError
from fleet.placement import DEFAULT_CONTEXT_TOKENS, DEFAULT_USERS
from paceline.command import command, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleet.controller import FleetController
    from fleet.placement import Placement, PlacementNode
    from fleet.views import DeploymentView

_SEARCH_S = 5.0

ContextOption = Annotated[
    int, typer.Option("--context", metavar="N", min=1, max=100_000_000, help="Tokens that each user's chat may hold.")
]
UsersOption = Annotated[
    int,
    typer.Option("--users", metavar="N", min=1, max=100_000, help="How many chats of that length there is memory for."),
]


def register(app: typer.Typer) -> None:
    """Add the subcommands."""
    _register_plan(app)
    _register_deploy(app)
    _register_undeploy(app)


def _register_plan(app: typer.Typer) -> None:
    @command(app, "plan")
    def plan(
        model: Annotated[Path, typer.Argument(metavar="DIR_OR_MODEL", help="A shard folder, or a model not yet cut.")],
        context: ContextOption = DEFAULT_CONTEXT_TOKENS,
        users: UsersOption = DEFAULT_USERS,
        json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    ) -> None:
        """Propose which layers go to which of the nodes that are there; a shard folder's own cut comes first."""
        import msgspec

        from fleet.placement import plan as make_plan
        from paceline.deploying import Demand, choose_placement, rebuild_sentence
        from paceline.model_facts import model_facts
        from paceline.unchecked import tell_if_unchecked
        from paceline.with_controller import run_with_controller

        facts = model_facts(model)
        tell_if_unchecked(model, facts)
        demand = Demand(context, users, facts.kv_precision)

        async def propose(controller: FleetController) -> Placement:
            nodes = await _nodes_that_are_there(controller)
            if facts.stages:
                try:
                    return choose_placement(facts, nodes, demand)
                except PlacementError as error:
                    placement = make_plan(facts, nodes, context, users)  # says what is missing where nothing fits
                    _tell_progress(f"The shards as they are cut do not fit: {error} {rebuild_sentence(placement)}")
                    return placement
            return make_plan(facts, nodes, context, users)

        placement = run_with_controller(propose)
        if json:
            print_json(msgspec.json.encode(_document(placement)))
        else:
            _show(placement)


def _register_deploy(app: typer.Typer) -> None:
    @command(app, "deploy")
    def deploy(
        folder: Annotated[Path, typer.Argument(metavar="DIR", help="A shard folder.")],
        plan: Annotated[
            Path | None, typer.Option("--plan", metavar="FILE", help="A placement that 'paceline plan --json' gave.")
        ] = None,
        nodes: Annotated[
            str | None, typer.Option("--nodes", metavar="A,B", help="Names or ids of the nodes, stage by stage.")
        ] = None,
        kv_precision: Annotated[
            Literal["f32", "f16", "bf16", "u8"] | None,
            typer.Option("--kv-precision", metavar="P", help="f32, f16, bf16 or u8; else the manifest's."),
        ] = None,
        context: ContextOption = DEFAULT_CONTEXT_TOKENS,
        users: UsersOption = DEFAULT_USERS,
        json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    ) -> None:
        """Send the shards to the nodes and start them; ends when the pipeline answers."""
        import msgspec

        from fleet.manifest import load_manifest
        from paceline.deploying import Demand, choose_placement, deploy_and_wait, read_plan
        from paceline.terminal import printable
        from paceline.unchecked import tell_if_unchecked
        from paceline.with_controller import run_with_controller

        if plan is not None and nodes is not None:
            raise typer.BadParameter("--plan says which nodes; leave out --nodes.")
        if plan is not None and (context, users) != (DEFAULT_CONTEXT_TOKENS, DEFAULT_USERS):
            raise typer.BadParameter("--plan says for how long a context and how many users; leave out both options.")
        manifest = load_manifest(folder)
        tell_if_unchecked(folder, manifest)
        demand = Demand(context, users, kv_precision or manifest.kv_precision)

        async def run(controller: FleetController) -> DeploymentView:
            there = await _nodes_that_are_there(controller)
            if plan is not None:
                placement = read_plan(plan, manifest, there, demand.kv_precision)
            else:
                placement = choose_placement(manifest, there, demand, nodes)
            return await deploy_and_wait(controller, folder, placement, demand.kv_precision, _tell_progress)

        deployment = run_with_controller(run)
        if json:
            print_json(msgspec.json.encode(deployment))
        else:
            print(printable(f"{deployment.model} is ready as {deployment.id}."))  # noqa: T201


def _register_undeploy(app: typer.Typer) -> None:
    @command(app, "undeploy")
    def undeploy(
        deployment: Annotated[str, typer.Argument(metavar="ID", help="As 'paceline deploy' printed it.")],
    ) -> None:
        """Stop a deployment on all its nodes; the shards stay in their stores."""
        from paceline.deploying import stop_everywhere
        from paceline.with_controller import run_with_controller

        run_with_controller(lambda controller: stop_everywhere(controller, deployment, _tell_progress))


async def _nodes_that_are_there(controller: FleetController) -> Sequence[PlacementNode]:
    """The nodes that answer after listening for as long as a fleet needs to be found."""
    import asyncio

    await asyncio.sleep(_SEARCH_S)
    nodes = controller.placement_nodes()
    if not nodes:
        others = ", ".join(f"{node.name} is {node.state}" for node in controller.view.nodes)
        raise PlacementError(
            f"No enrolled node answers after {_SEARCH_S:.0f} s ({others or 'none was seen at all'}). "
            "See 'paceline nodes'; a PC joins with 'paceline agent --enrol TOKEN'."
        )
    return nodes


def _tell_progress(text: str) -> None:
    from paceline.terminal import printable

    print(printable(text), file=sys.stderr)  # noqa: T201


def _document(placement: Placement) -> dict[str, object]:
    import msgspec

    document: dict[str, object] = msgspec.to_builtins(placement)
    return document


def _show(placement: Placement) -> None:
    from rich.table import Table

    from paceline.terminal import PlainConsole

    table = Table(title=f"{placement.context_tokens} tokens of context, {placement.users} users")
    for title in ("stage", "node", "device", "layers", "weights", "KV cache", "run time", "budget"):
        table.add_column(title, justify="left" if title in {"node", "device"} else "right")
    for stage in placement.stages:
        table.add_row(
            str(stage.stage),
            stage.node_name,
            stage.device,
            f"{stage.first_layer} to {stage.end_layer - 1}",
            *(
                f"{value / 1e6:,.0f} MB"
                for value in (stage.weight_bytes, stage.kv_bytes, stage.runtime_bytes, stage.budget_bytes)
            ),
        )
    console = PlainConsole()
    console.print(table)
    for left_out in placement.left_out:
        console.print(f"{left_out.node_name} is left out: {left_out.reason}")
