"""``paceline shard``: JSON alone on standard output, faults in one sentence, wrong usage exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from fleet.data_dir import HOME_VARIABLE
from paceline import shard_commands
from tests.shard_builder import broken_caches

Writer = Callable[..., Path]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Runs ``paceline shard`` with the given words in this process."""
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    app = typer.Typer()
    shard_commands.register(app)

    def invoke(*words: object) -> Result:
        return CliRunner().invoke(app, ["shard", *map(str, words)])

    return invoke


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_build_inspect_and_verify_speak_json(run: Callable[..., Result], tiny_model: Writer, tmp_path: Path) -> None:
    model, shards = tiny_model(), tmp_path / "shards"
    built = document(run("build", model, "-o", shards, "--cuts", "1,2", "--json"))
    assert built == document(run("inspect", shards, "--json"))
    assert {"architecture", "hidden_size", "layers", "stages", "verification"} <= set(built)
    assert set(built["layers"][0]) >= {"index", "bytes", "kv_bytes_per_token"}
    assert [(stage["first_layer"], stage["end_layer"]) for stage in built["stages"]] == [(0, 1), (1, 2), (2, 3)]
    assert set(built["stages"][0]) >= {"stage", "first_layer", "end_layer", "bytes", "files"}
    assert set(built["stages"][0]["files"][0]) == {"name", "bytes", "sha256"}
    assert built["verification"]["max_abs_diff"] == 0.0
    uncut = document(run("inspect", model, "--json"))
    assert (uncut["stages"], uncut["layers"]) == ([], built["layers"])
    check = document(run("verify", shards, "--device", "CPU", "--kv-precision", "f32", "--json"))
    assert (check["max_abs_diff"], check["greedy_match"]) == (0.0, 1.0)
    assert check["fused_attention"] == [{"stage": stage, "fused": 1, "expected": 1} for stage in range(3)]


def test_what_keeps_attention_from_fusing_is_named(
    run: Callable[..., Result], tiny_model: Writer, tmp_path: Path
) -> None:
    model, shards = tiny_model(layers=2), tmp_path / "shards"
    caches = broken_caches.Caches(ov.Core().read_model(model / "openvino_model.xml"))
    broken_caches.changed_before_attention(caches)
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in model.iterdir():
        if path.stem != "openvino_model":
            (changed / path.name).write_bytes(path.read_bytes())
    ov.serialize(caches.model, changed / "openvino_model.xml", changed / "openvino_model.bin")
    built = document(run("build", changed, "-o", shards, "--stages", 2, "--json"))
    faults = [stage["fusion_faults"] for stage in built["stages"]]
    assert [[fault["rule"] for fault in found] for found in faults] == [["only-repeat-before-attention"], []]
    assert [stage["fused_attention"]["fused"] for stage in built["stages"]] == [0, 1]
    assert not any("no reason that its graph shows" in note for note in built["notes"])
    assert built["paged"]["served"] is False
    assert built["paged"]["reason"] == (
        "Stage 0 (layer 0): OpenVINO does not make a paged form of it: its pass TotalSequenceLengthPattern fails at a "
        "Gather."
    )
    check = run("verify", shards, "--sample").stdout
    assert faults[0][0]["node"] in check
    assert "may not be served with paged attention" in check


def test_tables_for_people(run: Callable[..., Result], tiny_model: Writer, tmp_path: Path) -> None:
    model, shards = tiny_model(), tmp_path / "shards"
    assert "1 of 1" in run("build", model, "-o", shards, "--stages", 3).stdout
    assert "Not cut yet" in run("inspect", model, "--kv-precision", "f32").stdout
    assert "largest difference" in run("verify", shards).stdout


def test_how_much_is_checked_is_chosen_and_said(run: Callable[..., Result], tiny_model: Writer, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    document(run("build", tiny_model(), "-o", shards, "--stages", 2, "--check", "none", "--json"))
    inspected = run("inspect", shards, "--json")
    assert document(inspected)["verification"] is None
    assert inspected.stderr.count("have not been checked against the whole model") == 1
    reference = tmp_path / "reference"
    assert "a sample" in run("verify", shards, "--sample", "--reference", reference).stdout
    inspected = run("inspect", shards, "--json")
    assert (document(inspected)["verification"]["sampled"], inspected.stderr) == (True, "")
    assert run("build", "model", "-o", shards, "--stages", 2, "--sample", "--check", "none").exit_code == 2
    for logits in reference.glob("logits-*.npy"):
        np.save(logits, np.load(logits) + 1)
    wrong = run("verify", shards, "--sample", "--reference", reference, "--json")
    assert (wrong.exit_code, json.loads(wrong.stdout)["max_abs_diff"]) == (1, pytest.approx(1, abs=1e-4))
    assert "give other logits than the whole model (largest difference 1, in the case" in wrong.stderr


def test_faults_are_one_sentence(run: Callable[..., Result], tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model()
    for words, message in [
        (("build", tmp_path / "nowhere", "-o", tmp_path / "shards", "--stages", 2), "There is no model at"),
        (("build", model, "-o", tmp_path / "shards", "--stages", 9), "has 3 layers"),
        (("build", model, "-o", tmp_path / "shards", "--cuts", "2,1", "--json"), "must rise"),
        (("inspect", tmp_path / "nowhere"), "There is no model at"),
        (("verify", model), "is not a shard folder"),
    ]:
        result = run(*words)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert message in result.stderr.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "words",
    [
        ("build", "model"),
        ("build", "model", "-o", "shards"),
        ("build", "model", "-o", "shards", "--stages", "2", "--cuts", "1"),
        ("build", "model", "-o", "shards", "--cuts", "one"),
        ("build", "model", "-o", "shards", "--stages", "0"),
        ("verify", "shards", "--kv-precision", "f8"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_2(run: Callable[..., Result], words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 2
