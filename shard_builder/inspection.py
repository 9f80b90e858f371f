"""Says what is in a shard folder, or in a model that is not yet cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import openvino as ov

from fleet.errors import ModelError
from fleet.manifest import (
    MANIFEST_NAME,
    CutTensor,
    FileEntry,
    FusionFault,
    KvPrecision,
    Layer,
    Manifest,
    PagedForm,
    RollbackKind,
    Run,
    Stage,
    Verification,
    WeightFormat,
    load_manifest,
)
from fleet.memory_need import ModelNeed, StageMemory
from fleet.placement import DEFAULT_CONTEXT_TOKENS
from shard_builder.cut.analysis import analyse
from shard_builder.manifest_parts import KV_BYTES, describe_model
from shard_builder.reporting import Reporter
from shard_builder.sources.ways_in import open_source
from shard_builder.weights import describe_run


class FusedAttention(msgspec.Struct, frozen=True):
    """Attention nodes of a stage that the CPU plugin fused with their KV cache, and how many layers have one."""

    stage: int
    fused: int
    expected: int


class InspectedStage(msgspec.Struct, frozen=True):
    """One shard: its layers ``first_layer`` to ``end_layer`` (exclusive), weight bytes, and its own files."""

    stage: int
    first_layer: int
    end_layer: int
    bytes: int
    files: tuple[FileEntry, ...]
    fused_attention: FusedAttention
    kv_bytes_per_token: int
    """Of all its layers, for one token of one sequence."""
    memory: StageMemory
    """Predicted for its process on a CPU, with one chat of ``memory_context_tokens``."""
    memory_bytes: int
    """All of ``memory`` but the mapped weight file, which the system may give back at any time."""
    cut_bytes: int
    """Weight bytes that belong to this cut alone; the rest of ``bytes`` is shared by every cut, or padding."""
    inputs: tuple[str, ...]
    cut_tensors: tuple[CutTensor, ...]
    """What enters as ``inputs_embeds``: empty for the first stage."""
    fusion_faults: tuple[FusionFault, ...]


class SharedWeights(msgspec.Struct, frozen=True):
    """How much of the weights is the same wherever the model is cut: runs that are named by their SHA-256.

    A run that several stages hold counts once.
    """

    runs: int
    bytes: int
    cut_runs: int
    cut_bytes: int
    """Bytes of the runs that only this cut has."""

    @property
    def share(self) -> float:
        """0 to 1; 1 for a model that is not cut."""
        total = self.bytes + self.cut_bytes
        return self.bytes / total if total else 1.0


class Inspection(msgspec.Struct, frozen=True):
    """What a model or shard folder is. ``model_id`` is empty and ``stages`` too where the model is not yet cut.

    What only a check finds (``verification``, ``rollback``, ``paged``, ``notes``) is empty or None there as well.
    """

    name: str
    model_id: str
    architecture: str
    hidden_size: int
    vocabulary_size: int
    context_tokens: int
    """0 where the model does not say."""
    kv_precision: KvPrecision
    """The one at which the layers' ``kv_bytes_per_token`` are given."""
    layers: tuple[Layer, ...]
    embedding_bytes: int
    """The embedding and what it or several layers share with other parts: what the first stage holds besides layers."""
    head_bytes: int
    """The same for the head and the last stage; a tied embedding counts here and there."""
    runs: tuple[Run, ...]
    """What the weights consist of. The hashes are empty where the model is not cut: its weights are not read."""
    shared_weights: SharedWeights
    weight_formats: tuple[WeightFormat, ...]
    memory_context_tokens: int
    """The length of chat for which the stages' ``memory`` is given."""
    has_chat_template: bool
    stop_token_ids: tuple[int, ...]
    stages: tuple[InspectedStage, ...]
    verification: Verification | None
    rollback: tuple[RollbackKind, ...]
    paged: PagedForm | None
    notes: tuple[str, ...]


def inspect(
    path: str | Path,
    *,
    kv_precision: KvPrecision | None = None,
    cancelled: Callable[[], bool] | None = None,
    work_folder: Path | None = None,
) -> Inspection:
    """Describes a shard folder from its manifest, or a model by looking at its graph. Weights are not read.

    Args:
        path: the shard folder, or a model as ``build`` takes it.
        kv_precision: at which the KV bytes are given; by default a shard folder's own, and f16 for a model.
        cancelled: asked while a model is converted; True stops.
        work_folder: where converted models are kept; the place in the data folder by default.

    Raises:
        ModelError: it is neither, or cannot be cut; the text says why.
        CancelledError: ``cancelled`` said so.
    """
    try:
        cut = (Path(path) / MANIFEST_NAME).is_file()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    if cut:
        return inspect_manifest(load_manifest(Path(path)), kv_precision)
    source = open_source(path, work_folder, Reporter(None, cancelled))
    analysis = analyse(ov.Core(), source)
    # Without hashes, for which all weights would have to be read.
    runs = [describe_run(layout, "", len(analysis.layers.entries)) for layout in analysis.runs]
    return inspect_manifest(describe_model(analysis, kv_precision or "f16", runs, (), ""))


def inspect_manifest(manifest: Manifest, kv_precision: KvPrecision | None = None) -> Inspection:
    """What a manifest says, with KV bytes at the given precision, or at its own."""
    precision = kv_precision or manifest.kv_precision
    layers = tuple(
        msgspec.structs.replace(layer, kv_bytes_per_token=layer.kv_elements_per_token * KV_BYTES[precision])
        for layer in manifest.layers
    )
    context_tokens = min(DEFAULT_CONTEXT_TOKENS, manifest.context_tokens or DEFAULT_CONTEXT_TOKENS)
    need = ModelNeed(manifest, context_tokens, users=1, kv_precision=precision)
    of_model = [run for run in manifest.runs if run.kind != "cut"]
    of_cut = {run.sha256: run for run in manifest.runs if run.kind == "cut"}
    return Inspection(
        name=manifest.name,
        model_id=manifest.model_id,
        architecture=manifest.architecture,
        hidden_size=manifest.hidden_size,
        vocabulary_size=manifest.vocabulary_size,
        context_tokens=manifest.context_tokens,
        kv_precision=precision,
        layers=layers,
        embedding_bytes=_total_bytes(run for run in of_model if run.kind in ("embedding", "shared")),
        head_bytes=_total_bytes(run for run in of_model if run.kind in ("head", "shared")),
        runs=manifest.runs,
        shared_weights=SharedWeights(len(of_model), _total_bytes(of_model), len(of_cut), _total_bytes(of_cut.values())),
        weight_formats=manifest.weight_formats,
        memory_context_tokens=context_tokens,
        has_chat_template=manifest.has_chat_template,
        stop_token_ids=manifest.stop_token_ids,
        stages=tuple(_inspect_stage(stage, layers, of_cut, need) for stage in manifest.stages),
        verification=manifest.verification,
        rollback=manifest.rollback,
        paged=manifest.paged,
        notes=manifest.notes,
    )


def _inspect_stage(stage: Stage, layers: tuple[Layer, ...], of_cut: dict[str, Run], need: ModelNeed) -> InspectedStage:
    own_layers = layers[stage.first_layer : stage.end_layer]
    memory = need.memory(stage.first_layer, stage.end_layer)
    return InspectedStage(
        stage=stage.stage,
        first_layer=stage.first_layer,
        end_layer=stage.end_layer,
        bytes=stage.bytes,
        files=(stage.graph, stage.weights),
        fused_attention=FusedAttention(stage.stage, stage.fused_attention, stage.expected_attention),
        kv_bytes_per_token=sum(layer.kv_bytes_per_token for layer in own_layers),
        memory=memory,
        memory_bytes=memory.anonymous_bytes,
        cut_bytes=_total_bytes(of_cut[place.sha256] for place in stage.runs if place.sha256 in of_cut),
        inputs=stage.inputs,
        cut_tensors=stage.cut_tensors,
        fusion_faults=stage.fusion_faults,
    )


def _total_bytes(runs: Iterable[Run]) -> int:
    return sum(run.bytes for run in runs)
