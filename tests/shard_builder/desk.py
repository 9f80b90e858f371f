"""Runs ``paceline shard`` where everything that it may write to is in sight."""

from __future__ import annotations

from pathlib import Path

import typer
from click.testing import Result
from typer.testing import CliRunner

from paceline import shard_commands


class Desk:
    """A folder with all that a command may write to: what it gives out, its data, and temporary files."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        app = typer.Typer()
        shard_commands.register(app)
        self._app = app

    def run(self, *words: object) -> Result:
        return CliRunner().invoke(self._app, ["shard", *map(str, words)])

    def contents(self) -> set[Path]:
        return set(self.folder.rglob("*"))

    def refused(self, *words: object) -> str:
        """The one sentence of a command that must fail and leave everything as it was."""
        before = self.contents()
        result = self.run(*words)
        assert result.exit_code == 1, result.output
        assert result.stdout == ""
        check_sentence(result.stderr)
        assert self.contents() == before
        return result.stderr

    def build_refused(self, model: Path, *options: object) -> str:
        """That of a build of the model in two stages into a folder whose parents are not there yet."""
        stages = options or ("--stages", 2)
        return self.refused("build", model, "-o", self.folder / "new" / "parents" / "shards", *stages)


def check_sentence(text: str) -> None:
    assert text.count("\n") == 1
    assert text.endswith(".\n")
    assert "unexpected fault" not in text
    assert "Traceback" not in text
