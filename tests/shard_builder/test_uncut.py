"""What is known of a model before it is cut holds for every cut of it."""

from pathlib import Path

from fleet.manifest import load_manifest
from shard_builder.uncut import describe_uncut


def test_an_uncut_model_has_the_identity_and_layers_of_its_shards(
    smollm2_gguf: Path, smollm2_two_stages: Path, tmp_path: Path
) -> None:
    uncut = describe_uncut(smollm2_gguf, work_folder=tmp_path)
    cut = load_manifest(smollm2_two_stages)
    assert uncut.stages == ()
    assert uncut.model_id == cut.model_id
    assert uncut.layers == cut.layers
    assert {run.sha256 for run in uncut.runs} == {run.sha256 for run in cut.runs if run.kind != "cut"}
