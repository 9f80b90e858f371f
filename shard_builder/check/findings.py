"""What a check found, as the manifest records it and explains it in words."""

from __future__ import annotations

import msgspec
import openvino as ov

from fleet.manifest import LeftOutCase, Manifest, RollbackKind, Verification
from shard_builder.check.cases import MASK_INPUT, case_names, checked_model, crosses_window
from shard_builder.check.chain import ChainResult
from shard_builder.check.reference import Reference
from shard_builder.check.rollback import ROLLBACK_WORDS, is_noise
from shard_builder.fusion.rules import explain_unfused

WRONG_LOGITS = 1e-2
"""In f32 a right cut gives the same logits to the bit; a difference of this size means that the cut is wrong."""
_WRONG_SHARE = 1e-2
"""The same as a share of the logits' range, for models all of whose logits are small."""


def wrong_from(logit_range: float) -> float:
    """The difference of a logit beyond which two models are not the same, for logits of this range in f32."""
    return min(WRONG_LOGITS, _WRONG_SHARE * logit_range)


def record(manifest: Manifest, reference: Reference, result: ChainResult) -> Manifest:
    """The manifest with the findings of a check, in place of those of an earlier one.

    The counts of fused attention are those of the CPU plugin, so a check on another device leaves them as they are.
    """
    head = reference.head
    verification = Verification(
        max_abs_diff=result.comparison.max_abs_diff,
        greedy_match=result.comparison.greedy_match,
        device=head.device,
        kv_precision=head.kv_precision,
        openvino_version=ov.__version__,
        cases=result.comparison.cases,
        sampled=head.sampled,
        rollback=result.comparison.rollbacks,
        left_out=_left_out(reference, result),
    )
    stages = manifest.stages
    if head.device.startswith("CPU"):
        stages = tuple(
            msgspec.structs.replace(stage, fused_attention=fused)
            for stage, fused in zip(stages, result.fused_attention, strict=True)
        )
    earlier = explain(manifest)
    checked = msgspec.structs.replace(manifest, stages=stages, verification=verification)
    checked = msgspec.structs.replace(checked, rollback=usable_rollbacks(checked))
    notes = tuple(note for note in manifest.notes if note not in earlier) + explain(checked)
    return msgspec.structs.replace(checked, notes=notes)


def usable_rollbacks(manifest: Manifest) -> tuple[RollbackKind, ...]:
    """How rejected tokens may be taken back, by what the check found.

    The mask is not trusted with a sliding window that the check's prompt did not exceed, because such layers count
    slots and a masked one takes an accepted token's place.
    """
    verification = manifest.verification
    if verification is None:
        return ()
    return tuple(
        result.kind
        for result in verification.rollback
        if is_noise(result, verification.kv_precision)
        and (result.kind != "mask" or not _window_is_beyond(manifest, verification))
    )


def explain(manifest: Manifest) -> tuple[str, ...]:
    """Sentences on what a check did not run, or did not find as it should be; none where all is well."""
    verification = manifest.verification
    if verification is None:
        return ("The shards have not been checked against the whole model.",)
    notes = []
    unequal = [case for case in verification.cases if case.max_abs_diff]
    if unequal:
        worst = max(unequal, key=lambda case: case.max_abs_diff)
        notes.append(
            f"The shards' logits differ from the whole model's by up to {worst.max_abs_diff:.3g} ({worst.case}), with "
            f"the KV cache in {verification.kv_precision} and all else in f32; {len(unequal)} of "
            f"{len(verification.cases)} cases differ."
        )
    for reason in dict.fromkeys(one.reason for one in verification.left_out):
        cases = ", ".join(one.case for one in verification.left_out if one.reason == reason)
        notes.append(f"Not compared: {cases} ({reason.rstrip('.')}).")
    for result in verification.rollback:
        if not is_noise(result, verification.kv_precision):
            notes.append(
                f"No rollback by {ROLLBACK_WORDS[result.kind]}: the logits then differ by up to "
                f"{result.max_abs_diff:.3g} from those of the whole model without these tokens."
            )
    if _window_is_beyond(manifest, verification):
        notes.append(
            f"The check did not reach beyond the sliding window of {manifest.sliding_window:,} tokens, so rollback by "
            f"{ROLLBACK_WORDS['mask']} is not relied on."
        )
    if not any(MASK_INPUT in stage.inputs for stage in manifest.stages):
        notes.append("The model has no attention mask, so neither padding nor masked tokens can be expressed.")
    return (*notes, *explain_unfused(manifest.stages))


def _window_is_beyond(manifest: Manifest, verification: Verification) -> bool:
    return manifest.sliding_window > 0 and not crosses_window(checked_model(manifest), sampled=verification.sampled)


def _left_out(reference: Reference, result: ChainResult) -> tuple[LeftOutCase, ...]:
    found = []
    for one in reference.head.left_out:
        names = case_names([one.sequence])
        found += [LeftOutCase(case, one.reason) for case in names]
    for sequence in reference.head.sequences:
        if sequence.taken_back_by in result.impossible:
            names = case_names([sequence])
            found += [LeftOutCase(case, result.impossible[sequence.taken_back_by]) for case in names]
    return tuple(found)
