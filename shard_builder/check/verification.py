"""Checks a shard folder against the whole model: its files, its logits, and the fusion of its attention."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import openvino as ov

from fleet.build_messages import BuildProgress, WeightChoice
from fleet.errors import ModelError
from fleet.manifest import (
    MANIFEST_NAME,
    CaseResult,
    FusionFault,
    KvPrecision,
    Manifest,
    PagedForm,
    RollbackKind,
    encode_manifest,
    load_manifest,
)
from shard_builder.check.cases import checked_model, choose_sequences
from shard_builder.check.findings import WRONG_LOGITS, explain
from shard_builder.check.reference import Reference, ReferenceHead, load_reference, make_reference
from shard_builder.check.shard_check import check_shards, count_stage_steps, count_whole_steps
from shard_builder.check.whole_model import whole_model
from shard_builder.cut.analysis import Analysis, analyse
from shard_builder.cut.opened_model import open_model
from shard_builder.fusion.rules import check_fusion
from shard_builder.inspection import FusedAttention
from shard_builder.manifest_parts import model_id
from shard_builder.reporting import Reporter
from shard_builder.shard_files import file_entry, file_sha256
from shard_builder.sources.hub import parse_hub_id
from shard_builder.sources.ways_in import open_source
from shard_builder.weights import hash_run

SOURCE_NAME = "source.json"


class SourceRecord(msgspec.Struct, frozen=True):
    """What a shard folder was made of, for a later check: a path, or an id on the hub with its commit."""

    model: str
    weights: WeightChoice | None = None
    """The format that its weights were brought into."""


class Check(msgspec.Struct, frozen=True):
    """What a check found, in f32: the largest difference of any logit, and the share of equal greedy tokens."""

    max_abs_diff: float
    greedy_match: float
    fused_attention: tuple[FusedAttention, ...]
    """Counted on this PC's CPU; for another device, what the builder counted."""
    device: str
    kv_precision: KvPrecision
    openvino_version: str
    cases: tuple[CaseResult, ...]
    sampled: bool
    rollback: tuple[RollbackKind, ...]
    """How rejected tokens may be taken back on this device."""
    notes: tuple[str, ...]
    """What was not run or not found as it should be."""
    fusion_faults: tuple[tuple[FusionFault, ...], ...]
    """Per stage, where its graph breaks the pattern that the device plugins fuse."""
    paged: PagedForm | None
    """Tried on the CPU with shards that give the right logits; else what was found before."""
    wrong_from: float = WRONG_LOGITS
    """The largest difference that rounding may explain: less where all logits are small."""

    @property
    def is_wrong(self) -> bool:
        """Whether the shards give other logits than rounding explains."""
        return self.max_abs_diff > self.wrong_from


def verify(
    folder: Path,
    *,
    device: str = "CPU",
    kv_precision: KvPrecision | None = None,
    reference: Path | None = None,
    sample: bool = False,
    progress: Callable[[BuildProgress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    work_folder: Path | None = None,
) -> Check:
    """Runs the shards of a folder in a chain, one loaded at a time, and compares them with the whole model.

    Where the folder was not checked before, or only a part of the cases was run, a check that finds the right logits
    is recorded in its manifest.

    Args:
        folder: the shard folder.
        device: the OpenVINO device that runs the shards, and the whole model where it has to run.
        kv_precision: of the KV cache; the manifest's by default.
        reference: a folder with the whole model's stored logits, which spares loading it; where the folder is missing
            or empty they are stored there. Or the whole model itself, as given to ``build``.
        sample: whether to run only a part of the cases, to bound the time.
        progress: hears how far the check is.
        cancelled: asked with every report of progress; True stops the check.
        work_folder: where converted models are kept; the place in the data folder by default.

    Raises:
        ModelError: a file of the folder is damaged, the whole model is not there or another one, or something does
            not run on the device.
        CancelledError: ``cancelled`` said so.
    """
    reporter = Reporter(progress, cancelled)
    manifest = load_manifest(folder)
    core = ov.Core()
    _check_device(core, device)
    check_files(folder, manifest, reporter)
    head = reference_head(manifest, device, kv_precision or manifest.kv_precision, sampled=sample)
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as scratch:
        tick = reporter.steps("verify", count_whole_steps(head) + count_stage_steps(head, len(manifest.stages)))
        stored = _reference(core, folder, manifest, head, reference, Path(scratch), reporter, tick, work_folder)
        examined = _with_fusion_faults(core, folder, manifest)
        outcome = check_shards(core, folder, examined, stored, Path(scratch), tick)
        del stored
    checked, found = outcome.manifest, outcome.manifest.verification
    assert found is not None
    earlier = manifest.verification
    if not outcome.wrong_cases and (earlier is None or (earlier.sampled and not found.sampled)):
        replace_manifest(folder, checked)
    return Check(
        max_abs_diff=found.max_abs_diff,
        greedy_match=found.greedy_match,
        fused_attention=tuple(
            FusedAttention(stage.stage, stage.fused_attention, stage.expected_attention) for stage in checked.stages
        ),
        device=device,
        kv_precision=found.kv_precision,
        openvino_version=found.openvino_version,
        cases=found.cases,
        sampled=found.sampled,
        rollback=checked.rollback,
        notes=explain(checked),
        fusion_faults=tuple(stage.fusion_faults for stage in checked.stages),
        paged=checked.paged,
        wrong_from=outcome.wrong_from,
    )


def reference_head(manifest: Manifest, device: str, kv_precision: KvPrecision, *, sampled: bool) -> ReferenceHead:
    """What a reference for these shards must belong to."""
    return ReferenceHead(
        model_id=manifest.model_id,
        device=device,
        kv_precision=kv_precision,
        vocabulary_size=manifest.vocabulary_size,
        openvino_version=ov.__version__,
        sampled=sampled,
        sequences=choose_sequences(checked_model(manifest), sampled=sampled),
    )


def _with_fusion_faults(core: ov.Core, folder: Path, manifest: Manifest) -> Manifest:
    """The manifest with what this version finds in the graphs."""
    stages = tuple(
        msgspec.structs.replace(stage, fusion_faults=check_fusion(open_model(core, folder / stage.graph.name)))
        for stage in manifest.stages
    )
    return msgspec.structs.replace(manifest, stages=stages)


def replace_manifest(folder: Path, manifest: Manifest) -> None:
    """Puts another manifest into a shard folder; at no time is there none or half of one.

    Raises:
        ModelError: it cannot be written.
    """
    draft = folder / f".{MANIFEST_NAME}-{secrets.token_hex(4)}"
    try:
        draft.write_bytes(encode_manifest(manifest))
        draft.replace(folder / MANIFEST_NAME)
    except OSError as error:
        raise ModelError(f"{folder / MANIFEST_NAME} cannot be written: {error.strerror}.") from None
    finally:
        draft.unlink(missing_ok=True)


def check_files(folder: Path, manifest: Manifest, reporter: Reporter) -> None:
    """Compares every file of a shard folder with its hash.

    Raises:
        ModelError: a file is missing or other than the manifest says.
    """
    for entry in manifest.files:
        reporter.check()
        path = folder / entry.name
        try:
            right = path.stat().st_size == entry.bytes and file_sha256(path) == entry.sha256
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}. Build the shards again.") from None
        if not right:
            raise ModelError(f"{path} is damaged: it is not the file that the manifest names. Build the shards again.")


def _check_device(core: ov.Core, device: str) -> None:
    if device.split(".")[0] not in {name.split(".")[0] for name in core.available_devices}:
        there = ", ".join(core.available_devices)
        raise ModelError(f"OpenVINO finds no device '{device}' on this PC; it finds {there}.")


def _reference(
    core: ov.Core,
    folder: Path,
    manifest: Manifest,
    head: ReferenceHead,
    given: Path | None,
    scratch: Path,
    reporter: Reporter,
    tick: Callable[[], None],
    work_folder: Path | None,
) -> Reference:
    """The stored reference where there is one that fits, else a new one from the whole model."""
    if given is not None and given.is_dir():
        stored = load_reference(given)
        if stored is not None:
            for _ in range(count_whole_steps(head)):
                tick()
            return _fitting(stored, head)
    stores = given is not None and (not given.exists() or (given.is_dir() and not any(given.iterdir())))
    record = _recorded_source(folder) if given is None or stores else SourceRecord(str(given))
    model = record.model
    source = open_source(model, work_folder, reporter, weights=record.weights)
    analysis = analyse(core, source)
    _check_same_model(analysis, folder, manifest, model, reporter)
    destination = given if given is not None and stores else scratch
    return make_reference(core, whole_model(core, analysis, manifest.cuts), head, destination, tick)


def _fitting(stored: Reference, head: ReferenceHead) -> Reference:
    """The stored reference, as far as this check runs what it holds.

    Raises:
        ModelError: it does not belong to these shards, or holds less than this check runs.
    """
    if stored.head.model_id != head.model_id:
        raise ModelError(f"The reference in {stored.folder} belongs to another model, or to one with other files.")
    if stored.head.kv_precision != head.kv_precision:
        raise ModelError(
            f"The reference in {stored.folder} was made with a {stored.head.kv_precision} KV cache; "
            f"check with --kv-precision {stored.head.kv_precision} or name another folder."
        )
    missing = set(head.sequences) - set(stored.head.sequences)
    if missing and stored.head.sampled and not head.sampled:
        raise ModelError(
            f"The reference in {stored.folder} is that of a sampled check; check with --sample or name another folder."
        )
    if missing or stored.head.vocabulary_size != head.vocabulary_size:
        raise ModelError(f"The reference in {stored.folder} was made by another version; remove it and check again.")
    return stored.restricted_to(head)


def _recorded_source(folder: Path) -> SourceRecord:
    missing = ModelError(
        f"The whole model that {folder} was cut from is not on this PC any more; name it, or a folder with its stored "
        "logits, with --reference."
    )
    try:
        record = msgspec.json.decode((folder / SOURCE_NAME).read_bytes(), type=SourceRecord)
    except (OSError, msgspec.MsgspecError):
        raise missing from None
    if not Path(record.model).exists() and parse_hub_id(record.model) is None:
        raise missing
    return record


def _check_same_model(analysis: Analysis, folder: Path, manifest: Manifest, model: str, reporter: Reporter) -> None:
    hashes = set()
    for run in analysis.runs:
        reporter.check()
        hashes.add(hash_run(run, analysis.opened.operations))
    companions = {file_entry(path) for path in analysis.source.companions}
    if model_id(analysis.source.graph, hashes, companions) == manifest.model_id:
        return
    odd = sorted(entry.name for entry in companions ^ set(manifest.tokenizer))
    if odd and hashes == {run.sha256 for run in manifest.runs if run.kind != "cut"}:
        raise ModelError(
            f"{model} has the weights that {folder} was cut from but another tokenizer or configuration ({odd[0]}); "
            "name the right model with --reference."
        )
    raise ModelError(f"{model} is not the model that {folder} was cut from; name the right one with --reference.")
