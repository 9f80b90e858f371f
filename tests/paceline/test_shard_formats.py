"""``paceline shard formats``, and the options of ``paceline shard build`` that choose the weights' format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
import typer
from click.testing import Result
from openvino import opset13
from typer.testing import CliRunner

from fleet.build_messages import WeightChoice
from paceline import shard_commands
from paceline.shard_formats_command import weight_choice


@pytest.fixture
def run() -> Callable[..., Result]:
    """Runs ``paceline shard`` with the given words in this process."""
    app = typer.Typer()
    shard_commands.register(app)
    return lambda *words: CliRunner().invoke(app, ["shard", *map(str, words)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A linear layer of 256 by 512 in f32, as an IR."""
    tokens = opset13.parameter([-1, 512], np.float32, "x")
    weight = opset13.constant(np.ones((256, 512), np.float32))
    graph = ov.Model([opset13.matmul(tokens, weight, False, True)], [tokens], "layer")
    ov.serialize(graph, tmp_path / "openvino_model.xml")
    return tmp_path


def test_formats_are_shown_before_any_is_made(run: Callable[..., Result], model: Path) -> None:
    result = run("formats", model, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["parameters"] == 256 * 512
    assert [(cost["words"], cost["bytes"]) for cost in found["formats"]][:3] == [
        ("as it is", 4 * 256 * 512),
        ("fp16", 2 * 256 * 512),
        ("int8", 256 * 512 + 3 * 256),
    ]
    table = run("formats", model).stdout
    assert "int4, symmetric, groups of 128" in table
    assert "CPU, GPU" in table
    assert sorted(path.name for path in model.iterdir()) == ["openvino_model.bin", "openvino_model.xml"]


def test_faults_are_one_sentence(run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("formats", tmp_path / "nowhere")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "There is no model at" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--weight-format", "int4", "--for", "NPU"),
        ("--group-size", "128"),
        ("--weight-format", "int8", "--symmetric"),
        ("--weight-format", "int4", "--group-size", "7"),
        ("--weight-format", "int2"),
        ("--for", "TPU"),
    ],
)
def test_contradicting_options_are_wrong_usage(run: Callable[..., Result], tmp_path: Path, options: list[str]) -> None:
    result = run("build", tmp_path, "-o", tmp_path / "shards", "--stages", "2", *options)
    assert (result.exit_code, result.stdout) == (2, "")


def test_what_the_options_choose() -> None:
    assert weight_choice(None, None, False, "NPU") is None
    assert weight_choice("int4", None, False, None) == WeightChoice("int4", group_size=128)
    assert weight_choice("int4", -1, True, None) == WeightChoice("int4", group_size=-1, symmetric=True)
