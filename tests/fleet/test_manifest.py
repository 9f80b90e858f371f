from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ModelError
from fleet.manifest import (
    MANIFEST_NAME,
    RUN_ALIGNMENT_BYTES,
    FileEntry,
    Layer,
    Manifest,
    Run,
    RunPlace,
    Stage,
    decode_manifest,
    encode_manifest,
    load_manifest,
)
from fleet.memory_need import stage_memory

SHA = "ab" * 32


def file_entry(name: str, size: int) -> FileEntry:
    return FileEntry(name, size, SHA)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    sizes = draw(st.lists(st.integers(1, 3 * RUN_ALIGNMENT_BYTES), min_size=1, max_size=8))
    cuts = sorted(draw(st.sets(st.integers(1, len(sizes) - 1), max_size=3))) if len(sizes) > 1 else []
    edges = [0, *cuts, len(sizes)]
    stages = []
    for number, (first, end) in enumerate(pairwise(edges)):
        places, offset = [], 0
        for layer in range(first, end):
            places.append(RunPlace(f"{layer:064x}", offset))
            offset += -(-sizes[layer] // RUN_ALIGNMENT_BYTES) * RUN_ALIGNMENT_BYTES
        stages.append(
            Stage(
                stage=number,
                first_layer=first,
                end_layer=end,
                bytes=offset,
                graph=file_entry(f"stage-{number}.xml", 10),
                weights=file_entry(f"stage-{number}.bin", offset),
                runs=tuple(places),
                inputs=("input_ids",),
            )
        )
    return Manifest(
        manifest_version=1,
        model_id="m",
        name="m",
        architecture="llama",
        hidden_size=8,
        vocabulary_size=8,
        context_tokens=0,
        kv_precision="f16",
        layers=tuple(Layer(index, size, 2, 4) for index, size in enumerate(sizes)),
        runs=tuple(Run(f"{index:064x}", size, "layer", index) for index, size in enumerate(sizes)),
        stages=tuple(stages),
        tokenizer=(),
        stop_token_ids=(),
    )


@given(manifests())
def test_a_manifest_survives(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.cuts == tuple(stage.first_layer for stage in manifest.stages[1:])


@settings(max_examples=200)
@given(manifests(), st.randoms(use_true_random=False))
def test_a_mutated_manifest_is_refused_or_consistent(manifest: Manifest, source: random.Random) -> None:
    data = bytearray(encode_manifest(manifest))
    for _ in range(source.randint(1, 3)):
        position = source.randrange(len(data))
        data[position : position + source.randrange(3)] = bytes(
            source.choice(b'0123456789"{}[],:xf-') for _ in range(2)
        )
    try:
        read = decode_manifest(bytes(data))
    except ModelError:
        return
    known = {run.sha256: run.bytes for run in read.runs}
    assert [stage.first_layer for stage in read.stages[1:]] == [stage.end_layer for stage in read.stages[:-1]]
    for stage in read.stages:
        end = 0
        for place in stage.runs:
            assert place.offset >= end
            end = place.offset + known[place.sha256]
        assert end <= stage.weights.bytes


def changed(path: tuple[str | int, ...], value: Any) -> bytes:
    """A good manifest of two stages with one value replaced."""
    layers = [
        {"index": 0, "bytes": 10, "kv_elements_per_token": 1, "kv_bytes_per_token": 2},
        {"index": 1, "bytes": 10, "kv_elements_per_token": 1, "kv_bytes_per_token": 2},
    ]
    stages = [
        {
            "stage": number,
            "first_layer": number,
            "end_layer": number + 1,
            "bytes": 10,
            "graph": {"name": f"{number}.xml", "bytes": 1, "sha256": SHA},
            "weights": {"name": f"{number}.bin", "bytes": 10, "sha256": SHA},
            "runs": [{"sha256": f"{number:064x}", "offset": 0}],
            "inputs": [],
        }
        for number in range(2)
    ]
    content: Any = {
        "manifest_version": 1,
        "model_id": "m",
        "name": "m",
        "architecture": "",
        "hidden_size": 1,
        "vocabulary_size": 1,
        "context_tokens": 0,
        "kv_precision": "f16",
        "layers": layers,
        "runs": [{"sha256": f"{number:064x}", "bytes": 10, "kind": "layer", "layer": number} for number in range(2)],
        "stages": stages,
        "tokenizer": [],
        "stop_token_ids": [],
    }
    if path:
        place = content
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    return msgspec.json.encode(content)


def test_the_unchanged_one_is_good() -> None:
    assert len(decode_manifest(changed((), None)).stages) == 2


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("manifest_version",), 2),
        (("surprise",), 1),
        (("stages", 0, "graph", "name"), "../../etc/passwd"),
        (("stages", 0, "graph", "name"), "C:\\x"),
        (("stages", 0, "graph", "name"), "a/b.xml"),
        (("stages", 0, "graph", "name"), ".hidden"),
        (("stages", 0, "graph", "name"), ""),
        (("stages", 0, "graph", "name"), "0.xml\n"),
        (("stages", 0, "graph", "sha256"), SHA + "\n"),
        (("stages", 0, "bytes"), 9),
        (("runs", 1), {"sha256": "0" * 64, "bytes": 11, "kind": "layer", "layer": 1}),
        (("stages", 0, "graph", "name"), "1.BIN"),
        (("stages", 0, "graph", "name"), "NUL.xml"),
        (("stages", 0, "graph", "name"), "trailing."),
        (("stages", 0, "graph", "name"), "Manifest.json"),
        (("stages", 0, "runs", 0, "sha256"), "f" * 64),
        (("stages", 0, "runs", 0, "sha256"), "F" * 64),
        (("stages", 0, "runs", 0, "offset"), 1),
        (("stages", 0, "runs", 0, "offset"), -4096),
        (("stages", 0, "runs", 0, "offset"), 4096),
        (("stages", 1, "first_layer"), 0),
        (("stages", 1, "end_layer"), 3),
        (("stages", 1, "stage"), 5),
        (("runs", 0, "bytes"), 2**60),
        (("kv_precision",), "f64"),
        (("vocabulary_size",), 0),
        (("layers", 1, "index"), 0),
        (("layers", 1, "borrowed_caches"), [1]),
        (("layers", 1, "borrowed_caches"), [99]),
        (("layers", 0, "weight_formats"), [{"element_type": "u4", "bytes": 0}]),
        (("weight_formats",), [{"element_type": "u4", "bytes": 0}]),
        (("runs", 0, "parts"), [3]),
        (("runs", 0, "parts"), [-2]),
        (("runs", 0, "layer"), 2),
        (("runs", 0, "anonymous_bytes"), [1, 2]),
        (("stages", 1, "cut_tensors"), [{"name": "hidden", "width": 0, "element_type": "f32"}]),
    ],
)
def test_what_does_not_hold_together_is_refused(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(ModelError):
        decode_manifest(changed(path, value))


def test_a_model_of_nothing_is_refused() -> None:
    content = msgspec.json.decode(changed((), None))
    with pytest.raises(ModelError, match="no layers"):
        decode_manifest(msgspec.json.encode(content | {"layers": [], "stages": [], "runs": []}))


numbers = st.integers(-2, 4)
edits = st.one_of(
    st.tuples(st.just(("runs", 0, "parts")), st.lists(numbers, max_size=3)),
    st.tuples(st.just(("runs", 0, "layer")), numbers),
    st.tuples(st.just(("runs", 0, "anonymous_bytes")), st.lists(numbers, max_size=3)),
    st.tuples(st.just(("layers", 1, "index")), numbers),
    st.tuples(st.just(("layers", 1, "borrowed_caches")), st.lists(numbers, max_size=3)),
    st.tuples(st.just(("vocabulary_size",)), numbers),
)


@given(edits)
def test_an_edited_manifest_is_refused_or_its_memory_can_be_told(edit: tuple[tuple[str | int, ...], Any]) -> None:
    try:
        manifest = decode_manifest(changed(*edit))
    except ModelError:
        return
    for stage in manifest.stages:
        assert stage_memory(manifest, stage, context_tokens=16).mapped_bytes >= 0


def test_a_folder_without_a_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="paceline shard build"):
        load_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(changed((), None))
    assert load_manifest(tmp_path).name == "m"
