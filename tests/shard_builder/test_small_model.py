"""Cuts the bundled model, from its GGUF file, and the same without the Gather by beam_idx."""

from __future__ import annotations

import shutil
from pathlib import Path

import openvino as ov
import pytest

from fleet.errors import ModelError
from fleet.manifest import Manifest, load_manifest
from shard_builder import build
from shard_builder.check.chain import run_chain
from shard_builder.check.reference import make_reference
from shard_builder.check.verification import reference_head


def check_exact(manifest: Manifest, stages: int) -> None:
    assert len(manifest.stages) == stages
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    assert manifest.verification.greedy_match == 1.0
    for stage in manifest.stages:
        assert stage.fused_attention == stage.expected_attention == stage.end_layer - stage.first_layer


def whole_model_runs(manifest: Manifest) -> set[str]:
    return {run.sha256 for run in manifest.runs if run.kind != "cut"}


def test_two_stages_are_exact_and_described(smollm2_two_stages: Path) -> None:
    manifest = load_manifest(smollm2_two_stages)
    check_exact(manifest, 2)
    assert (manifest.name, manifest.architecture) == ("SmolLM2-135M-Instruct.Q4_1", "llama")
    assert (manifest.hidden_size, manifest.vocabulary_size, manifest.context_tokens) == (576, 49152, 8192)
    assert manifest.stop_token_ids == (2,)
    assert [layer.kv_bytes_per_token for layer in manifest.layers] == [2 * 3 * 64 * 2] * 30
    assert len({layer.bytes for layer in manifest.layers}) == 1
    assert [entry.name for entry in manifest.tokenizer][:2] == ["openvino_tokenizer.xml", "openvino_tokenizer.bin"]


@pytest.mark.parametrize("stages", [3, 5])
def test_more_stages_are_exact_and_share_the_runs(
    smollm2_gguf: Path, converted_models: Path, smollm2_two_stages: Path, tmp_path: Path, stages: int
) -> None:
    manifest = build(smollm2_gguf, tmp_path / "shards", stages=stages, check="sample", work_folder=converted_models)
    check_exact(manifest, stages)
    two = load_manifest(smollm2_two_stages)
    assert manifest.model_id == two.model_id
    assert whole_model_runs(manifest) == whole_model_runs(two)


def remove_beam_gathers(model: Path, folder: Path) -> Path:
    """A copy of a model whose caches are not reordered by beam, as a plain export has them."""
    folder.mkdir()
    for path in model.glob("openvino_*tokenizer.*"):
        shutil.copyfile(path, folder / path.name)
    opened = ov.Core().read_model(model / "openvino_model.xml")
    removed = 0
    for operation in opened.get_ordered_ops():
        if operation.get_type_name() == "Gather" and operation.input_value(0).get_node().get_type_name() == "ReadValue":
            for target in list(operation.output(0).get_target_inputs()):
                target.replace_source_output(operation.input_value(0))
            removed += 1
    assert removed == 60
    opened.remove_parameter(next(p for p in opened.get_parameters() if "beam_idx" in p.output(0).get_names()))
    ov.serialize(opened, folder / "openvino_model.xml", folder / "openvino_model.bin")
    return folder


def test_without_the_beam_gathers_the_shards_get_them_and_give_the_same_logits(
    smollm2_two_stages: Path, converted_models: Path, tmp_path: Path
) -> None:
    original = next(converted_models.iterdir())
    bare = remove_beam_gathers(original, tmp_path / "bare")
    manifest = build(bare, tmp_path / "shards", stages=2)
    check_exact(manifest, 2)
    assert "no Gather by beam_idx" in manifest.notes[0]
    assert [stage.inputs[-2:] for stage in manifest.stages] == [
        ("position_ids", "beam_idx"),
        ("beam_idx", "sampled_positions"),
    ]
    core = ov.Core()
    head = reference_head(load_manifest(smollm2_two_stages), "CPU", "f32", sampled=True)
    whole = core.read_model(original / "openvino_model.xml")
    reference = make_reference(core, whole, head, tmp_path / "reference", lambda: None)
    result = run_chain(core, tmp_path / "shards", manifest.stages, reference, "CPU", "f32", tmp_path, lambda: None)
    assert result.comparison.max_abs_diff == 0.0


def test_a_gguf_file_cut_short_is_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    with smollm2_gguf.open("rb") as file:
        short.write_bytes(file.read(50_000_000))
    with pytest.raises(ModelError, match="cut short"):
        build(short, tmp_path / "shards", stages=2, work_folder=tmp_path / "work")
    assert [path.name for path in tmp_path.iterdir()] == ["short.gguf"]


def test_a_gguf_file_that_the_reader_does_not_know_is_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    content = bytearray(smollm2_gguf.read_bytes().replace(b"llama.", b"ladle."))
    place = content.index(b"general.architecture") + len(b"general.architecture") + 12
    content[place : place + 5] = b"ladle"
    unknown = tmp_path / "unknown.gguf"
    unknown.write_bytes(content)
    with pytest.raises(ModelError, match=r"architecture 'ladle'|cannot convert .*unknown\.gguf"):
        build(unknown, tmp_path / "shards", stages=2, work_folder=tmp_path / "work")
    assert {path.name for path in tmp_path.rglob("*")} <= {"unknown.gguf", "work"}
