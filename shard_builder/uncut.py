"""Describes a model that is not cut yet, for planning where to cut it."""

from __future__ import annotations

from pathlib import Path

import openvino as ov

from fleet.manifest import KvPrecision, Manifest
from shard_builder.cut.analysis import analyse
from shard_builder.manifest_parts import describe_model, model_id
from shard_builder.shard_files import file_entry
from shard_builder.sources.ways_in import open_source
from shard_builder.weights import describe_run, hash_run


def describe_uncut(model: Path, kv_precision: KvPrecision = "f16", work_folder: Path | None = None) -> Manifest:
    """The manifest that any cut of the model will have, without stages. Reads all weights once, to hash them.

    Raises:
        ModelError: it is not a model that can be cut; the text says why.
    """
    source = open_source(model, work_folder)
    analysis = analyse(ov.Core(), source)
    layer_count = len(analysis.layers.entries)
    runs = {
        run.sha256: run
        for run in (
            describe_run(layout, hash_run(layout, analysis.opened.operations), layer_count) for layout in analysis.runs
        )
    }
    tokenizer = tuple(file_entry(path) for path in source.companions)
    return describe_model(analysis, kv_precision, runs.values(), tokenizer, model_id(source.graph, runs, tokenizer))
