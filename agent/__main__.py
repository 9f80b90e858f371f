"""``python -m agent``: the service as a program of its own."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from agent.enrolment_option import given_token
from agent.service import run_agent
from fleet.data_dir import default_data_dir
from fleet.errors import PacelineError


def main(arguments: list[str] | None = None) -> int:
    """Run the agent and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agent", description="The Paceline agent of this PC.")
    parser.add_argument("--data-dir", type=Path, metavar="D", help="identity, trust and shards are kept here")
    parser.add_argument("--name", metavar="N", help="name in the fleet; by default the host's")
    parser.add_argument(
        "--enrol",
        metavar="TOKEN",
        help="join the fleet that made this token; - reads it from the first line of standard input",
    )
    parser.add_argument("--memory", type=int, metavar="BYTES", help="the most that stages may use")
    parser.add_argument("--compiled", type=Path, metavar="DIR", help="shards compiled beforehand may lie there")
    parser.add_argument("--tray", action="store_true", help="show an icon that tells what the PC does")
    parser.add_argument("--stop-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--debug", action="store_true", help="log more")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.debug else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        run_agent(
            options.data_dir or default_data_dir(),
            name=options.name,
            enrolment_token=given_token(options.enrol),
            memory_budget_bytes=options.memory,
            tray=options.tray,
            stop_with_stdin=options.stop_with_stdin,
            compiled_folder=options.compiled,
        )
    except PacelineError as error:
        if options.debug:
            raise
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
