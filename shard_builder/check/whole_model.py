"""The whole model that the shards are compared with.

A model whose caches lack the Gather by beam_idx, or a value to start from, gets them here as its shards do, and so it
does with copies of caches that several stages read: without them it does not run, or computes attention in another
order, so that nothing could be compared to the bit. How far that model is from the untouched one is measured apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov

from fleet.errors import ModelError
from shard_builder.check.reference import Reference, exact_properties, input_ports, run_sequence
from shard_builder.check.step_values import step_values
from shard_builder.cut.analysis import Analysis, plan_cut
from shard_builder.cut.cache_copies import copy_caches
from shard_builder.cut.graph import READ_VALUE
from shard_builder.cut.opened_model import cache_pattern, open_model
from shard_builder.cut.stage_plan import plan_stage
from shard_builder.cut.surgery import StageSurgeon


def has_incomplete_caches(analysis: Analysis) -> bool:
    """Whether a KV cache of the model is not reordered by beam, or starts undefined."""
    opened = analysis.opened
    for state in analysis.states:
        pattern = cache_pattern(opened, state)
        if pattern is not None and (pattern.gather is None or not opened.operations[state.read].get_input_size()):
            return True
    return False


def has_copied_caches(analysis: Analysis, cuts: Sequence[int]) -> bool:
    """Whether a stage of these cuts reads the cache of an earlier one."""
    return any(
        owner < cut <= layer for layer, owners in enumerate(analysis.parts.borrowed) for owner in owners for cut in cuts
    )


def whole_model(core: ov.Core, analysis: Analysis, cuts: Sequence[int]) -> ov.Model:
    """The model as one piece, with its KV caches made complete, and copied as the stages of these cuts have them.

    Raises:
        ModelError: its file cannot be read any more.
    """
    opened = open_model(core, analysis.source.graph)
    model = opened.model
    count = len(analysis.layers.entries)
    if has_incomplete_caches(analysis):
        plan = plan_stage(analysis.layers, 0, count)
        surgeon = StageSurgeon(opened, analysis.layers, plan, {}, {}, analysis.hidden_size)
        model = surgeon.operate("whole").model
    if has_copied_caches(analysis, cuts):
        stages = plan_cut(core, analysis, (0, *cuts, count)).stages
        copies = [(stage, open_model(core, analysis.source.graph)) for stage in stages if stage.copied]
        model = copy_caches(model, opened, analysis.layers, copies)
    return model


@dataclass(frozen=True)
class Distance:
    """Between two models: the largest difference of a logit, and the range of the logits where it is widest."""

    max_abs_diff: float
    logit_range: float


def distance_to_untouched(core: ov.Core, graph_file: Path, reference: Reference) -> Distance | None:
    """How far the untouched model's logits are from the reference's; None where it does not run.

    OpenVINO's GGUF reader makes graphs that only run with the attention fused, and so not without the Gather. A cache
    that starts undefined is not tried: the CPU plugin begins it with no rows, reads beyond them, and may crash.

    Raises:
        ModelError: the file cannot be read any more.
    """
    head = reference.head
    model = open_model(core, graph_file).model
    if any(node.get_type_name() == READ_VALUE and not node.get_input_size() for node in model.get_ops()):
        return None
    ports = input_ports(model)
    largest = widest = 0.0
    try:
        compiled = core.compile_model(model, head.device, exact_properties(head.device, head.kv_precision))
        for sequence in reference.sequences:
            # Without the Gather it cannot reorder rows; what it gives with padding or rejected tokens adds nothing.
            if not sequence.is_essential:
                continue
            expected = reference.logits(sequence)
            start = 0
            steps = step_values(sequence, head.vocabulary_size)
            for values, logits in run_sequence(compiled.create_infer_request(), ports, steps, lambda *_: {}):
                found = logits[values.compared]
                if not np.isfinite(found).all():
                    raise ModelError(f"{graph_file} gives logits that are not numbers on {head.device}.")
                step = expected[start : start + len(found)]
                largest = max(largest, float(np.max(np.abs(found - step))))
                widest = max(widest, float(np.ptp(step)))
                start += len(found)
    except RuntimeError:
        return None
    return Distance(largest, widest)
