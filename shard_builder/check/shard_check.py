"""Runs shards against the whole model's logits and records what that found, in a build as in a later check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import openvino as ov

from fleet.manifest import CaseResult, Manifest
from shard_builder.check.cases import step_count, whole_sequences
from shard_builder.check.chain import run_chain
from shard_builder.check.findings import record, wrong_from
from shard_builder.check.reference import Reference, ReferenceHead
from shard_builder.forms.paged_check import check_paged, paged_step_count


@dataclass(frozen=True)
class CheckedShards:
    """The manifest with what was found, and the difference of a logit beyond which the cut is wrong."""

    manifest: Manifest
    wrong_from: float

    @property
    def wrong_cases(self) -> tuple[CaseResult, ...]:
        """Those whose logits differ by more than rounding explains."""
        found = self.manifest.verification
        return tuple(case for case in found.cases if case.max_abs_diff > self.wrong_from) if found else ()


def check_shards(
    core: ov.Core, folder: Path, manifest: Manifest, reference: Reference, scratch: Path, tick: Callable[[], None]
) -> CheckedShards:
    """Runs all stages in a chain, and on the CPU those that are right in their paged form as well.

    Args:
        core: reads and compiles the shards.
        folder: the shard folder.
        manifest: what is known of the shards so far.
        reference: the whole model's logits; its head says on which device to run, and how.
        scratch: a folder for the hidden states between two stages.
        tick: called at most as often as ``count_stage_steps`` says; may raise to stop.

    Raises:
        ModelError: a shard does not run, its logits are not numbers, or the disk is full.
    """
    head = reference.head
    result = run_chain(core, folder, manifest.stages, reference, head.device, head.kv_precision, scratch, tick)
    checked = CheckedShards(record(manifest, reference, result), wrong_from(result.comparison.logit_range))
    if checked.wrong_cases or not _tries_paged(head):
        return checked
    paged = check_paged(core, folder, checked.manifest, reference, tick)
    return CheckedShards(msgspec.structs.replace(checked.manifest, paged=paged), checked.wrong_from)


def count_whole_steps(head: ReferenceHead) -> int:
    """How often the whole model runs in a check."""
    return step_count(whole_sequences(head.sequences))


def count_stage_steps(head: ReferenceHead, stages: int) -> int:
    """How often the stages run in a check."""
    return stages * (step_count(head.sequences) + (paged_step_count(head) if _tries_paged(head) else 0))


def _tries_paged(head: ReferenceHead) -> bool:
    return head.device.startswith("CPU")
