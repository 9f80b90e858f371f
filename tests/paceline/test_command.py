"""Faults are told in one sentence; the common options hold everywhere."""

import os
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from fleet.data_dir import HOME_VARIABLE
from fleet.errors import ModelError
from paceline.command import command


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setenv(HOME_VARIABLE, "/nowhere")
    made = typer.Typer()

    @command(made, "show")
    def show(word: Annotated[str, typer.Option("--word")] = "") -> None:
        print(word, os.environ[HOME_VARIABLE])

    @command(made, "fail")
    def fail(kind: Annotated[str, typer.Argument()]) -> None:
        raise ModelError("The model is torn.") if kind == "known" else RuntimeError("inside")

    return made


def test_the_data_folder_of_a_subcommand_holds_for_it_and_its_children(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["show", "--word", "a", "--data-dir", str(tmp_path)])
    assert result.stdout.split() == ["a", str(tmp_path)]


def test_a_known_fault_is_its_sentence_and_exit_code_1(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["fail", "known"])
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "The model is torn.\n")


def test_an_unknown_fault_is_one_line_without_a_traceback(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["fail", "unknown"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "RuntimeError: inside" in result.stderr


def test_wrong_usage_is_exit_code_2(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, ["show", "--wrong"]).exit_code == 2
    assert CliRunner().invoke(app, ["fail"]).exit_code == 2


def test_a_file_as_data_folder_is_refused(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    result = CliRunner().invoke(app, ["show", "--data-dir", str(file)])
    assert result.exit_code == 1
    assert "is a file" in result.stderr
