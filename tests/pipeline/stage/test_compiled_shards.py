"""Blobs of compiled shards: used where all of it fits, compiled anew with a reason where anything does not."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray
from openvino import opset13

from fleet.compiled_shards import COMPILED_FOLDER, RECORD_NAME, CompiledShard, read_record
from fleet.manifest import FileEntry, Layer, Manifest, Stage, encode_manifest
from pipeline.stage import compilation
from pipeline.stage.runtime import ShardRuntime
from pipeline.stage.shard import DeviceOptions, Shard, load_shard

HIDDEN, VOCABULARY = 16, 40
OPTIONS = DeviceOptions("CPU", "f16", threads=1)


def write_shards(folder: Path) -> Path:
    """A model of one stage: an embedding, a state that grows, and a head, with weights of its own."""
    random = np.random.default_rng(5)

    def weight(*shape: int) -> Any:
        return opset13.constant(random.standard_normal(shape).astype(np.float32))

    def parameter(name: str, shape: list[int]) -> Any:
        found = opset13.parameter(ov.PartialShape(shape), ov.Type.i64, name)
        found.output(0).get_tensor().set_names({name})
        return found

    tokens, sampled = parameter("input_ids", [-1, -1]), parameter("sampled_positions", [-1])
    rows = opset13.gather(weight(VOCABULARY, HIDDEN), tokens, opset13.constant(np.int64(0)))
    past = opset13.read_value(
        opset13.constant(np.zeros((1, 0, HIDDEN), np.float32)), "cache", ov.Type.f32, ov.PartialShape([1, -1, HIDDEN])
    )
    everything = opset13.concat([past, rows], 1)
    mixed = opset13.add(rows, opset13.reduce_mean(everything, np.array([1]), keep_dims=True))
    kept = opset13.gather(mixed, sampled, opset13.constant(np.int64(1)))
    logits = opset13.result(opset13.matmul(kept, weight(VOCABULARY, HIDDEN), False, True))
    logits.output(0).get_tensor().set_names({"logits"})
    model = ov.Model([logits], [opset13.assign(everything, "cache")], [tokens, sampled], "one stage")
    folder.mkdir()
    ov.serialize(model, folder / "stage-0.xml", folder / "stage-0.bin")
    graph, weights = (entry(folder / f"stage-0.{suffix}") for suffix in ("xml", "bin"))
    stage = Stage(0, 0, 1, weights.bytes, graph, weights, (), ("input_ids", "sampled_positions"))
    layer = Layer(0, weights.bytes, HIDDEN, 2 * HIDDEN)
    manifest = Manifest(1, "id", "tiny", "tiny", HIDDEN, VOCABULARY, 0, "f16", (layer,), (), (stage,), (), ())
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    return folder


def entry(path: Path) -> FileEntry:
    return FileEntry(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def logits(shard: Shard) -> NDArray[np.float32]:
    runtime = ShardRuntime(shard)
    steps = [runtime.run_tokens(0, start, tokens, len(tokens)).copy() for start, tokens in ((0, (1, 2, 3)), (3, (4,)))]
    return np.concatenate(steps)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_shards(tmp_path_factory.mktemp("compiled") / "shards")
    shard = load_shard(folder, 0, OPTIONS, keep_compiled=True)
    assert shard.loaded.words == f"compiled here: {compilation.NO_BLOB}; kept for the next start"
    return folder


@pytest.fixture(scope="module")
def expected(compiled_once: Path, tmp_path_factory: pytest.TempPathFactory) -> NDArray[np.float32]:
    folder = write_shards(tmp_path_factory.mktemp("plain") / "shards")
    shard = load_shard(folder, 0, OPTIONS)
    assert shard.loaded.words == f"compiled here: {compilation.NO_BLOB}"
    assert not (folder / COMPILED_FOLDER).exists()
    return logits(shard)


@pytest.fixture
def folder(compiled_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled_once, tmp_path / "shards"))


def blob_folder(folder: Path) -> Path:
    (found,) = (folder / COMPILED_FOLDER).iterdir()
    return found


def record_of(folder: Path) -> CompiledShard:
    record = read_record(blob_folder(folder))
    assert record is not None
    return record


def rewrite_record(folder: Path, **changes: object) -> None:
    record = msgspec.structs.replace(record_of(folder), **changes)
    (blob_folder(folder) / RECORD_NAME).write_bytes(msgspec.json.encode(record))


def test_a_blob_is_imported_and_gives_the_same_numbers(folder: Path, expected: NDArray[np.float32]) -> None:
    shard = load_shard(folder, 0, OPTIONS)
    assert shard.loaded.words == "imported the compiled shard"
    np.testing.assert_array_equal(logits(shard), expected)
    # The number of threads is none of the properties that a blob is made with.
    assert not load_shard(folder, 0, DeviceOptions("CPU", "f16", threads=2)).loaded.why_compiled
    assert load_shard(folder, 0, DeviceOptions("CPU", "f32", threads=1)).loaded.why_compiled == compilation.NO_BLOB
    exact = DeviceOptions("CPU", "f16", threads=1, inference_precision="f32")
    assert load_shard(folder, 0, exact).loaded.why_compiled == compilation.NO_BLOB


def test_a_blob_is_found_in_another_folder(folder: Path, compiled_once: Path, expected: NDArray[np.float32]) -> None:
    shutil.rmtree(folder / COMPILED_FOLDER)
    shard = load_shard(folder, 0, OPTIONS, compiled_folders=(folder / "none", compiled_once / COMPILED_FOLDER))
    assert not shard.loaded.why_compiled
    np.testing.assert_array_equal(logits(shard), expected)


def truncate(folder: Path) -> None:
    path = blob_folder(folder) / record_of(folder).blob.name
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit_of_the_weights(folder: Path) -> None:
    path = blob_folder(folder) / record_of(folder).blob.name
    content = bytearray(path.read_bytes())
    content[-64] ^= 1
    path.write_bytes(content)


def take_to_another_kind_of_machine(folder: Path) -> None:
    other = record_of(folder).runtime_requirements.replace("isa=", "isa=Other ")
    rewrite_record(folder, runtime_requirements=other)


def take_from_another_version(folder: Path) -> None:
    rewrite_record(folder, openvino_version="2020.1.0-1")


def damage_the_record(folder: Path) -> None:
    path = blob_folder(folder) / RECORD_NAME
    path.write_bytes(path.read_bytes()[:-9])


def remove_the_blob(folder: Path) -> None:
    (blob_folder(folder) / record_of(folder).blob.name).unlink()


def swap_the_shard(folder: Path) -> None:
    made_from = msgspec.structs.replace(record_of(folder).made_from, weights_sha256="0" * 64)
    rewrite_record(folder, made_from=made_from)


def forge_a_blob(folder: Path) -> None:
    """The record fits, and OpenVINO itself refuses what lies there."""
    path = blob_folder(folder) / record_of(folder).blob.name
    path.write_bytes(path.read_bytes()[:300])
    rewrite_record(folder, blob=entry(path))


def take_the_blob_of_another_shard(folder: Path) -> None:
    """The record fits, and OpenVINO imports it: only the inputs tell."""
    record = record_of(folder)
    value = opset13.parameter([1, 8], ov.Type.f32, "inputs_embeds")
    cache = {"CACHE_DIR": str(blob_folder(folder)), "CACHE_BLOB_ID": str(record.made_from.blob_id)}
    (blob_folder(folder) / record.blob.name).unlink()
    properties = {**OPTIONS.properties(), **cache, "CACHE_MODE": "OPTIMIZE_SPEED"}
    ov.Core().compile_model(ov.Model([opset13.relu(value)], [value], "other"), "CPU", properties)
    rewrite_record(folder, blob=entry(blob_folder(folder) / record.blob.name))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (truncate, "has another size than when it was made"),
        (flip_a_bit_of_the_weights, "has changed since it was made"),
        (take_to_another_kind_of_machine, "the blob was made for meta="),
        (take_from_another_version, "the blob was made by OpenVINO 2020.1.0-1, and this is "),
        (damage_the_record, "record.json is damaged"),
        (remove_the_blob, "cannot be read: No such file or directory"),
        (swap_the_shard, "was made from another shard"),
        (forge_a_blob, "OpenVINO refused the blob"),
        (take_the_blob_of_another_shard, "is another shard's and is removed"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_blob_that_is_not_right_is_compiled_anew_and_replaced(
    folder: Path, expected: NDArray[np.float32], spoil: Callable[[Path], None], why: str
) -> None:
    spoil(folder)
    shard = load_shard(folder, 0, OPTIONS, keep_compiled=True)
    assert why in shard.loaded.why_compiled
    assert shard.loaded.words.endswith("; kept for the next start")
    np.testing.assert_array_equal(logits(shard), expected)
    again = load_shard(folder, 0, OPTIONS)
    assert again.loaded.words == "imported the compiled shard"
    np.testing.assert_array_equal(logits(again), expected)


def test_what_lies_beside_a_blob_is_not_given_to_the_device(folder: Path) -> None:
    (blob_folder(folder) / "kernels.cl_cache").write_bytes(b"somebody else's")
    (blob_folder(folder) / "notes.txt").write_bytes(b"the user's")
    assert not load_shard(folder, 0, OPTIONS).loaded.why_compiled
    names = {path.name for path in blob_folder(folder).iterdir()}
    assert names == {RECORD_NAME, record_of(folder).blob.name, "notes.txt"}


def test_a_link_in_place_of_a_blobs_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    link = blob_folder(folder)
    elsewhere = link.rename(tmp_path / "elsewhere")
    (elsewhere / "kernels.cl_cache").write_bytes(b"somebody else's")
    link.symlink_to(elsewhere, target_is_directory=True)
    before = {path.name for path in elsewhere.iterdir()}
    assert "is a link, not a folder of a blob" in load_shard(folder, 0, OPTIONS, keep_compiled=True).loaded.why_compiled
    assert {path.name for path in elsewhere.iterdir()} == before


def test_without_room_for_a_blob_the_shard_is_compiled_all_the_same(
    folder: Path, expected: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder / COMPILED_FOLDER)
    monkeypatch.setattr(compilation, "SPARE_DISK_BYTES", 1 << 60)
    shard = load_shard(folder, 0, OPTIONS, keep_compiled=True)
    assert "not kept for the next start: it needs 1,152," in shard.loaded.words
    np.testing.assert_array_equal(logits(shard), expected)
    assert list((folder / COMPILED_FOLDER).iterdir()) == []


def test_a_folder_that_is_a_file_keeps_no_blob(folder: Path, expected: NDArray[np.float32]) -> None:
    shutil.rmtree(folder / COMPILED_FOLDER)
    (folder / COMPILED_FOLDER).write_bytes(b"")
    shard = load_shard(folder, 0, OPTIONS, keep_compiled=True)
    assert "cannot be written: File exists" in shard.loaded.words
    np.testing.assert_array_equal(logits(shard), expected)


def test_what_an_ended_compilation_left_is_removed_by_the_next(folder: Path) -> None:
    rubbish = folder / COMPILED_FOLDER / ".unfinished-1234"
    rubbish.mkdir()
    (rubbish / "1.blob").write_bytes(b"half")
    load_shard(folder, 0, DeviceOptions("CPU", "f32", threads=1), keep_compiled=True)
    assert not rubbish.exists()
    assert len(list((folder / COMPILED_FOLDER).iterdir())) == 2
