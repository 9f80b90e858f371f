"""``paceline shard compile``, and a stage's process that imports what it made."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.compiled_shards import COMPILED_FOLDER
from fleet.data_dir import HOME_VARIABLE
from fleet.identity import Identity
from fleet.manifest import load_manifest
from fleet.process import StageConfig
from paceline.__main__ import app
from pipeline.local import ChildProcess

DEADLINE_S = 120.0


@pytest.fixture
def shards(smollm2_two_stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    return Path(shutil.copytree(smollm2_two_stages, tmp_path / "shards", copy_function=os.link))


def loaded(shards: Path, stage: int) -> str:
    """What the process of a stage says of how it loaded its shard."""
    identity = Identity.generate()
    config = StageConfig(
        node_name="pc",
        shard_folder=str(shards),
        stage=stage,
        device="CPU",
        kv_precision=load_manifest(shards).kv_precision,
        secret_key=identity.secret_key,
        public_key=identity.public_key,
        allowed_keys=(),
        bind_address="127.0.0.1",
        threads=1,
    )
    process = ChildProcess("pipeline.stage", "The stage", config)
    try:
        return process.wait_until_ready(time.monotonic() + DEADLINE_S).loaded
    finally:
        process.stop(time.monotonic() + 10)


def test_a_stage_imports_what_was_compiled_beforehand(shards: Path) -> None:
    words = ["shard", "compile", str(shards), "--device", "CPU", "--stage", "1"]
    first = CliRunner().invoke(app, [*words, "--json"])
    assert first.exit_code == 0, first.stderr
    (stage,) = json.loads(first.stdout)["stages"]
    assert (stage["stage"], stage["outcome"]) == (1, "compiled")
    record = stage["record"]
    parts = load_manifest(shards).stages[1]
    assert record["made_from"]["graph_sha256"] == parts.graph.sha256
    assert record["made_from"]["weights_sha256"] == parts.weights.sha256
    assert record["runtime_requirements"].startswith("meta=")
    assert (Path(stage["folder"]) / record["blob"]["name"]).stat().st_size == record["blob"]["bytes"]
    again = CliRunner().invoke(app, words)
    assert "stage 1: compiled already; " in again.stdout
    assert record["runtime_requirements"] in again.stdout
    assert loaded(shards, 1) == "imported the compiled shard"
    assert loaded(shards, 0).startswith("compiled here: no shard was compiled")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--device", "TOASTER"), "The compilation of stage 0 cannot start: The device TOASTER does not take stage 0"),
        (("--device", "CPU", "--stage", "2"), "there is no stage 2"),
    ],
    ids=["device", "stage"],
)
def test_faults_are_one_sentence_and_leave_nothing(shards: Path, words: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(app, ["shard", "compile", str(shards), *words])
    assert (result.exit_code, result.stdout) == (1, "")
    assert sentence in result.stderr
    assert [path.name for path in (shards / COMPILED_FOLDER).glob("[!f]*")] == []
