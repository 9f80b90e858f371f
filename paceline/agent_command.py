"""``paceline agent``: the service on a PC."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from paceline.command import command
from paceline.parsing import parse_bytes


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @command(app, "agent")
    def agent(
        name: Annotated[
            str | None, typer.Option("--name", metavar="N", help="Name in the fleet; by default the host's.")
        ] = None,
        enrol: Annotated[
            str | None,
            typer.Option(
                "--enrol", metavar="TOKEN", help="Join the fleet that made this token; - reads it from standard input."
            ),
        ] = None,
        memory: Annotated[
            str | None,
            typer.Option("--memory", metavar="BYTES", help="The most that stages may use, such as 8GB."),
        ] = None,
        tray: Annotated[bool, typer.Option("--tray", help="Show an icon that tells what the PC does.")] = False,
    ) -> None:
        """Run the agent: announce this PC, receive shards, run pipeline stages."""
        from agent.enrolment_option import given_token
        from agent.service import run_agent
        from fleet.data_dir import default_data_dir

        run_agent(
            default_data_dir(),
            name=name or socket.gethostname(),
            enrolment_token=given_token(enrol),
            memory_budget_bytes=None if memory is None else parse_bytes(memory),
            tray=tray,
        )
