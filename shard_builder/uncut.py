"""Describes a model that is not cut yet, for planning where to cut it."""

from __future__ import annotations

from pathlib import Path

import openvino as ov

from fleet.manifest import KvPrecision, Manifest
from shard_builder.analysis import analyse
from shard_builder.manifest_parts import describe_layers, model_id
from shard_builder.shard_files import file_entry
from shard_builder.sources import open_source
from shard_builder.weight_formats import weight_formats
from shard_builder.weights import describe_run, hash_run


def describe_uncut(model: Path, kv_precision: KvPrecision = "f16", work_folder: Path | None = None) -> Manifest:
    """The manifest that any cut of the model will have, without stages. Reads all weights once, to hash them.

    Raises:
        ModelError: it is not a model that can be cut; the text says why.
    """
    source = open_source(model, work_folder, lambda: False)
    analysis = analyse(ov.Core(), source)
    layer_count = len(analysis.layers.entries)
    runs = {
        run.sha256: run
        for run in (
            describe_run(layout, hash_run(layout, analysis.opened.operations), layer_count) for layout in analysis.runs
        )
    }
    tokenizer = tuple(file_entry(path) for path in source.companions)
    return Manifest(
        manifest_version=1,
        model_id=model_id(runs, tokenizer),
        name=source.name,
        architecture=analysis.description.architecture,
        hidden_size=analysis.hidden_size,
        vocabulary_size=analysis.vocabulary_size,
        context_tokens=analysis.description.context_tokens,
        kv_precision=kv_precision,
        layers=describe_layers(analysis, kv_precision),
        runs=tuple(runs.values()),
        stages=(),
        tokenizer=tokenizer,
        stop_token_ids=analysis.description.stop_token_ids,
        weight_formats=weight_formats(analysis.runs, analysis.opened.operations),
    )
