"""``paceline shard diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.command import command


def register(shard: typer.Typer) -> None:
    """Add the subcommand."""

    @command(shard, "diff")
    def diff(
        a: Annotated[Path, typer.Argument(metavar="A", help="A shard folder, or the manifest of one.")],
        b: Annotated[Path, typer.Argument(metavar="B", help="The one to compare it with.")],
        json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    ) -> None:
        """Compare two cuts: layers, weights and findings, and what the nodes of A would fetch to serve B."""
        from paceline.difference_tables import show_difference
        from shard_builder import diff as diff_shards

        show_difference(diff_shards(a, b), json)
