"""``paceline app``: the control panel."""

from __future__ import annotations

import typer

from paceline.command import command


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @command(app, "app")
    def control_panel() -> None:
        """Open the control panel: the fleet, placement, deployment, and chat."""
        from app.display import DisplayError, require_display
        from app.run import run_app
        from fleet.data_dir import default_data_dir

        try:
            require_display()
        except DisplayError as error:
            raise DisplayError(
                f"{error} In a terminal, 'paceline nodes', 'plan', 'deploy' and 'chat' do the same."
            ) from None
        raise typer.Exit(run_app(default_data_dir()))
