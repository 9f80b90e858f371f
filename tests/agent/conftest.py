"""A shard folder made of random bytes: everything about it is right but its graphs, which nobody opens here."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.manifest import (
    MANIFEST_NAME,
    RUN_ALIGNMENT_BYTES,
    FileEntry,
    Layer,
    Manifest,
    Run,
    RunPlace,
    Stage,
    encode_manifest,
)

os.environ["QT_QPA_PLATFORM"] = "offscreen"  # before Qt is loaded, for the tray's tests


def write_shards(folder: Path, cuts: tuple[int, ...], layers: int = 4, layer_bytes: int = 10_000) -> Path:
    """A folder of shards cut before the layers ``cuts``; the runs of a layer are the same wherever the cuts are."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = [random.Random(layer).randbytes(layer_bytes + layer) for layer in range(layers)]
    runs = [
        Run(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content), kind="layer", layer=layer)
        for layer, content in enumerate(contents)
    ]
    edges = (0, *cuts, layers)
    stages = []
    for number, (first, end) in enumerate(itertools.pairwise(edges)):
        weights, places = bytearray(), []
        for layer in range(first, end):
            weights += bytes(-len(weights) % RUN_ALIGNMENT_BYTES)
            places.append(RunPlace(runs[layer].sha256, len(weights)))
            weights += contents[layer]
        weights += bytes(17)  # padding behind the last run belongs to the file
        stages.append(
            Stage(
                stage=number,
                first_layer=first,
                end_layer=end,
                bytes=len(weights),
                graph=_write(folder, f"stage-{number}.xml", f"graph {first}-{end}".encode()),
                weights=_write(folder, f"stage-{number}.bin", bytes(weights)),
                runs=tuple(places),
                inputs=("input_ids",),
            )
        )
    manifest = Manifest(
        manifest_version=1,
        model_id="fake",
        name="Fake",
        architecture="fake",
        hidden_size=8,
        vocabulary_size=16,
        context_tokens=128,
        kv_precision="f16",
        layers=tuple(Layer(index, layer_bytes, 4, 8) for index in range(layers)),
        runs=tuple(runs),
        stages=tuple(stages),
        tokenizer=(_write(folder, "tokenizer_config.json", b"{}"),),
        stop_token_ids=(2,),
    )
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return folder


def _write(folder: Path, name: str, content: bytes) -> FileEntry:
    (folder / name).write_bytes(content)
    return FileEntry(name, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def make_shards() -> Callable[..., Path]:
    """``write_shards``: folder and cuts, and if wanted layers and layer_bytes, make a shard folder."""
    return write_shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Four layers in two stages of two."""
    return write_shards(tmp_path / "shards", cuts=(2,))
