"""The console command. Each subcommand imports its part of Paceline only when it runs."""

from __future__ import annotations

import sys

import typer

from paceline import (
    agent_command,
    app_command,
    bench_command,
    chat_command,
    demo_command,
    fleet_commands,
    placement_commands,
    serve_command,
    shard_commands,
)
from paceline.command import DataDirOption, DebugOption, apply_common_options, report, write_any_character

app = typer.Typer(
    name="paceline",
    help="Turns the Intel AI PCs on a LAN into one machine that serves a language model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def common(data_dir: DataDirOption = None, debug: DebugOption = False) -> None:
    """Options before the subcommand hold for it as well."""
    apply_common_options(data_dir, debug)


for module in (
    demo_command,
    app_command,
    agent_command,
    fleet_commands,
    shard_commands,
    placement_commands,
    serve_command,
    chat_command,
    bench_command,
):
    module.register(app)


def main() -> None:
    """Run the command line."""
    write_any_character()
    try:
        app()
    except (Exception, KeyboardInterrupt) as error:  # whatever it is, a person reads one sentence
        sys.exit(report(error))


if __name__ == "__main__":
    main()
