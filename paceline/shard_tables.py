"""Shows models, shard folders and checks of them: tables for people, one JSON document for scripts."""

from __future__ import annotations

import msgspec
from rich.table import Table

from fleet.manifest import KvPrecision
from paceline.command import print_json
from paceline.terminal import PlainConsole
from shard_builder import Check, Inspection

_MEBIBYTE = 1 << 20


def show_inspection(inspection: Inspection, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.json.encode(inspection))
        return
    console = PlainConsole()
    layers = inspection.layers
    context = f", trained for {inspection.context_tokens:,} tokens" if inspection.context_tokens else ""
    console.print(
        f"{inspection.name}: {inspection.architecture}, {len(layers)} layers, hidden size {inspection.hidden_size:,}, "
        f"vocabulary {inspection.vocabulary_size:,}{context}",
        highlight=False,
    )
    if not inspection.stages:
        table = Table("layer", "MiB", f"KV bytes/token ({inspection.kv_precision})")
        for layer in layers:
            table.add_row(str(layer.index), f"{layer.bytes / _MEBIBYTE:,.1f}", f"{layer.kv_bytes_per_token:,}")
        console.print(table)
        console.print(
            f"Embedding {inspection.embedding_bytes / _MEBIBYTE:,.1f} MiB, head "
            f"{inspection.head_bytes / _MEBIBYTE:,.1f} MiB. Not cut yet.",
            highlight=False,
        )
        return
    table = Table("stage", "layers", "MiB", f"KV bytes/token ({inspection.kv_precision})", "fused attention", "files")
    for stage in inspection.stages:
        kept = sum(layer.kv_bytes_per_token for layer in layers[stage.first_layer : stage.end_layer])
        fused = stage.fused_attention
        table.add_row(
            str(stage.stage),
            f"{stage.first_layer} to {stage.end_layer - 1}",
            f"{stage.bytes / _MEBIBYTE:,.1f}",
            f"{kept:,}",
            f"{fused.fused} of {fused.expected}",
            ", ".join(file.name for file in stage.files),
        )
    console.print(table)
    found = inspection.verification
    if found is not None:
        console.print(_finding(found.max_abs_diff, found.greedy_match, found.device, found.kv_precision))


def show_check(check: Check, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.json.encode(check))
        return
    console = PlainConsole()
    table = Table("stage", "fused attention")
    for stage in check.fused_attention:
        table.add_row(str(stage.stage), f"{stage.fused} of {stage.expected}")
    console.print(table)
    console.print(_finding(check.max_abs_diff, check.greedy_match, check.device, check.kv_precision))


def _finding(max_abs_diff: float, greedy_match: float, device: str, kv_precision: KvPrecision) -> str:
    return (
        f"Against the whole model on {device} with a KV cache in {kv_precision}: largest difference of a logit "
        f"{max_abs_diff:.3g}, same greedy token at {greedy_match:.1%} of positions."
    )
