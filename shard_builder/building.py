"""Builds a shard folder: analyses the model, writes every stage, checks the chain, and puts the folder in its place."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import openvino as ov

from fleet.build_messages import BuildProgress, CheckLevel, TargetDevice, WeightChoice
from fleet.errors import ModelError
from fleet.manifest import (
    MANIFEST_NAME,
    CutTensor,
    FileEntry,
    KvPrecision,
    Manifest,
    Run,
    RunPlace,
    Stage,
    encode_manifest,
)
from shard_builder.check.acceptance import accept
from shard_builder.check.cases import CheckedModel, choose_sequences
from shard_builder.check.chain import hidden_bytes
from shard_builder.check.reference import reference_bytes
from shard_builder.check.verification import SOURCE_NAME, SourceRecord
from shard_builder.cut.analysis import Analysis, CutPlan, analyse, choose_boundaries, plan_cut
from shard_builder.cut.layers import describe_entangled
from shard_builder.cut.opened_model import cache_pattern, open_model, plain_reason
from shard_builder.cut.stage_plan import StagePlan
from shard_builder.cut.surgery import StageSurgeon
from shard_builder.fusion.rules import check_fusion
from shard_builder.manifest_parts import describe_model, model_id
from shard_builder.output_folder import check_output, put_in_place, scratch_folder
from shard_builder.reporting import Reporter
from shard_builder.shard_files import file_entry, name_constants, write_graph
from shard_builder.sources.model_files import MODEL_WEIGHTS
from shard_builder.sources.source_watch import unchanged
from shard_builder.sources.ways_in import open_source
from shard_builder.weights import WeightFileLayout, describe_run, hash_run, place_runs, write_weights

SPARE_DISK_BYTES = 16 << 20


def build(
    model: str | Path,
    output: Path,
    *,
    stages: int | None = None,
    cuts: Sequence[int] | None = None,
    kv_precision: KvPrecision = "f16",
    check: CheckLevel = "full",
    progress: Callable[[BuildProgress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    work_folder: Path | None = None,
    weights: WeightChoice | None = None,
    target_device: TargetDevice | None = None,
) -> Manifest:
    """Cuts a model into shards and checks them against the whole model.

    Args:
        model: an OpenVINO IR folder with its tokenizer, a GGUF file, a Hugging Face checkpoint folder, or an id on the
            Hugging Face hub, ``organisation/name`` or ``organisation/name@revision``; a path that exists comes first.
        output: the shard folder to make; it must not exist, or be an empty folder or an earlier shard folder, which is
            replaced once the new one is complete.
        stages: how many stages of about the same number of layers.
        cuts: instead of ``stages``, the first layer of every stage but stage 0.
        kv_precision: the precision of the KV cache that the manifest plans with and the check runs with.
        check: ``sample`` runs only a part of the cases, to bound the time; ``none`` leaves the check to a later
            ``verify``, and with it what only running the shards can find out.
        progress: hears how far the build is.
        cancelled: asked with every report of progress, and while a model is converted; True stops the build.
        work_folder: where converted models are kept; the place in the data folder by default.
        weights: the format to store the weights in; by default the one suggested for ``target_device``, and without
            one the model's own (f16 for a checkpoint).
        target_device: the kind of device that the weights' format is to suit.

    Raises:
        ModelError: the model cannot be read or cut, the cut does not fit the model, the disk is full, or the shards
            do not give the whole model's logits. Nothing is left behind.
        CancelledError: ``cancelled`` said so. Nothing is left behind.
    """
    reporter = Reporter(progress, cancelled)
    check_output(output)
    _check_apart(Path(model), output)
    reporter.report("convert", 0.0)
    source = open_source(model, work_folder, reporter, weights=weights, target_device=target_device)
    reporter.report("analyse", 0.0)
    core = ov.Core()
    analysis = analyse(core, source)
    remark = describe_entangled(analysis.layers)
    boundaries = choose_boundaries(len(analysis.layers.entries), stages, cuts, remark)
    cut = plan_cut(core, analysis, boundaries)
    reporter.report("analyse", 1.0)
    with scratch_folder(output) as scratch:
        try:
            with unchanged([source.graph, source.folder / MODEL_WEIGHTS]):
                manifest = _Builder(core, analysis, cut, kv_precision, check, scratch, reporter).build()
            record = SourceRecord(source.origin, source.weights)
            (scratch / SOURCE_NAME).write_bytes(msgspec.json.encode(record))
            (scratch / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
            reporter.check()
            put_in_place(scratch, output)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise ModelError(f"The shards cannot be written to {output}: {error.strerror}{where}.") from None
    reporter.finish()
    return manifest


def _check_apart(model: Path, output: Path) -> None:
    """Refuses to replace a folder that holds the model."""
    try:
        place = model.resolve()
        inside = model.exists() and output.resolve() in place.parents
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error.strerror}.") from None
    if inside:
        raise ModelError(f"{model} lies inside {output}, which the shards would replace; give another folder for them.")


class _Builder:
    def __init__(
        self,
        core: ov.Core,
        analysis: Analysis,
        cut: CutPlan,
        kv_precision: KvPrecision,
        check: CheckLevel,
        scratch: Path,
        reporter: Reporter,
    ) -> None:
        self._core = core
        self._analysis = analysis
        self._cut = cut
        self._kv_precision = kv_precision
        self._check = check
        self._scratch = scratch
        self._reporter = reporter
        self._runs: dict[int, Run] = {}
        self._cut_runs: dict[str, Run] = {}
        self._bytes_done = 0
        self._bytes_total = 0

    def build(self) -> Manifest:
        layouts = [place_runs(self._analysis.runs, plan.nodes) for plan in self._cut.stages]
        self._bytes_total = sum(layout.run_bytes for layout in layouts)
        self._check_disk()
        stages = [self._write_stage(number, plan) for number, plan in enumerate(self._cut.stages)]
        layer_count = len(self._analysis.layers.entries)
        for index, layout in enumerate(self._analysis.runs):
            if index not in self._runs:
                digest = hash_run(layout, self._analysis.opened.operations)
                self._runs[index] = describe_run(layout, digest, layer_count)
        tokenizer = self._copy_companions()
        runs = {run.sha256: run for run in self._runs.values()}
        manifest = describe_model(
            self._analysis,
            self._kv_precision,
            (*runs.values(), *(run for digest, run in self._cut_runs.items() if digest not in runs)),
            tokenizer,
            model_id(self._analysis.source.graph, runs, tokenizer),
            tuple(stages),
        )
        return accept(self._core, self._analysis, self._scratch, manifest, self._check, self._reporter)

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self._scratch).free
        # Of each stage's graph there is a draft at first; what they and the manifest take is known from the source's.
        graphs = (len(self._cut.stages) + 1) * self._analysis.source.graph.stat().st_size
        companions = sum(path.stat().st_size for path in self._analysis.source.companions)
        needed = self._bytes_total + self._check_bytes() + graphs + companions + SPARE_DISK_BYTES
        if free < needed:
            raise ModelError(
                f"The shards need {needed:,} bytes on the disk of {self._scratch.parent}, which has {free:,} free."
            )

    def _check_bytes(self) -> int:
        """Disk for the whole model's logits and for the hidden states between two stages."""
        if self._check == "none":
            return 0
        analysis = self._analysis
        model = CheckedModel(
            inputs=frozenset(analysis.opened.parameters()),
            vocabulary_size=analysis.vocabulary_size,
            sliding_window=analysis.sliding_window,
            layer_bytes=sum(analysis.layer_bytes),
        )
        sequences = choose_sequences(model, sampled=self._check == "sample")
        return reference_bytes(sequences, model.vocabulary_size) + hidden_bytes(sequences, self._cut.widest)

    def _write_graph(self, plan: StagePlan, graph_file: Path) -> tuple[tuple[str, ...], WeightFileLayout, bytes]:
        """Writes a stage's graph; its inputs, the layout of its weight file, and the cut's own constants."""
        opened = open_model(self._core, self._analysis.source.graph)
        if opened.graph != self._analysis.opened.graph:
            raise ModelError(f"{self._analysis.source.graph} changed while it was being cut; build again.")
        surgeon = StageSurgeon(
            opened, self._analysis.layers, plan, self._cut.dimensions, self._cut.forms, self._analysis.hidden_size
        )
        try:
            stage = surgeon.operate(f"{self._analysis.source.name} layers {plan.first} to {plan.end - 1}")
            numbers = {operation.get_name(): index for index, operation in enumerate(opened.operations)}
            constants = name_constants(stage.model, numbers)
            layout = place_runs(self._analysis.runs, set(constants.whole.values()))
            with tempfile.TemporaryDirectory(dir=self._scratch) as drafts:
                cut_constants = write_graph(stage.model, constants, layout, graph_file, Path(drafts))
        except RuntimeError as error:
            raise ModelError(
                f"OpenVINO cannot make a model of layers {plan.first} to {plan.end - 1}: {plain_reason(error)}."
            ) from error
        return stage.inputs, layout, cut_constants

    def _write_stage(self, number: int, plan: StagePlan) -> Stage:
        graph_file = self._scratch / f"stage-{number}.xml"
        weight_file = self._scratch / f"stage-{number}.bin"
        inputs, layout, cut_constants = self._write_graph(plan, graph_file)
        with weight_file.open("wb") as file:
            written = write_weights(file, layout, self._analysis.opened.operations, cut_constants, self._count_bytes)
        places = []
        for placed, digest in zip(layout.runs, written.run_hashes, strict=True):
            index = self._analysis.runs.index(placed.layout)
            self._runs[index] = describe_run(placed.layout, digest, len(self._analysis.layers.entries))
            places.append(RunPlace(sha256=digest, offset=placed.offset))
        if written.cut_bytes:
            self._cut_runs[written.cut_hash] = Run(sha256=written.cut_hash, bytes=written.cut_bytes, kind="cut")
            places.append(RunPlace(sha256=written.cut_hash, offset=layout.cut_offset))
        attention_layers = self._analysis.layers.states[plan.first : plan.end]
        return Stage(
            stage=number,
            first_layer=plan.first,
            end_layer=plan.end,
            bytes=written.bytes,
            graph=file_entry(graph_file),
            weights=FileEntry(name=weight_file.name, bytes=written.bytes, sha256=written.sha256),
            runs=tuple(places),
            inputs=inputs,
            expected_attention=sum(
                any(cache_pattern(self._analysis.opened, state) for state in group) for group in attention_layers
            ),
            cut_tensors=tuple(
                CutTensor(name=form.name[:2000], width=form.width, element_type=form.element_type)
                for form in self._cut.forms_into(number)
            ),
            fusion_faults=check_fusion(open_model(self._core, graph_file)),
        )

    def _count_bytes(self, count: int) -> None:
        self._bytes_done += count
        share = self._bytes_done / self._bytes_total if self._bytes_total else 1.0
        self._reporter.report("write", share, self._bytes_done, self._bytes_total)

    def _copy_companions(self) -> tuple[FileEntry, ...]:
        entries = []
        for path in self._analysis.source.companions:
            copy = self._scratch / path.name
            shutil.copyfile(path, copy)
            entries.append(file_entry(copy))
        return tuple(entries)
