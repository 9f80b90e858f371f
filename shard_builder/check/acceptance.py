"""Decides whether freshly written shards may be kept: they have to give the whole model's logits."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import openvino as ov

from fleet.build_messages import CheckLevel
from fleet.errors import ModelError
from fleet.manifest import KvPrecision, Manifest
from shard_builder.check.findings import explain, wrong_from
from shard_builder.check.reference import make_reference
from shard_builder.check.shard_check import check_shards, count_stage_steps, count_whole_steps
from shard_builder.check.verification import reference_head
from shard_builder.check.whole_model import (
    Distance,
    distance_to_untouched,
    has_copied_caches,
    has_incomplete_caches,
    whole_model,
)
from shard_builder.cut.analysis import Analysis
from shard_builder.reporting import Reporter

DEVICE = "CPU"


def accept(
    core: ov.Core, analysis: Analysis, folder: Path, manifest: Manifest, check: CheckLevel, reporter: Reporter
) -> Manifest:
    """The manifest with what the check found. ``folder`` holds the graphs and weights of all stages.

    Raises:
        ModelError: the shards or the whole model do not run, or the logits differ.
        CancelledError: the caller wants the build to end.
    """
    reporter.report("verify", 0.0)
    if check == "none":
        return msgspec.structs.replace(manifest, notes=(*manifest.notes, *explain(manifest)))
    incomplete, copied = has_incomplete_caches(analysis), has_copied_caches(analysis, manifest.cuts)
    completed = incomplete or copied
    # The untouched model's unfused attention keeps its cache in f32, so only at f32 the two can be compared.
    precision: KvPrecision = "f32" if completed else manifest.kv_precision
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        head = reference_head(manifest, DEVICE, precision, sampled=check == "sample")
        tick = reporter.steps("verify", count_whole_steps(head) + count_stage_steps(head, len(manifest.stages)))
        reference = make_reference(core, whole_model(core, analysis, manifest.cuts), head, Path(scratch), tick)
        if completed:
            distance = distance_to_untouched(core, analysis.source.graph, reference)
            manifest = msgspec.structs.replace(
                manifest, notes=(*manifest.notes, *_describe_completion(distance, incomplete=incomplete, copied=copied))
            )
            if distance is not None and distance.max_abs_diff > wrong_from(distance.logit_range):
                raise _wrong(analysis, distance.max_abs_diff)
        checked = check_shards(core, folder, manifest, reference, Path(scratch), tick)
        del reference
    for case in checked.wrong_cases:
        raise _wrong(analysis, case.max_abs_diff, f" in the case '{case.case}'")
    return checked.manifest


def _describe_completion(distance: Distance | None, *, incomplete: bool, copied: bool) -> list[str]:
    found = (
        "as it is it does not run on this PC's CPU"
        if distance is None
        else f"as it is its attention is not fused, and its logits differ by up to {distance.max_abs_diff:.3g}"
    )
    notes = []
    if incomplete:
        notes.append(
            "The model's KV caches have no Gather by beam_idx or no value to start from; the shards got them, and so "
            f"did the whole model that they were compared with ({found})."
        )
    if copied:
        notes.append(
            "A stage reads KV caches of an earlier one and keeps copies of them, and so did the whole model that the "
            f"shards were compared with ({found})."
        )
    return notes


def _wrong(analysis: Analysis, difference: float, where: str = "") -> ModelError:
    return ModelError(
        f"{analysis.source.name} cannot be cut here: its shards give other logits than the whole model "
        f"(largest difference {difference:.3g}{where})."
    )
