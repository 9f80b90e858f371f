"""The benchmarks of shards run, and the memory that a manifest predicts is what stages take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.memory_group import WHOLE, can_make_groups, run_in_group
from benchmarks.shard_memory import measure
from benchmarks.shard_speed import CHAIN, compare, make_runners
from benchmarks.shard_speed import WHOLE as WHOLE_MODEL
from fleet.manifest import load_manifest
from fleet.memory_need import stage_memory
from shard_builder.sources.ways_in import open_source

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells own memory from mapped files")
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def whole_model(smollm2_gguf: Path, converted_models: Path) -> Path:
    return open_source(smollm2_gguf, converted_models).folder


@linux_only
def test_stages_take_the_memory_that_the_manifest_predicts(smollm2_two_stages: Path) -> None:
    for figures in measure(smollm2_two_stages, 64, 8, 2, exact=False):
        assert abs(figures.error) < TOLERANCE, figures


@pytest.mark.skipif(not can_make_groups(), reason="this user may not make memory groups (cgroup v1) here")
def test_every_shard_answers_in_a_group_in_which_the_whole_model_is_killed(
    whole_model: Path, smollm2_two_stages: Path
) -> None:
    manifest = load_manifest(smollm2_two_stages)
    largest = max(stage_memory(manifest, stage, 72, chunk_tokens=64).anonymous_bytes for stage in manifest.stages)
    limit_bytes = round(largest * (1 + TOLERANCE))
    endings = [
        run_in_group(whole_model, smollm2_two_stages, stage, limit_bytes, 64, 4, 2).ending for stage in (0, 1, WHOLE)
    ]
    assert endings == ["answered", "answered", "killed"]


def test_the_models_of_a_comparison_take_turns(whole_model: Path, smollm2_two_stages: Path) -> None:
    runners = make_runners(whole_model, smollm2_two_stages)
    figures = compare({name: runners[name] for name in (WHOLE_MODEL, CHAIN)}, context_tokens=8, rounds=2, steps=2)
    assert len(figures.chain_ratios) == len(figures.whole_tokens_per_second) == 2
    assert min(figures.chain_ratios) > 0
    assert figures.no_gather_ratios == ()
