"""The paged form of shards: how sequences are laid into blocks, and when shards may be served so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.manifest import load_manifest
from shard_builder import build, verify
from shard_builder.check.cases import Sequence, Step
from shard_builder.check.reference import exact_properties
from shard_builder.forms.paged import NotPagedError, PagedShard, PagedStep, make_paged
from shard_builder.forms.paged_steps import can_be_paged, count_blocks, ragged_steps
from tests.shard_builder import broken_caches
from tests.shard_builder.conftest import VOCABULARY, TinyDecoder

Writer = Callable[..., Path]

steps = st.lists(st.builds(Step, st.just("case"), st.integers(1, 40)), min_size=1, max_size=4)
"""The last step of a sequence is never one that is taken back."""
plain = steps.map(lambda found: Sequence(tuple(found)))
with_rejected = st.tuples(steps, st.integers(1, 40), steps).map(
    lambda parts: Sequence((*parts[0], Step("case", parts[1], rejected=True), *parts[2]), taken_back_by="trim")
)


@given(st.lists(plain | with_rejected, min_size=1, max_size=4), st.sampled_from([1, 16, 32]))
def test_sequences_side_by_side_keep_to_their_own_blocks(sequences: list[Sequence], block_tokens: int) -> None:
    total = count_blocks(sequences, block_tokens)
    owners: dict[int, int] = {}
    stored = [0] * len(sequences)
    done = []
    for ragged in ragged_steps(sequences, VOCABULARY, block_tokens):
        step = ragged.step
        tokens = np.diff(step.subsequence_begins)
        assert step.subsequence_begins[-1] == len(step.ids) == len(step.positions)
        assert len(step.sampled) == sum(ragged.rows)
        assert (np.diff(step.sampled) > 0).all()
        assert step.max_context_len == max(step.past_lens + tokens)
        for place, (sequence, number) in enumerate(ragged.members):
            case = sequences[sequence].steps[number]
            begin, end = step.subsequence_begins[place], step.subsequence_begins[place + 1]
            assert (tokens[place], step.past_lens[place]) == (case.tokens, stored[sequence])
            positions = np.arange(stored[sequence], stored[sequence] + case.tokens)
            np.testing.assert_array_equal(step.positions[begin:end], positions)
            blocks = step.block_indices[step.block_indices_begins[place] : step.block_indices_begins[place + 1]]
            assert len(blocks) * block_tokens >= stored[sequence] + case.tokens
            assert (len(blocks) - 1) * block_tokens < stored[sequence] + case.tokens
            for block in blocks:
                assert 0 <= block < total
                assert owners.setdefault(int(block), sequence) == sequence
            stored[sequence] += 0 if case.rejected else case.tokens
            done.append((sequence, number))
    assert sorted(done) == [(one, number) for one, found in enumerate(sequences) for number in range(len(found.steps))]


def test_what_is_masked_is_not_run_in_blocks() -> None:
    step = Step("case", 3)
    assert can_be_paged(Sequence((step,)))
    assert not can_be_paged(Sequence((step,), rows=3))
    assert not can_be_paged(Sequence((step,), padding=(1,)))
    assert not can_be_paged(Sequence((step,), taken_back_by="mask"))


@pytest.mark.parametrize("kv_precision", ["f32", "f16"])
def test_shards_that_give_the_same_logits_may_be_served_paged(
    tiny_model: Writer, tmp_path: Path, kv_precision: str
) -> None:
    manifest = build(tiny_model(), tmp_path / "shards", stages=3, kv_precision=kv_precision)
    assert manifest.paged is not None
    assert manifest.paged.served, manifest.paged.reason
    assert manifest.paged.max_abs_diff is not None
    assert 0.0 < manifest.paged.max_abs_diff < 1e-5
    assert load_manifest(tmp_path / "shards").paged == manifest.paged


def test_a_window_that_the_paged_form_does_not_keep_is_found_out(tiny_model: Writer, tmp_path: Path) -> None:
    manifest = build(tiny_model(sliding_window=8), tmp_path / "shards", stages=2)
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    assert manifest.paged is not None
    assert not manifest.paged.served
    assert "gives other logits than the whole model" in manifest.paged.reason
    assert (manifest.paged.max_abs_diff or 0.0) > 1e-2
    check = verify(tmp_path / "shards")
    assert check.paged is not None
    assert (check.paged.served, check.paged.reason) == (False, manifest.paged.reason)


def test_without_a_check_the_paged_form_is_not_tried(tiny_model: Writer, tmp_path: Path) -> None:
    assert build(tiny_model(), tmp_path / "shards", stages=2, check="none").paged is None
    check = verify(tmp_path / "shards", sample=True)
    assert check.paged is not None
    assert check.paged.served
    assert check.fusion_faults == ((), ())
    assert load_manifest(tmp_path / "shards").paged == check.paged


def test_attention_of_single_operations_has_no_paged_form(tmp_path: Path) -> None:
    TinyDecoder(layers=1).write(tmp_path)
    caches = broken_caches.Caches(ov.Core().read_model(tmp_path / "openvino_model.xml"))
    broken_caches.decomposed(caches)
    with pytest.raises(NotPagedError, match="No ScaledDotProductAttention"):
        make_paged(caches.model)


def test_a_state_that_is_no_cache_keeps_shards_from_being_paged(tmp_path: Path) -> None:
    TinyDecoder(layers=1).write(tmp_path)
    caches = broken_caches.Caches(ov.Core().read_model(tmp_path / "openvino_model.xml"))
    read = ov.opset13.read_value(
        ov.opset13.constant(np.zeros((1, 4), dtype=np.float32)), "recurrent", np.float32, [1, 4]
    )
    sinks = [*caches.model.get_sinks(), ov.opset13.assign(ov.opset13.relu(read), "recurrent")]
    hybrid = ov.Model(caches.model.get_results(), sinks, caches.model.get_parameters(), "hybrid")
    for parameter in hybrid.get_parameters():
        parameter.set_friendly_name(min(parameter.output(0).get_names()))
    with pytest.raises(NotPagedError, match="'recurrent' stays a state"):
        make_paged(hybrid)


def test_a_last_stage_gives_logits_for_sampled_tokens_alone(tiny_model: Writer, tmp_path: Path) -> None:
    build(tiny_model(), tmp_path / "shards", stages=2, check="none")
    model = ov.Core().read_model(tmp_path / "shards" / "stage-1.xml")
    make_paged(model)
    compiled = ov.Core().compile_model(model, "CPU", exact_properties("CPU", "f32"))
    hidden = np.random.default_rng(1).standard_normal((7, 16)).astype(np.float32)

    def run(sampled: list[int]) -> np.ndarray:
        # Two prompts, of 3 and 4 tokens.
        step = PagedStep(
            ids=np.zeros(7, dtype=np.int64),
            positions=np.array([0, 1, 2, 0, 1, 2, 3]),
            past_lens=np.zeros(2, dtype=np.int32),
            subsequence_begins=np.array([0, 3, 7], dtype=np.int32),
            block_indices=np.array([1, 0], dtype=np.int32),
            block_indices_begins=np.array([0, 1, 2], dtype=np.int32),
            max_context_len=4,
            sampled=np.array(sampled),
        )
        return PagedShard(compiled, blocks=2).run(step, hidden)

    everything = run(list(range(7)))
    assert everything.shape == (7, VOCABULARY)
    np.testing.assert_allclose(run([2, 6]), everything[[2, 6]], atol=1e-6)


def test_the_small_model_may_be_served_paged_and_breaks_no_rule_of_fusion(smollm2_two_stages: Path) -> None:
    manifest = load_manifest(smollm2_two_stages)
    assert manifest.paged is not None
    assert manifest.paged.served, manifest.paged.reason
    assert all(stage.fusion_faults == () for stage in manifest.stages)
