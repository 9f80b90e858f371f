"""Compares two cuts: whether they are of one model, and what a node that serves the one lacks for the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from fleet.errors import ModelError
from fleet.manifest import (
    FileEntry,
    Manifest,
    Run,
    RunKind,
    Stage,
    Verification,
    WeightFormat,
    decode_manifest,
    load_manifest,
)

Side = Literal["a", "b", "both"]


class Described(msgspec.Struct, frozen=True):
    """One side of the comparison. ``cuts`` are the first layers of its stages but stage 0."""

    name: str
    model_id: str
    layers: int
    stages: int
    cuts: tuple[int, ...]


class RunDifference(msgspec.Struct, frozen=True):
    """A run of constants and which side's stages hold it."""

    sha256: str
    bytes: int
    kind: RunKind
    layer: int | None
    held_by: Side


class StageDifference(msgspec.Struct, frozen=True):
    """The stages of one number. Layers are given as first and end (exclusive); None where a side has no such stage.

    ``fetch_bytes`` is what a node that holds a's stage fetches to serve b's: runs and files that it lacks, of
    ``bytes`` in all. Stage 0's node takes the tokenizer's files too.
    """

    stage: int
    layers_a: tuple[int, int] | None
    layers_b: tuple[int, int] | None
    gained_layers: tuple[int, ...]
    lost_layers: tuple[int, ...]
    same_graph: bool
    fetch_bytes: int
    bytes: int


class ValueDifference(msgspec.Struct, frozen=True):
    """A property that the sides do not share, in words."""

    what: str
    a: str
    b: str


class Difference(msgspec.Struct, frozen=True):
    """What tells two manifests apart, a and b."""

    same_model: bool
    """The same weights, tokenizer and configuration: whatever differs is the cut or what was found about it."""
    same_weights: bool
    a: Described
    b: Described
    changed_layers: tuple[int, ...]
    """Layers that both have, with other bytes."""
    stages: tuple[StageDifference, ...]
    runs: tuple[RunDifference, ...]
    bytes_only_in_a: int
    """Of runs; a run counts once however many stages hold it."""
    bytes_only_in_b: int
    bytes_in_both: int
    fetch_bytes: int
    """Of all stages together, each on the node that holds a's stage of that number."""
    fetch_bytes_with_all: int
    """What a node fetches that holds all of a's stages, to hold all of b's."""
    files_only_in_a: tuple[str, ...]
    """Tokenizer, configuration and licence files."""
    files_only_in_b: tuple[str, ...]
    changed_files: tuple[str, ...]
    values: tuple[ValueDifference, ...]


def diff(a: Path, b: Path) -> Difference:
    """Compares two shard folders, or manifests that were kept of them. Only the manifests are read.

    Raises:
        ModelError: one of them is neither, or cannot be read.
    """
    return compare(_manifest(a), _manifest(b))


def _manifest(path: Path) -> Manifest:
    try:
        if not path.is_file():
            return load_manifest(path)
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    return decode_manifest(text, str(path))


def compare(a: Manifest, b: Manifest) -> Difference:
    """The difference of two manifests."""
    runs = tuple(_runs(a, b))
    stages = tuple(_stage(a, b, number) for number in range(max(len(a.stages), len(b.stages))))
    files_a, files_b = ({entry.name: entry.sha256 for entry in side.tokenizer} for side in (a, b))
    return Difference(
        same_model=a.model_id == b.model_id,
        same_weights={run.sha256 for run in _model_runs(a)} == {run.sha256 for run in _model_runs(b)},
        a=Described(a.name, a.model_id, len(a.layers), len(a.stages), a.cuts),
        b=Described(b.name, b.model_id, len(b.layers), len(b.stages), b.cuts),
        changed_layers=_changed_layers(a, b),
        stages=stages,
        runs=runs,
        bytes_only_in_a=sum(run.bytes for run in runs if run.held_by == "a"),
        bytes_only_in_b=sum(run.bytes for run in runs if run.held_by == "b"),
        bytes_in_both=sum(run.bytes for run in runs if run.held_by == "both"),
        fetch_bytes=sum(stage.fetch_bytes for stage in stages),
        fetch_bytes_with_all=_lacking(_pieces(a, a.stages), _pieces(b, b.stages)),
        files_only_in_a=tuple(name for name in files_a if name not in files_b),
        files_only_in_b=tuple(name for name in files_b if name not in files_a),
        changed_files=tuple(name for name in files_a if name in files_b and files_a[name] != files_b[name]),
        values=tuple(_values(a, b)),
    )


def _model_runs(manifest: Manifest) -> list[Run]:
    return [run for run in manifest.runs if run.kind != "cut"]


def _runs(a: Manifest, b: Manifest) -> Iterable[RunDifference]:
    of_a, of_b = ({run.sha256: run for run in side.runs} for side in (a, b))
    for digest, run in (of_a | of_b).items():
        held_by: Side = "both" if digest in of_a and digest in of_b else "a" if digest in of_a else "b"
        yield RunDifference(digest, run.bytes, run.kind, run.layer, held_by)


def _changed_layers(a: Manifest, b: Manifest) -> tuple[int, ...]:
    of_a, of_b = (
        {run.layer: run.sha256 for run in side.runs if run.kind == "layer" and run.layer is not None} for side in (a, b)
    )
    return tuple(sorted(layer for layer, digest in of_a.items() if of_b.get(layer, digest) != digest))


def _stage(a: Manifest, b: Manifest, number: int) -> StageDifference:
    one, two = (side.stages[number] if number < len(side.stages) else None for side in (a, b))
    held, wanted = _layers(one), _layers(two)
    pieces = _pieces(b, (two,) if two else ())
    return StageDifference(
        stage=number,
        layers_a=(one.first_layer, one.end_layer) if one else None,
        layers_b=(two.first_layer, two.end_layer) if two else None,
        gained_layers=tuple(layer for layer in wanted if layer not in held),
        lost_layers=tuple(layer for layer in held if layer not in wanted),
        same_graph=one is not None and two is not None and one.graph.sha256 == two.graph.sha256,
        fetch_bytes=_lacking(_pieces(a, (one,) if one else ()), pieces),
        bytes=sum(pieces.values()),
    )


def _layers(stage: Stage | None) -> range:
    return range(stage.first_layer, stage.end_layer) if stage else range(0)


def _pieces(manifest: Manifest, stages: Iterable[Stage]) -> dict[str, int]:
    """By hash the bytes of everything that the nodes of these stages keep."""
    files: list[FileEntry] = []
    pieces: dict[str, int] = {}
    for stage in stages:
        files += (stage.graph, *(manifest.tokenizer if stage.stage == 0 else ()))
        pieces |= {place.sha256: manifest.run(place.sha256).bytes for place in stage.runs}
    return pieces | {entry.sha256: entry.bytes for entry in files}


def _lacking(held: dict[str, int], wanted: dict[str, int]) -> int:
    return sum(size for digest, size in wanted.items() if digest not in held)


def _values(a: Manifest, b: Manifest) -> Iterable[ValueDifference]:
    for what, tell in _PROPERTIES:
        one, two = tell(a), tell(b)
        if one != two:
            yield ValueDifference(what, one, two)


def _tell_check(check: Verification | None) -> str:
    if check is None:
        return "not checked"
    sampled = ", a sample" if check.sampled else ""
    return (
        f"{check.device}, KV cache in {check.kv_precision}, OpenVINO {check.openvino_version.split('-')[0]}{sampled}: "
        f"largest difference of a logit {check.max_abs_diff:.3g}, same greedy token at {check.greedy_match:.1%}"
    )


def _tell_formats(formats: Iterable[WeightFormat]) -> str:
    return ", ".join(f"{item.element_type} {item.bytes:,} bytes" for item in formats) or "not told"


def _tell_paged(manifest: Manifest) -> str:
    if manifest.paged is None:
        return "not tried"
    return "served" if manifest.paged.served else f"not served: {manifest.paged.reason}"


def _tell_fusion(manifest: Manifest) -> str:
    fused = sum(stage.fused_attention for stage in manifest.stages)
    faults = sum(len(stage.fusion_faults) for stage in manifest.stages)
    return f"{fused} of {sum(stage.expected_attention for stage in manifest.stages)}, faults: {faults}"


_PROPERTIES: tuple[tuple[str, Callable[[Manifest], str]], ...] = (
    ("name", lambda manifest: manifest.name),
    ("architecture", lambda manifest: manifest.architecture),
    ("layers", lambda manifest: str(len(manifest.layers))),
    ("hidden size", lambda manifest: str(manifest.hidden_size)),
    ("vocabulary", lambda manifest: str(manifest.vocabulary_size)),
    ("trained context", lambda manifest: str(manifest.context_tokens)),
    ("weight formats", lambda manifest: _tell_formats(manifest.weight_formats)),
    ("stop tokens", lambda manifest: ", ".join(map(str, manifest.stop_token_ids)) or "none"),
    ("chat template", lambda manifest: "yes" if manifest.has_chat_template else "no"),
    ("KV precision", lambda manifest: manifest.kv_precision),
    ("check", lambda manifest: _tell_check(manifest.verification)),
    ("fused attention", _tell_fusion),
    ("rollback", lambda manifest: ", ".join(manifest.rollback) or "none"),
    ("paged form", _tell_paged),
)
