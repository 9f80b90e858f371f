"""Entries of the manifest that follow from a model's analysis."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from fleet.manifest import FileEntry, KvPrecision, Layer, Manifest, Run, Stage
from shard_builder.cut.analysis import Analysis
from shard_builder.cut.graph_digest import graph_digest
from shard_builder.weight_formats import weight_formats

KV_BYTES: dict[KvPrecision, int] = {"f32": 4, "f16": 2, "bf16": 2, "u8": 1}
"""Bytes of one number of the KV cache."""
NO_CHAT_TEMPLATE = "The model has no chat template: it completes plain texts, and an API client's chats are refused."


def describe_layers(analysis: Analysis, kv_precision: KvPrecision) -> tuple[Layer, ...]:
    """One entry per layer."""
    count = len(analysis.layers.entries)
    sizes = zip(analysis.layer_bytes, analysis.kv_elements_per_token, strict=True)
    return tuple(
        Layer(
            index=index,
            bytes=size,
            kv_elements_per_token=elements,
            kv_bytes_per_token=elements * KV_BYTES[kv_precision],
            borrowed_caches=analysis.parts.borrowed[index],
            weight_formats=weight_formats(
                (run for run in analysis.runs if run.kind(count) == ("layer", index)), analysis.opened.operations
            ),
        )
        for index, (size, elements) in enumerate(sizes)
    )


def describe_model(
    analysis: Analysis,
    kv_precision: KvPrecision,
    runs: Iterable[Run],
    tokenizer: tuple[FileEntry, ...],
    identity: str,
    stages: tuple[Stage, ...] = (),
) -> Manifest:
    """The manifest as it is before any check; without ``stages`` that of a model which is not yet cut."""
    return Manifest(
        manifest_version=1,
        model_id=identity,
        name=analysis.source.name,
        architecture=analysis.description.architecture,
        hidden_size=analysis.hidden_size,
        vocabulary_size=analysis.vocabulary_size,
        context_tokens=analysis.description.context_tokens,
        kv_precision=kv_precision,
        layers=describe_layers(analysis, kv_precision),
        runs=tuple(runs),
        stages=stages,
        tokenizer=tokenizer,
        stop_token_ids=analysis.description.stop_token_ids,
        sliding_window=analysis.sliding_window,
        step_switch_tokens=analysis.step_switch_tokens,
        weight_formats=weight_formats(analysis.runs, analysis.opened.operations),
        step_bytes_per_token=analysis.step_bytes_per_token,
        has_chat_template=analysis.source.has_chat_template,
        notes=tuple(_notes(analysis)),
    )


def _notes(analysis: Analysis) -> Iterator[str]:
    yield from analysis.opened.notes
    if analysis.step_switch_tokens:
        tokens = f"{analysis.step_switch_tokens:,}"
        yield (
            f"A step that reaches beyond {tokens} tokens is computed with other rotary frequencies, so a longer prompt "
            f"has to begin with one step of more than {tokens} tokens; the gateway sees to that."
        )
    if not analysis.source.has_chat_template:
        yield NO_CHAT_TEMPLATE


def model_id(graph_file: Path, run_hashes: Iterable[str], companions: Iterable[FileEntry]) -> str:
    """The same for every cut of the same graph and weights with the same tokenizer and configuration.

    Raises:
        ModelError: the graph file cannot be read any more.
    """
    parts = [graph_digest(graph_file), *sorted(run_hashes)]
    parts += sorted(f"{entry.name} {entry.sha256}" for entry in companions)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
