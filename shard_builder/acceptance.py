"""Decides whether freshly written shards may be kept: they have to give the whole model's logits."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import openvino as ov

from fleet.errors import ModelError
from fleet.manifest import KvPrecision, Manifest, Verification
from shard_builder.analysis import Analysis
from shard_builder.chain import run_chain
from shard_builder.reference import CALLS, make_reference
from shard_builder.reporting import Reporter
from shard_builder.verification import reference_head
from shard_builder.whole_model import distance_to_untouched, has_incomplete_caches, whole_model

WRONG_LOGITS = 1e-2
"""In f32 a right cut gives the same logits to the bit; a difference of this size means that the cut is wrong."""
DEVICE = "CPU"


def accept(core: ov.Core, analysis: Analysis, folder: Path, manifest: Manifest, reporter: Reporter) -> Manifest:
    """The manifest with what the check found. ``folder`` holds the graphs and weights of all stages.

    Raises:
        ModelError: the shards or the whole model do not run, or the logits differ.
        CancelledError: the caller wants the build to end.
    """
    reporter.report("verify", 0.0)
    tick = reporter.steps("verify", len(CALLS) * (len(manifest.stages) + 1) + 1)
    completed = has_incomplete_caches(analysis)
    # The untouched model's unfused attention keeps its cache in f32, so only at f32 the two can be compared.
    precision: KvPrecision = "f32" if completed else manifest.kv_precision
    notes = list(manifest.notes)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        head = reference_head(manifest, DEVICE, precision)
        reference = make_reference(core, whole_model(core, analysis), head, Path(scratch), tick)
        if completed:
            distance = distance_to_untouched(core, analysis.source.graph, reference)
            notes.append(_describe_completion(distance))
            _refuse_wrong(analysis, distance or 0.0)
        result = run_chain(core, folder, manifest.stages, reference, DEVICE, precision, tick)
        del reference
    _refuse_wrong(analysis, result.max_abs_diff)
    if result.max_abs_diff:
        notes.append(f"The shards' logits differ from the whole model's by up to {result.max_abs_diff:.3g} in f32.")
    stages = tuple(
        msgspec.structs.replace(stage, fused_attention=fused)
        for stage, fused in zip(manifest.stages, result.fused_attention, strict=True)
    )
    verification = Verification(
        max_abs_diff=result.max_abs_diff,
        greedy_match=result.greedy_match,
        device=DEVICE,
        kv_precision=precision,
        openvino_version=ov.__version__,
    )
    return msgspec.structs.replace(manifest, stages=stages, verification=verification, notes=tuple(notes))


def _describe_completion(distance: float | None) -> str:
    found = (
        "as it is it does not run on this PC's CPU"
        if distance is None
        else f"as it is its attention is not fused, and its logits differ by up to {distance:.3g}"
    )
    return (
        "The model's KV caches have no Gather by beam_idx or no value to start from; the shards got them, and so did "
        f"the whole model that they were compared with ({found})."
    )


def _refuse_wrong(analysis: Analysis, difference: float) -> None:
    if difference > WRONG_LOGITS:
        raise ModelError(
            f"{analysis.source.name} cannot be cut here: its shards give other logits than the whole model "
            f"(largest difference {difference:.3g})."
        )
