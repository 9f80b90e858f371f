"""Shows models, shard folders and checks of them: tables for people, one JSON document for scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from fleet.manifest import FusionFault, Layer, PagedForm, Verification
from paceline.command import print_json
from paceline.table_words import (
    fact_grid,
    finding_words,
    format_words,
    number_words,
    part_words,
    plain_table,
    size_words,
)
from paceline.terminal import PlainConsole
from shard_builder import Check, Inspection

_SMALL_SHARE = 0.01
"""Masks, position tables and single numbers, that many parts read, make one row together."""
_ROLLBACK_WORDS = {"mask": "by the attention mask", "trim": "by trimming the cache"}


def show_inspection(inspection: Inspection, as_json: bool, every_layer: bool = False) -> None:
    """Layers that look alike share a row unless ``every_layer`` has a row."""
    if as_json:
        print_json(msgspec.json.encode(inspection))
        return
    console = PlainConsole()
    console.print(fact_grid(_facts(inspection)))
    console.print(_layer_table(inspection, every_layer))
    if not inspection.stages:
        console.print("Not cut yet.")
        return
    console.print(_stage_table(inspection))
    for table in (_tensor_table(inspection), _fault_table(_faults(inspection)), _case_table(inspection.verification)):
        if table.row_count:
            console.print(table)
    found = inspection.verification
    if found is not None:
        console.print(finding_words(found.max_abs_diff, found.greedy_match, found.device, found.kv_precision))
    for note in inspection.notes:
        console.print(note)


def show_next_step(folder: Path) -> None:
    """Where the shards are that were just built, and the command that puts them to use."""
    # Not broken into lines, so that the command can be copied.
    PlainConsole().print(f"The shards are in {folder}; 'paceline serve {folder}' serves them.", soft_wrap=True)


def show_check(check: Check, as_json: bool) -> None:
    """What a check of a shard folder found."""
    if as_json:
        print_json(msgspec.json.encode(check))
        return
    console = PlainConsole()
    table = plain_table("stage", "fused attention")
    for stage in check.fused_attention:
        table.add_row(str(stage.stage), f"{stage.fused} of {stage.expected}")
    console.print(table)
    for table in (_fault_table(enumerate(check.fusion_faults)), _case_table(check)):
        if table.row_count:
            console.print(table)
    console.print(f"Paged: {_paged_words(check.paged)}")
    for note in check.notes:
        console.print(note)
    console.print(finding_words(check.max_abs_diff, check.greedy_match, check.device, check.kv_precision))


def _facts(inspection: Inspection) -> Iterator[tuple[str, str]]:
    context = f", trained for {inspection.context_tokens:,} tokens" if inspection.context_tokens else ""
    yield "model", inspection.name
    yield (
        "kind",
        f"{inspection.architecture}, {len(inspection.layers)} layers, hidden size {inspection.hidden_size:,}, "
        f"vocabulary {inspection.vocabulary_size:,}{context}",
    )
    shared = inspection.shared_weights
    formats = format_words(inspection.weight_formats)
    yield "weights", f"{size_words(shared.bytes)}{': ' if formats else ''}{formats}"
    if inspection.stages:
        yield (
            "shared",
            f"{shared.runs} runs of weights with {size_words(shared.bytes)} are the same wherever this model is cut; "
            f"{size_words(shared.cut_bytes)} belong to this cut alone",
        )
    yield "KV cache", f"in {inspection.kv_precision}"
    yield "chat", "has a chat template" if inspection.has_chat_template else "no chat template: it completes texts only"
    if inspection.stages:
        yield "rollback", _rollback_words(inspection)
        yield (
            "memory",
            f"predicted for one chat of {inspection.memory_context_tokens:,} tokens on CPUs, "
            "without the mapped weights",
        )
        yield "paged", _paged_words(inspection.paged)


def _rollback_words(inspection: Inspection) -> str:
    if inspection.verification is None:
        return "not tried"
    ways = " or ".join(_ROLLBACK_WORDS[kind] for kind in inspection.rollback)
    return f"rejected tokens are taken back {ways}" if ways else "no way was found to take tokens back"


def _paged_words(paged: PagedForm | None) -> str:
    if paged is None:
        return "not tried"
    if not paged.served:
        return f"may not be served with paged attention: {paged.reason}"
    found = "" if paged.max_abs_diff is None else f" (largest difference of a logit {paged.max_abs_diff:.3g})"
    return f"may be served with paged attention{found}"


def _layer_table(inspection: Inspection, every_layer: bool) -> Table:
    table = plain_table("<part", "weights", "KV per token", "<formats")
    for numbers, cells in _layer_rows(inspection.layers, every_layer):
        each = "each " if len(numbers) > 1 else ""
        table.add_row(part_words(numbers, len(inspection.layers)), f"{each}{cells[0]}", f"{each}{cells[1]}", cells[2])
    beside = [run for run in inspection.runs if run.kind not in ("layer", "cut")]
    large = [
        run for run in beside if run.kind != "shared" or run.bytes > _SMALL_SHARE * inspection.shared_weights.bytes
    ]
    for run in large:
        shared = "shared by " if run.kind == "shared" else ""
        table.add_row(f"{shared}{part_words(run.parts, len(inspection.layers))}", size_words(run.bytes), "", "")
    rest = sum(run.bytes for run in beside if run not in large)
    if rest:
        table.add_row("shared by several, small", size_words(rest), "", "")
    return table


def _layer_rows(layers: Sequence[Layer], every_layer: bool) -> list[tuple[list[int], tuple[str, str, str]]]:
    grouped: dict[object, tuple[list[int], tuple[str, str, str]]] = {}
    for layer in layers:
        cells = size_words(layer.bytes), size_words(layer.kv_bytes_per_token), format_words(layer.weight_formats)
        grouped.setdefault(layer.index if every_layer else cells, ([], cells))[0].append(layer.index)
    return list(grouped.values())


def _stage_table(inspection: Inspection) -> Table:
    table = plain_table("stage", "layers", "weights", "cut's own", "KV per token", "memory", "fused")
    for stage in inspection.stages:
        fused = stage.fused_attention
        table.add_row(
            str(stage.stage),
            number_words(range(stage.first_layer, stage.end_layer)),
            size_words(stage.bytes),
            size_words(stage.cut_bytes),
            size_words(stage.kv_bytes_per_token),
            size_words(stage.memory_bytes),
            f"{fused.fused} of {fused.expected}" if inspection.verification is not None else "not tried",
        )
    return table


def _tensor_table(inspection: Inspection) -> Table:
    table = plain_table("into stage", "<tensor that is cut", "numbers/token", "<type")
    for stage in inspection.stages:
        for tensor in stage.cut_tensors:
            table.add_row(str(stage.stage), tensor.name, f"{tensor.width:,}", tensor.element_type)
    return table


def _faults(inspection: Inspection) -> Iterator[tuple[int, Sequence[FusionFault]]]:
    for stage in inspection.stages:
        yield stage.stage, stage.fusion_faults


def _fault_table(faults: Iterable[tuple[int, Sequence[FusionFault]]]) -> Table:
    table = plain_table("stage", "<rule of fusion", "<on", "<node that breaks it")
    for stage, found in faults:
        for fault in found:
            table.add_row(str(stage), f"{fault.rule}: {fault.reason}", ", ".join(fault.plugins), fault.node)
    return table


def _case_table(found: Verification | Check | None) -> Table:
    sampled = " (a sample)" if found is not None and found.sampled else ""
    table = plain_table(f"<case of the check{sampled}", "largest difference")
    for case in found.cases if found is not None else ():
        table.add_row(case.case, f"{case.max_abs_diff:.3g}")
    return table
