"""A layer is the same bytes wherever the model is cut: what one cut's nodes hold serves any other cut.

The bytes are compared here, so the shards are built unchecked.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.manifest import RUN_ALIGNMENT_BYTES, Manifest, Run, load_manifest
from shard_builder import build, diff, inspect
from tests.shard_builder.conftest import TinyDecoder

SMALL_BYTES = 4096
"""What a cut brings in are single numbers and shapes."""
TRAITS: list[dict[str, Any]] = [
    {},
    {"tied": False},
    {"gather": False, "initialised": False},
    {"hidden_type": "f16"},
    {"tied": False, "hidden_type": "f16", "gather": False},
    {"per_layer_inputs": True},
    {"shared_cache": True, "tied": False},
]


class Cuts:
    """Models and cuts of them, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def model(self, traits: dict[str, Any], layers: int) -> Path:
        folder = self._folder / f"{TRAITS.index(traits)}-{layers}"
        return folder if folder.is_dir() else TinyDecoder(layers=layers, **traits).write(folder)

    def cut(self, model: Path, cuts: tuple[int, ...]) -> Path:
        shards = self._folder / "-".join([model.name, "at", *map(str, cuts)])
        if not shards.is_dir():
            build(model, shards, cuts=cuts, check="none")
        return shards


@pytest.fixture(scope="module")
def tiny_cuts(tmp_path_factory: pytest.TempPathFactory) -> Cuts:
    return Cuts(tmp_path_factory.mktemp("cuts"))


def held_runs(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """Every run that the weight files of a folder hold, by the hash of its bytes there."""
    held = {}
    for stage in manifest.stages:
        content = (folder / stage.weights.name).read_bytes()
        end = 0
        for place in stage.runs:
            assert place.offset % RUN_ALIGNMENT_BYTES == 0
            assert not any(content[end : place.offset]), "between runs there is padding alone"
            end = place.offset + manifest.run(place.sha256).bytes
            held[place.sha256] = content[place.offset : end]
            assert hashlib.sha256(held[place.sha256]).hexdigest() == place.sha256
        assert end == len(content) == stage.bytes
    return held


def runs_of_model(manifest: Manifest) -> set[Run]:
    return {run for run in manifest.runs if run.kind != "cut"}


def put_together(manifest: Manifest, stage: int, runs: dict[str, bytes]) -> bytes:
    """A stage's weight file, from runs."""
    parts = manifest.stages[stage]
    content = bytearray(parts.bytes)
    for place in parts.runs:
        content[place.offset : place.offset + len(runs[place.sha256])] = runs[place.sha256]
    return bytes(content)


def check_shared(one: Path, other: Path) -> None:
    """Two cuts are of one model, and each is made of what the other holds and the small runs of its own."""
    manifests = {folder: load_manifest(folder) for folder in (one, other)}
    assert manifests[one].model_id == manifests[other].model_id
    assert manifests[one].layers == manifests[other].layers
    assert runs_of_model(manifests[one]) == runs_of_model(manifests[other])
    held = {folder: held_runs(folder, manifest) for folder, manifest in manifests.items()}
    for source, goal in ((one, other), (other, one)):
        manifest = manifests[goal]
        own = {run.sha256: held[goal][run.sha256] for run in manifest.runs if run.kind == "cut"}
        assert all(len(content) < SMALL_BYTES for content in own.values())
        for number, stage in enumerate(manifest.stages):
            content = put_together(manifest, number, held[source] | own)
            assert hashlib.sha256(content).hexdigest() == stage.weights.sha256
            assert content == (goal / stage.weights.name).read_bytes()
        check_told(source, goal, manifests)


def check_told(source: Path, goal: Path, manifests: dict[Path, Manifest]) -> None:
    """``diff`` and ``inspect`` say what was just seen."""
    found = diff(source, goal)
    assert found.same_model
    assert found.same_weights
    assert found.changed_layers == ()
    assert {run.kind for run in found.runs if run.held_by != "both"} <= {"cut"}
    stages = manifests[goal].stages
    assert found.fetch_bytes_with_all <= sum(stage.graph.bytes + SMALL_BYTES for stage in stages)
    shared = inspect(goal).shared_weights
    assert shared.bytes == sum(run.bytes for run in runs_of_model(manifests[goal]))
    assert shared.cut_bytes == sum(run.bytes for run in manifests[goal].runs if run.kind == "cut")


@st.composite
def models_and_cuts(draw: st.DrawFn) -> tuple[dict[str, Any], int, tuple[int, ...], tuple[int, ...]]:
    layers = draw(st.integers(2, 5))
    places = st.sets(st.integers(1, layers - 1)).map(sorted).map(tuple)
    return draw(st.sampled_from(TRAITS)), layers, draw(places), draw(places)


@given(models_and_cuts())
@settings(max_examples=30)
def test_two_cuts_of_a_model_share_every_layer(
    tiny_cuts: Cuts, drawn: tuple[dict[str, Any], int, tuple[int, ...], tuple[int, ...]]
) -> None:
    traits, layers, one, other = drawn
    model = tiny_cuts.model(traits, layers)
    check_shared(tiny_cuts.cut(model, one), tiny_cuts.cut(model, other))


def test_two_cuts_of_the_small_model_share_every_layer(
    smollm2_gguf: Path, smollm2_two_stages: Path, converted_models: Path, tmp_path: Path
) -> None:
    build(smollm2_gguf, tmp_path / "other", cuts=[4, 15, 22], check="none", work_folder=converted_models)
    check_shared(smollm2_two_stages, tmp_path / "other")
    found = diff(smollm2_two_stages, tmp_path / "other")
    assert [(stage.gained_layers, stage.lost_layers) for stage in found.stages] == [
        ((), tuple(range(4, 15))),
        (tuple(range(4, 15)), tuple(range(15, 30))),
        (tuple(range(15, 22)), ()),
        (tuple(range(22, 30)), ()),
    ]
    assert inspect(tmp_path / "other").shared_weights.share > 0.9999


def test_every_model_has_layers_of_its_own(tiny_cuts: Cuts) -> None:
    folders = [tiny_cuts.cut(tiny_cuts.model(traits, 3), (1,)) for traits in TRAITS]
    for one, other in itertools.combinations(folders, 2):
        assert not diff(one, other).same_model
