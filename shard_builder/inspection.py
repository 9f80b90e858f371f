"""Says what is in a shard folder, or in a model that is not yet cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import openvino as ov

from fleet.errors import ModelError
from fleet.manifest import MANIFEST_NAME, FileEntry, KvPrecision, Layer, Manifest, Verification, load_manifest
from shard_builder.analysis import analyse
from shard_builder.manifest_parts import KV_BYTES, describe_layers
from shard_builder.sources import open_source


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


class Inspection(msgspec.Struct, frozen=True):
    """What a model or shard folder is. ``model_id`` is empty and ``stages`` too where the model is not yet cut."""

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
    stages: tuple[InspectedStage, ...]
    verification: Verification | None


def inspect(
    path: Path,
    *,
    kv_precision: KvPrecision | None = None,
    cancelled: Callable[[], bool] | None = None,
    work_folder: Path | None = None,
) -> Inspection:
    """Describes a shard folder from its manifest, or a model (IR folder or GGUF file) by looking at its graph.

    Args:
        path: the shard folder or model.
        kv_precision: at which the KV bytes are given; by default a shard folder's own, and f16 for a model.
        cancelled: asked while a GGUF file is converted; True stops.
        work_folder: where converted models are kept; the place in the data folder by default.

    Raises:
        ModelError: it is neither, or cannot be cut; the text says why.
        CancelledError: ``cancelled`` said so.
    """
    try:
        cut = (path / MANIFEST_NAME).is_file()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    if cut:
        return inspect_manifest(load_manifest(path), kv_precision)
    precision = kv_precision or "f16"
    source = open_source(path, work_folder, cancelled or (lambda: False))
    analysis = analyse(ov.Core(), source)
    count = len(analysis.layers.entries)
    return Inspection(
        name=source.name,
        model_id="",
        architecture=analysis.description.architecture,
        hidden_size=analysis.hidden_size,
        vocabulary_size=analysis.vocabulary_size,
        context_tokens=analysis.description.context_tokens,
        kv_precision=precision,
        layers=describe_layers(analysis, precision),
        embedding_bytes=sum(run.bytes for run in analysis.runs if run.kind(count)[0] in ("embedding", "shared")),
        head_bytes=sum(run.bytes for run in analysis.runs if run.kind(count)[0] in ("head", "shared")),
        stages=(),
        verification=None,
    )


def inspect_manifest(manifest: Manifest, kv_precision: KvPrecision | None = None) -> Inspection:
    """What a manifest says, with KV bytes at the given precision, or at its own."""
    precision = kv_precision or manifest.kv_precision
    layers = tuple(
        msgspec.structs.replace(layer, kv_bytes_per_token=layer.kv_elements_per_token * KV_BYTES[precision])
        for layer in manifest.layers
    )
    return Inspection(
        name=manifest.name,
        model_id=manifest.model_id,
        architecture=manifest.architecture,
        hidden_size=manifest.hidden_size,
        vocabulary_size=manifest.vocabulary_size,
        context_tokens=manifest.context_tokens,
        kv_precision=precision,
        layers=layers,
        embedding_bytes=sum(run.bytes for run in manifest.runs if run.kind in ("embedding", "shared")),
        head_bytes=sum(run.bytes for run in manifest.runs if run.kind in ("head", "shared")),
        stages=tuple(
            InspectedStage(
                stage=stage.stage,
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                bytes=stage.bytes,
                files=(stage.graph, stage.weights),
                fused_attention=FusedAttention(stage.stage, stage.fused_attention, stage.expected_attention),
            )
            for stage in manifest.stages
        ),
        verification=manifest.verification,
    )
