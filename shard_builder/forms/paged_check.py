"""Tries the paged form of every shard and compares it with the whole model's logits, one stage loaded at a time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AnySequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from fleet.manifest import KvPrecision, Manifest, PagedForm, Stage
from shard_builder.check.cases import Sequence, checked_model, crosses_window, without_rejected
from shard_builder.check.reference import Reference, ReferenceHead, exact_properties, input_ports, run_sequence
from shard_builder.check.step_values import StepValues, step_values
from shard_builder.cut.opened_model import plain_reason
from shard_builder.cut.source_form import LOGITS_OUTPUT
from shard_builder.cut.surgery import HIDDEN_INPUT
from shard_builder.forms.paged import NotPagedError, PagedShard, block_tokens, make_paged
from shard_builder.forms.paged_steps import RaggedStep, can_be_paged, count_blocks, ragged_steps

DEVICE = "CPU"
"""The blocks of a cache lie in a device's own memory; only on the CPU that is memory like any other."""
KV_PRECISION: KvPrecision = "f32"
NOISE = 5e-5
"""Largest difference that the order of sums explains with an f32 cache, as a share of the range of the logits. 1e-7 was
seen with 4 layers and 2e-6 with 30; attention without its ALiBi slopes shows as 2e-2 and more. With an f16 cache 1.3e-3
was seen where nothing is wrong, as much as a long prompt changes that exceeds its sliding window by a few tokens."""

_Outputs = list[NDArray[np.float32]]


def check_paged(
    core: ov.Core, folder: Path, manifest: Manifest, reference: Reference, tick: Callable[[], None]
) -> PagedForm:
    """Whether the shards of a folder may be served with paged attention.

    The reference's sequences of one row go through the paged shards side by side, in ragged batches; rejected tokens
    are taken back by a smaller past. The cache is kept in f32, because rounding would hide what the check is for. Where
    the reference was made with another cache, the logits are those of the stateful shards with an f32 one, and by how
    much those shards differed from the whole model is added to what is found.

    Args:
        core: reads and compiles the shards.
        folder: the shard folder.
        manifest: what it says of them, with what the check of the stateful shards found.
        reference: the whole model's logits on the CPU.
        tick: called ``paged_step_count`` times per stage, and may raise to stop.
    """
    head = reference.head
    sequences = [sequence for sequence in reference.sequences if can_be_paged(sequence)]
    clean = [sequence for sequence in sequences if sequence.taken_back_by is None]
    runs_stateful = head.kv_precision != KV_PRECISION
    properties = exact_properties(DEVICE, KV_PRECISION)
    paged: _Outputs = []
    stateful: list[_Outputs] = [[] for _ in clean]
    steps: tuple[RaggedStep, ...] = ()
    for stage in manifest.stages:
        graph = folder / stage.graph.name
        try:
            steps, paged = _run_paged(core, graph, properties, sequences, paged, head.vocabulary_size, tick)
            if runs_stateful:
                stateful = _run_stateful(core, graph, properties, clean, stateful, head.vocabulary_size, tick)
        except NotPagedError as error:
            return PagedForm(served=False, reason=f"{_layers(stage)}: {error}")
        except RuntimeError as error:
            reason = f"{_layers(stage)}: its paged form does not run ({plain_reason(error)})."
            return PagedForm(served=False, reason=reason)
    expected = {
        sequence: np.concatenate(logits) if runs_stateful else reference.logits(sequence)
        for sequence, logits in zip(clean, stateful, strict=True)
    }
    difference, logit_range = _compare(sequences, steps, paged, expected)
    before = manifest.verification.max_abs_diff if runs_stateful and manifest.verification else 0.0
    return _judge(manifest, difference, NOISE * logit_range, before, sampled=head.sampled)


def paged_step_count(head: ReferenceHead) -> int:
    """How often the check of the paged form runs each stage."""
    sequences = [sequence for sequence in head.sequences if can_be_paged(sequence)]
    rounds = max((number + len(sequence.steps) for number, sequence in enumerate(sequences)), default=0)
    if head.kv_precision != KV_PRECISION:
        rounds += sum(len(sequence.steps) for sequence in sequences if sequence.taken_back_by is None)
    return rounds


def _judge(manifest: Manifest, difference: float, noise: float, before: float, *, sampled: bool) -> PagedForm:
    if not np.isfinite(difference):
        return PagedForm(served=False, reason="The paged form gives logits that are not numbers.")
    reason = ""
    if manifest.step_switch_tokens:
        reason = (
            f"In a paged step, a sequence beyond {manifest.step_switch_tokens:,} tokens would change the rotary "
            "frequencies of all others."
        )
    elif difference > noise:
        reason = f"The paged form gives other logits than the whole model (largest difference {difference:.3g})."
    elif manifest.sliding_window and not crosses_window(checked_model(manifest), sampled=sampled):
        reason = (
            f"The check did not reach beyond the sliding window of {manifest.sliding_window:,} tokens, and the paged "
            "form may not keep it."
        )
    return PagedForm(served=not reason, max_abs_diff=difference + before, reason=reason)


def _layers(stage: Stage) -> str:
    last = stage.end_layer - 1
    layers = f"layers {stage.first_layer} to {last}" if last > stage.first_layer else f"layer {last}"
    return f"Stage {stage.stage} ({layers})"


def _run_paged(
    core: ov.Core,
    graph: Path,
    properties: dict[str, Any],
    sequences: AnySequence[Sequence],
    entering: _Outputs,
    vocabulary_size: int,
    tick: Callable[[], None],
) -> tuple[tuple[RaggedStep, ...], _Outputs]:
    """What was run and what came out of every step: [tokens, width], or [sampled, vocabulary] from a last stage."""
    model = core.read_model(graph)
    make_paged(model)
    compiled = core.compile_model(model, DEVICE, properties)
    del model
    size = block_tokens(compiled)
    shard = PagedShard(compiled, count_blocks(sequences, size))
    steps = ragged_steps(sequences, vocabulary_size, size)
    leaving = []
    for number, ragged in enumerate(steps):
        leaving.append(shard.run(ragged.step, entering[number] if entering else None))
        tick()
    return steps, leaving


def _run_stateful(
    core: ov.Core,
    graph: Path,
    properties: dict[str, Any],
    sequences: AnySequence[Sequence],
    entering: list[_Outputs],
    vocabulary_size: int,
    tick: Callable[[], None],
) -> list[_Outputs]:
    """What comes out of every sequence's steps: [1, tokens, width], or [compared, vocabulary] from a last stage."""
    model = core.read_model(graph)
    ports = input_ports(model)
    is_last = LOGITS_OUTPUT in model.output(0).get_names()
    compiled = core.compile_model(model, DEVICE, properties)
    del model
    leaving = []
    for outputs, sequence in zip(entering, sequences, strict=True):

        def hidden(step: int, _: StepValues, outputs: _Outputs = outputs) -> dict[str, NDArray[np.float32]]:
            return {HIDDEN_INPUT: outputs[step]} if outputs else {}

        found = []
        steps = step_values(sequence, vocabulary_size)
        for values, output in run_sequence(compiled.create_infer_request(), ports, steps, hidden):
            found.append(np.array(output[values.compared] if is_last else output, dtype=np.float32))
            tick()
        leaving.append(found)
    return leaving


def _compare(
    sequences: AnySequence[Sequence],
    steps: AnySequence[RaggedStep],
    found: _Outputs,
    expected: dict[Sequence, NDArray[np.float32]],
) -> tuple[float, float]:
    """Largest difference of any logit, and the largest distance between two logits of one position."""
    by_sequence: list[_Outputs] = [[] for _ in sequences]
    for ragged, logits in zip(steps, found, strict=True):
        start = 0
        for (number, step), rows in zip(ragged.members, ragged.rows, strict=True):
            if not sequences[number].steps[step].rejected:
                by_sequence[number].append(logits[start : start + rows])
            start += rows
    difference = logit_range = 0.0
    for sequence, parts in zip(sequences, by_sequence, strict=True):
        right = expected[without_rejected(sequence, sequences)]
        # Not the built-in max, which would pass over what is not a number.
        difference = float(np.maximum(difference, np.max(np.abs(np.concatenate(parts) - right))))
        logit_range = max(logit_range, float(np.max(np.ptp(right, axis=1))))
    return difference, logit_range
