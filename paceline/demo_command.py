"""``paceline demo``: two agents on this PC, the small model cut over them, and a chat."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.command import command
from paceline.parsing import not_empty


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @command(app, "demo")
    def demo(
        headless: Annotated[bool, typer.Option("--headless", help="In the terminal, without the window.")] = False,
        agents: Annotated[int, typer.Option("--agents", metavar="N", min=1, max=8, help="How many agents.")] = 2,
        prompt: Annotated[
            str | None,
            typer.Option(
                "--prompt",
                metavar="TEXT",
                callback=not_empty,
                help="Answer this in the terminal, on standard output, and end.",
            ),
        ] = None,
    ) -> None:
        """Show the whole way on this PC: agents, placement, shards, chat."""
        from app.display import missing_for_display
        from paceline.demo import run_headless
        from paceline.local_fleet import tell_on_stderr
        from paceline.small_model import small_model_path

        small_model_path()  # where it is missing, that is said before anything is started
        if not headless and prompt is None:
            missing = missing_for_display()
            if missing is None:
                from paceline.demo_window import run_window

                raise typer.Exit(run_window(agents))
            tell_on_stderr(f"{missing} The demo goes on in the terminal.")
        run_headless(agents, prompt)
