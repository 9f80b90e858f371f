"""``paceline serve``: local agents and a gateway for a shard folder, no window."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.command import command


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @command(app, "serve")
    def serve(
        folder: Annotated[Path, typer.Argument(metavar="DIR", help="A shard folder.")],
        agents: Annotated[
            int | None,
            typer.Option("--agents", metavar="N", min=1, max=64, help="How many agents; by default one per stage."),
        ] = None,
        port: Annotated[
            int,
            typer.Option(
                "--port", metavar="P", min=0, max=65535, help="Port of the OpenAI-compatible API; 0: a free one."
            ),
        ] = 0,
        kv_precision: Annotated[
            Literal["f32", "f16", "bf16", "u8"] | None,
            typer.Option("--kv-precision", metavar="P", help="f32, f16, bf16 or u8; else the manifest's."),
        ] = None,
    ) -> None:
        """Serve a shard folder from this PC until Ctrl-C, for any OpenAI client."""
        from paceline.serve import run_serve

        run_serve(folder, agents, port, kv_precision)
