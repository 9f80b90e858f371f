"""Shows how two shard folders differ: tables for people, one JSON document for scripts."""

from __future__ import annotations

import msgspec
from rich.table import Table

from paceline.command import print_json
from paceline.table_words import number_words, plain_table, size_words
from paceline.terminal import PlainConsole
from shard_builder import Difference

_MAX_NAMED_RUNS = 12


def show_difference(difference: Difference, as_json: bool) -> None:
    """Runs that both hold are counted, the others are listed."""
    if as_json:
        print_json(msgspec.json.encode(difference))
        return
    console = PlainConsole()
    for sentence in _sentences(difference):
        console.print(sentence)
    if difference.stages:
        console.print(_stage_table(difference))
        console.print(
            f"To serve B, the nodes of A's stages fetch {size_words(difference.fetch_bytes)} in all, each for B's "
            f"stage of the same number. One node with all of A's stages would fetch "
            f"{size_words(difference.fetch_bytes_with_all)}."
        )
        changed = [stage.stage for stage in difference.stages if not stage.same_graph]
        if changed:
            console.print(f"Stages whose graph files differ: {number_words(changed)}.")
    for table in (_run_table(difference), _value_table(difference)):
        if table.row_count:
            console.print(table)


def _sentences(difference: Difference) -> list[str]:
    a, b = difference.a, difference.b
    if difference.same_model:
        found = [f"A and B are the same model, {a.name}" + (", cut alike." if a.cuts == b.cuts else ", cut elsewhere.")]
    elif difference.same_weights:
        found = ["A and B have the same weights; their tokenizer or configuration differs."]
    else:
        found = [f"A ({a.name}) and B ({b.name}) are different models."]
        if difference.changed_layers and a.layers == b.layers:
            same = a.layers - len(difference.changed_layers)
            found.append(f"Layers with other weights: {number_words(difference.changed_layers)}; the same: {same}.")
    for what, names in (
        ("Files that only A has", difference.files_only_in_a),
        ("Files that only B has", difference.files_only_in_b),
        ("Files that differ", difference.changed_files),
    ):
        if names:
            found.append(f"{what}: {', '.join(names)}.")
    return found


def _stage_table(difference: Difference) -> Table:
    table = plain_table("stage", "A layers", "B layers", "<gained", "<lost", "to fetch", "of")
    for stage in difference.stages:
        table.add_row(
            str(stage.stage),
            _range_words(stage.layers_a),
            _range_words(stage.layers_b),
            number_words(stage.gained_layers),
            number_words(stage.lost_layers),
            size_words(stage.fetch_bytes),
            size_words(stage.bytes),
        )
    return table


def _range_words(layers: tuple[int, int] | None) -> str:
    return "none" if layers is None else number_words(range(*layers))


def _run_table(difference: Difference) -> Table:
    """One row for the runs of each kind and side; a run by its hash only where few differ."""
    table = plain_table("<runs of weights", "number", "size")
    held = (("both", "in both"), ("a", "only in A"), ("b", "only in B"))
    for side, words in held:
        runs = [run for run in difference.runs if run.held_by == side]
        table.add_row(words, str(len(runs)), size_words(sum(run.bytes for run in runs)))
        if side == "both" or len(runs) > _MAX_NAMED_RUNS:
            continue
        for run in runs:
            what = f"layer {run.layer}" if run.layer is not None else run.kind
            table.add_row(f"  {what} {run.sha256[:16]}", "", size_words(run.bytes))
    return table


def _value_table(difference: Difference) -> Table:
    table = plain_table("<differs", "<A", "<B")
    for value in difference.values:
        table.add_row(value.what, value.a, value.b)
    return table
