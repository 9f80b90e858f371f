"""What is known of a model before it is cut holds for every cut of it."""

from pathlib import Path

from fleet.manifest import load_manifest
from fleet.memory_need import ModelNeed, stage_memory
from shard_builder.uncut import describe_uncut


def test_an_uncut_model_has_the_identity_and_layers_of_its_shards(
    smollm2_gguf: Path, smollm2_two_stages: Path, tmp_path: Path
) -> None:
    uncut = describe_uncut(smollm2_gguf, work_folder=tmp_path)
    cut = load_manifest(smollm2_two_stages)
    assert uncut.stages == ()
    assert uncut.model_id == cut.model_id
    assert uncut.layers == cut.layers
    assert {run.sha256: run for run in uncut.runs} == {run.sha256: run for run in cut.runs if run.kind != "cut"}
    assert uncut.step_bytes_per_token == cut.step_bytes_per_token > 0
    need = ModelNeed(uncut, 100, 1)
    for stage in cut.stages:
        assert need.memory(stage.first_layer, stage.end_layer) == stage_memory(cut, stage, 100)
