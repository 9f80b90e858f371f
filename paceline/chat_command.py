"""``paceline chat``: chat with what the fleet serves."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.command import command
from paceline.parsing import not_empty


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @command(app, "chat")
    def chat(
        prompt: Annotated[
            str | None,
            typer.Option(
                "--prompt", metavar="TEXT", callback=not_empty, help="Answer this and end; else type line by line."
            ),
        ] = None,
    ) -> None:
        """Chat with the model that the fleet serves; /new starts afresh, /quit ends."""
        from fleet.controller import FleetController
        from fleet.gateway_client import GatewayClient
        from paceline.terminal_chat import answer_prompt, converse, typed_lines
        from paceline.with_controller import ready_deployment, run_with_controller

        async def talk(controller: FleetController) -> None:
            deployment = await ready_deployment(controller)
            async with GatewayClient(controller.identity, controller.gateway_address(deployment.id)) as client:
                if prompt is not None:
                    await answer_prompt(client, prompt)
                else:
                    await converse(client, typed_lines())

        run_with_controller(talk)
