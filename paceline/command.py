"""What every subcommand shares: ``--data-dir`` and ``--debug``, and faults told in one sentence."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fleet.data_dir import HOME_VARIABLE
from fleet.errors import PacelineError
from paceline.parsing import parse_folder

Function = TypeVar("Function", bound=Callable[..., None])

DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="D",
        parser=parse_folder,
        help=f"Folder for identity, trusted keys and shards (or {HOME_VARIABLE}).",
        show_default=False,
    ),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Log what happens, and show tracebacks.")]


class _Debug:
    enabled = False


def apply_common_options(data_dir: Path | None, debug: bool) -> None:
    """Make the options hold for this process and, through the environment, for the processes that it starts."""
    if data_dir is not None:
        if data_dir.exists() and not data_dir.is_dir():
            raise PacelineError(f"The data folder {data_dir} is a file; name a folder with --data-dir.")
        os.environ[HOME_VARIABLE] = str(data_dir.resolve())
    if debug:
        _Debug.enabled = True
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if _Debug.enabled else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def write_any_character() -> None:
    """Let output go on where the terminal's encoding lacks a character, as that of a pipe on Windows does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def report(error: BaseException) -> int:
    """Tell a fault on standard error and return the exit code that goes with it."""
    if isinstance(error, PacelineError):
        sentence, code = str(error), 1
    elif isinstance(error, KeyboardInterrupt):
        sentence, code = "Stopped.", 130
    else:
        sentence, code = (
            f"An unexpected fault ({type(error).__name__}: {error}). Run it again with --debug to see where.",
            1,
        )
    if _Debug.enabled:
        logging.getLogger("paceline").error("the traceback of the fault", exc_info=error)
    from paceline.terminal import printable

    print(printable(sentence), file=sys.stderr)  # noqa: T201
    return code


def command(app: typer.Typer, name: str) -> Callable[[Function], Function]:
    """Register a subcommand that also takes ``--data-dir`` and ``--debug`` and never ends in a bare traceback."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def run(*arguments: Any, data_dir: Path | None = None, debug: bool = False, **options: Any) -> None:
            try:
                apply_common_options(data_dir, debug)
                function(*arguments, **options)
            except (typer.Exit, typer.Abort, typer.BadParameter):
                raise
            except (Exception, KeyboardInterrupt) as error:
                raise typer.Exit(report(error)) from None

        # Typer reads types from the signature; annotations that are strings are resolved in the function's module.
        signature = inspect.signature(function, eval_str=True)
        common = [
            inspect.Parameter("data_dir", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=DataDirOption),
            inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugOption),
        ]
        parameters = [*signature.parameters.values(), *common]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": None}
        app.command(name)(run)
        return function

    return register


def print_json(document: bytes) -> None:
    """Write one JSON document, and nothing else, on standard output."""
    sys.stdout.flush()
    sys.stdout.buffer.write(document + b"\n")  # JSON is UTF-8 (RFC 8259), whatever the terminal's encoding is
    sys.stdout.buffer.flush()
