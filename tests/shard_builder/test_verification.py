"""What a check of a cut notices, what it records, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from fleet.errors import CancelledError, ModelError
from fleet.manifest import KvPrecision, encode_manifest, load_manifest
from shard_builder import build, verify
from shard_builder.check import acceptance
from shard_builder.check.cases import Sequence, Step
from shard_builder.check.chain import run_chain
from shard_builder.check.comparison import Comparison
from shard_builder.check.findings import record, wrong_from
from shard_builder.check.reference import make_reference
from shard_builder.check.verification import reference_head
from shard_builder.check.whole_model import whole_model
from shard_builder.shard_files import file_entry

Writer = Callable[..., Path]
Edit = Callable[[ov.Model], None]

SAMPLED_ROW_CASES = {"prefill of 6 tokens", "single steps", "chunk of 3 tokens after a past"}
ONE_ROW_CASES = SAMPLED_ROW_CASES | {"prefill of 1 token", "prefill of 24 tokens", "chunk of 6 tokens after a past"}
BATCH_CASES = {"batch of 3", "beam reorder"}
PADDED_CASES = {"batch of 3 with padding", "beam reorder with padding"}
MASKED_CASE = "rejected tokens under the mask"


def differing_cases(folder: Path, edit: Edit) -> set[str]:
    """The cases in which the second stage differs from the whole model's layers once its graph is edited."""
    manifest = load_manifest(folder)
    stage = manifest.stages[1]
    graph, weights = folder / stage.graph.name, folder / stage.weights.name
    model = ov.Core().read_model(graph)
    edit(model)
    ov.serialize(model, folder / "edited.xml", folder / "edited.bin")
    del model
    (folder / "edited.xml").replace(graph)
    (folder / "edited.bin").replace(weights)
    entry = file_entry(weights)
    edited = msgspec.structs.replace(stage, graph=file_entry(graph), weights=entry, bytes=entry.bytes, runs=())
    stages = (manifest.stages[0], edited)
    (folder / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, stages=stages)))
    check = verify(folder, kv_precision="f32")
    assert load_manifest(folder).verification is None, "a wrong shard was recorded as checked"
    assert check.max_abs_diff == max(case.max_abs_diff for case in check.cases)
    # An edit that undoes the fusion of the attention changes the order of its sums everywhere.
    assert all(not 1e-5 < case.max_abs_diff < 1e-3 for case in check.cases), check.cases
    return {case.case for case in check.cases if case.max_abs_diff >= 1e-3}


def redirect(output: Any, replacement: Any, *, but: Any = None) -> None:
    for target in list(output.get_target_inputs()):
        if target.get_node().get_type_name() != "ShapeOf" and (but is None or target.get_node() != but):
            target.replace_source_output(replacement.output(0))


def disturb_batches(model: ov.Model) -> None:
    """Another hidden state where there is more than one row."""
    hidden = model.input("inputs_embeds")
    shape = ops.shape_of(hidden, "i64")
    rows = ops.gather(shape, ops.constant(np.array([0])), ops.constant(np.int64(0)))
    error = ops.convert(ops.greater(rows, ops.constant(np.int64(1))), "f32")
    scaled = ops.multiply(hidden, ops.add(error, ops.constant(np.float32(1))))
    redirect(hidden, scaled, but=scaled)


def ignore_padding(model: ov.Model) -> None:
    """Every slot of the cache may be looked at."""
    mask = model.input("attention_mask")
    ones = ops.broadcast(ops.constant(np.int64(1)), ops.shape_of(mask, "i64"))
    redirect(mask, ones)


def ignore_window(model: ov.Model) -> None:
    """The edge of the window lies before the first slot."""
    edges = [
        operation
        for operation in model.get_ordered_ops()
        if operation.get_type_name() == "Constant"
        and operation.get_output_element_type(0) == ov.Type.i64
        and operation.get_data().tolist() == 8
    ]
    assert len(edges) == 1
    redirect(edges[0].output(0), ops.constant(np.int64(1000)))


def ignore_beams(model: ov.Model) -> None:
    """One value cache keeps its rows where they were."""
    gather = next(
        operation
        for operation in model.get_ordered_ops()
        if operation.get_type_name() == "Gather" and operation.input_value(0).get_node().get_type_name() == "ReadValue"
    )
    state = gather.input_value(0)
    gather.input(1).replace_source_output(
        ops.range(
            ops.constant(np.int64(0)),
            ops.gather(ops.shape_of(state, "i64"), ops.constant(np.int64(0)), ops.constant(np.int64(0))),
            ops.constant(np.int64(1)),
            "i32",
        ).output(0)
    )


@pytest.mark.parametrize(
    ("traits", "edit", "expected"),
    [
        ({}, disturb_batches, BATCH_CASES | PADDED_CASES),
        ({}, ignore_padding, PADDED_CASES | {MASKED_CASE}),
        ({}, ignore_beams, {"beam reorder", "beam reorder with padding"}),
    ],
    ids=["wrong in batches", "wrong under padding", "wrong after a beam reorder"],
)
def test_a_shard_that_is_wrong_in_one_way_is_noticed_there(
    tiny_model: Writer, tmp_path: Path, traits: dict[str, Any], edit: Edit, expected: set[str]
) -> None:
    build(tiny_model(**traits), tmp_path / "shards", stages=2, check="none")
    assert differing_cases(tmp_path / "shards", edit) == expected


def test_a_shard_that_is_wrong_past_the_window_is_noticed_there(tiny_model: Writer, tmp_path: Path) -> None:
    build(tiny_model(sliding_window=8), tmp_path / "shards", stages=2, check="none")
    wrong = differing_cases(tmp_path / "shards", ignore_window)
    assert {"prefill of 16 tokens, over the sliding window", "steps behind the sliding window"} <= wrong
    assert not wrong & {"prefill of 6 tokens", "prefill of 1 token", "batch of 3 with padding"}


@pytest.mark.parametrize("kv_precision", ["f16", "u8"])
def test_a_model_without_a_window_takes_tokens_back_both_ways(
    tiny_model: Writer, tmp_path: Path, kv_precision: KvPrecision
) -> None:
    manifest = build(tiny_model(), tmp_path / "shards", stages=2, kv_precision=kv_precision, check="sample")
    assert manifest.rollback == ("mask", "trim")
    assert manifest.verification is not None
    assert [result.kind for result in manifest.verification.rollback] == ["mask", "trim"]
    assert manifest.sliding_window == 0


def test_a_model_with_a_window_takes_tokens_back_by_trimming_alone(tiny_model: Writer, tmp_path: Path) -> None:
    manifest = build(tiny_model(sliding_window=8), tmp_path / "shards", stages=2)
    assert (manifest.sliding_window, manifest.rollback) == (8, ("trim",))
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    assert {"prefill of 16 tokens, over the sliding window", "steps behind the sliding window"} <= {
        case.case for case in manifest.verification.cases
    }
    mask, trim = manifest.verification.rollback
    assert mask.max_abs_diff > 0.05 * mask.logit_range
    assert trim.max_abs_diff < 1e-5 * trim.logit_range
    assert "No rollback by masking" in manifest.notes[-1]


def test_the_mask_is_not_relied_on_where_the_check_does_not_reach_the_window(
    tiny_model: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shard_builder.check.cases.MAX_WINDOW_TOKENS", 20)
    manifest = build(tiny_model(sliding_window=40), tmp_path / "shards", stages=2)
    assert manifest.rollback == ("trim",)
    assert "did not reach beyond the sliding window of 40 tokens" in manifest.notes[-1]


def test_what_a_model_cannot_express_is_left_out_by_name(tiny_model: Writer, tmp_path: Path) -> None:
    unmasked = build(tiny_model(attention_mask=False), tmp_path / "unmasked", stages=2)
    assert unmasked.verification is not None
    assert {case.case for case in unmasked.verification.cases} == ONE_ROW_CASES | BATCH_CASES
    assert unmasked.rollback == ("trim",)
    assert "no attention mask" in unmasked.notes[-1]


def test_a_model_that_takes_one_row_is_compared_without_batches(tiny_model: Writer, tmp_path: Path) -> None:
    manifest = build(tiny_model(), tmp_path / "shards", stages=1, check="none")
    core = ov.Core()
    whole = core.read_model(tiny_model(static_batch=True) / "openvino_model.xml")
    head = reference_head(manifest, "CPU", "f32", sampled=False)
    reference = make_reference(core, whole, head, tmp_path / "reference", lambda: None)
    assert {one.reason for one in reference.head.left_out} == {"the model takes one row at a time"}
    assert [sequence.rows for sequence in reference.sequences] == [1] * len(reference.sequences)
    result = run_chain(
        core, tmp_path / "shards", manifest.stages, reference, "CPU", "f32", tmp_path / "reference", lambda: None
    )
    found = record(manifest, reference, result).verification
    assert found is not None
    assert found.max_abs_diff == 0.0
    assert {case.case for case in found.cases} == ONE_ROW_CASES | {MASKED_CASE}
    assert {one.case for one in found.left_out} == BATCH_CASES | PADDED_CASES


def test_a_sampled_check_says_so_and_a_full_one_replaces_it(tiny_model: Writer, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    sampled = build(tiny_model(), shards, stages=2, check="sample").verification
    assert sampled is not None
    assert sampled.sampled
    assert {case.case for case in sampled.cases} == SAMPLED_ROW_CASES | PADDED_CASES | {MASKED_CASE}
    verify(shards)
    full = load_manifest(shards).verification
    assert full is not None
    assert {case.case for case in full.cases} == ONE_ROW_CASES | BATCH_CASES | PADDED_CASES | {MASKED_CASE}
    assert {case.max_abs_diff for case in full.cases} == {0.0}
    assert (full.sampled, full.left_out, full.greedy_match) == (False, (), 1.0)


def test_unchecked_shards_say_so_until_a_check_succeeds(tiny_model: Writer, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    manifest = build(tiny_model(), shards, stages=2, check="none")
    assert (manifest.verification, manifest.rollback, manifest.paged) == (None, (), None)
    assert "not been checked" in manifest.notes[-1]
    assert [stage.fused_attention for stage in manifest.stages] == [0, 0]
    check = verify(shards)
    checked = load_manifest(shards)
    assert checked.verification is not None
    assert checked.verification.cases == check.cases
    assert (checked.rollback, check.rollback) == (("mask", "trim"), ("mask", "trim"))
    assert [stage.fused_attention for stage in checked.stages] == [2, 1]
    assert not any("checked" in note for note in checked.notes)
    assert not [path.name for path in shards.iterdir() if path.name.startswith(".")]


def test_a_check_records_what_the_build_would_have(tiny_model: Writer, tmp_path: Path) -> None:
    model = tiny_model(sliding_window=8)
    built = build(model, tmp_path / "built", stages=2)
    build(model, tmp_path / "later", stages=2, check="none")
    verify(tmp_path / "later")
    later = load_manifest(tmp_path / "later")
    # OpenVINO numbers the nodes that it makes, so that no two graph files are the same bytes.
    stages = tuple(
        msgspec.structs.replace(stage, graph=other.graph)
        for stage, other in zip(later.stages, built.stages, strict=True)
    )
    assert msgspec.structs.replace(later, stages=stages) == built


def test_a_stored_reference_serves_smaller_checks_but_no_larger_ones(tiny_model: Writer, tmp_path: Path) -> None:
    model, shards = tiny_model(), tmp_path / "shards"
    build(model, shards, stages=1, check="none")
    verify(shards, sample=True, reference=tmp_path / "sampled")
    with pytest.raises(ModelError, match=r"sampled is that of a sampled check; check with --sample"):
        verify(shards, reference=tmp_path / "sampled")
    verify(shards, reference=tmp_path / "full")
    model.rename(tmp_path / "elsewhere")
    recorded = load_manifest(shards).verification
    check = verify(shards, sample=True, reference=tmp_path / "full")
    assert load_manifest(shards).verification == recorded, "a smaller check replaced a larger one"
    assert (check.sampled, check.max_abs_diff) == (True, 0.0)
    assert {case.case for case in check.cases} == SAMPLED_ROW_CASES | PADDED_CASES | {MASKED_CASE}
    head = tmp_path / "full" / "reference.json"
    head.write_bytes(b'{"calls": []}')
    with pytest.raises(ModelError, match="damaged or was made by another version"):
        verify(shards, reference=tmp_path / "full")


def test_the_same_weights_with_another_tokenizer_are_told_from_another_model(
    tiny_model: Writer, tmp_path: Path
) -> None:
    model, shards = tiny_model(), tmp_path / "shards"
    build(model, shards, stages=2, check="none")
    (model / "openvino_tokenizer.bin").write_bytes(b"other")
    with pytest.raises(ModelError, match="another tokenizer or configuration"):
        verify(shards)


def test_a_check_that_is_stopped_leaves_no_half_of_a_reference(tiny_model: Writer, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    build(tiny_model(), shards, stages=2, check="none")

    def soon() -> bool:
        return len(list(tmp_path.glob("reference/logits-*.npy"))) > 1

    with pytest.raises(CancelledError):
        verify(shards, reference=tmp_path / "reference", cancelled=soon)
    assert not (tmp_path / "reference").exists()


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_wrong_logits_are_told_at_every_scale(scale: float) -> None:
    sequence = Sequence((Step("single steps", 1), Step("single steps", 1)))
    expected = np.linspace(-1, 1, 20, dtype=np.float32).reshape(2, 10) * np.float32(scale)

    class Stored:
        def logits(self, _: Sequence) -> Any:
            return expected

    for factor, wrong in ((1.0, False), (1.0 + 1e-6, False), (-1.0, True), (1.1, True)):
        comparison = Comparison(Stored())  # type: ignore[arg-type]
        comparison.add(sequence, list(expected[:, None] * np.float32(factor)))
        assert (comparison.max_abs_diff > wrong_from(comparison.logit_range)) == wrong


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_what_completes_the_caches_is_refused_at_every_scale_where_it_changes_the_logits(
    tiny_model: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    def scale_logits(model: ov.Model, factor: float) -> ov.Model:
        result = next(result for result in model.get_results() if "logits" in result.output(0).get_names())
        scaled = ops.multiply(result.input_value(0), ops.constant(np.float32(factor)))
        result.input(0).replace_source_output(scaled.output(0))
        return model

    folder = tiny_model(gather=False)
    graph = folder / "openvino_model.xml"
    model = scale_logits(ov.Core().read_model(graph), scale)
    ov.serialize(model, folder / "scaled.xml", folder / "scaled.bin")
    del model
    (folder / "scaled.xml").replace(graph)
    (folder / "scaled.bin").replace(folder / "openvino_model.bin")
    assert build(folder, tmp_path / "right", stages=2, check="sample").verification is not None
    monkeypatch.setattr(acceptance, "whole_model", lambda *given: scale_logits(whole_model(*given), 1.5))
    with pytest.raises(ModelError, match=r"other logits than the whole model \(largest difference [^ ]+\)\.$"):
        build(folder, tmp_path / "wrong", stages=2, check="sample")
    assert not (tmp_path / "wrong").exists()
