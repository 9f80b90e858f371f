"""The store: what is there is right, whenever the agent was killed; nothing is fetched twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.shard_store import DISK_RESERVE_BYTES, ShardStore
from fleet.errors import TransferError
from fleet.manifest import load_manifest
from fleet.transfer_files import journal_of

DEPLOYMENT = "0123456789ab"


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "store")


def receive(store: ShardStore, shards: Path, stage: int) -> None:
    """As a transfer does it: every file into its place among the incoming ones."""
    parts = load_manifest(shards).stages[stage]
    for entry in (parts.graph, *load_manifest(shards).tokenizer):
        shutil.copyfile(shards / entry.name, store.incoming_path(entry.sha256))
        store.admit_blob(entry.sha256)
    weights = (shards / parts.weights.name).read_bytes()
    with store.incoming_path(parts.weights.sha256).open("wb") as file:
        for place in parts.runs:
            file.seek(place.offset)
            file.write(weights[place.offset : place.offset + load_manifest(shards).run(place.sha256).bytes])
    store.admit_weights(load_manifest(shards), stage)


def test_a_published_stage_is_the_shard(store: ShardStore, shards: Path) -> None:
    receive(store, shards, 0)
    folder = store.publish(DEPLOYMENT, load_manifest(shards), 0, with_tokenizer=True)
    parts = load_manifest(shards).stages[0]
    for name in (parts.graph.name, parts.weights.name, "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (shards / name).read_bytes()
    assert load_manifest(folder) == load_manifest(shards)
    assert store.publish(DEPLOYMENT, load_manifest(shards), 0, with_tokenizer=True) == folder
    assert store.published() == [(DEPLOYMENT, 0, load_manifest(shards))]


def test_release_keeps_the_files(store: ShardStore, shards: Path) -> None:
    receive(store, shards, 0)
    held = store.held_bytes()
    folder = store.publish(DEPLOYMENT, load_manifest(shards), 0, with_tokenizer=False)
    store.release(DEPLOYMENT)
    assert not folder.exists()
    assert store.published() == []
    assert store.held_bytes() == held


def test_the_store_is_the_same_after_a_restart(store: ShardStore, shards: Path, tmp_path: Path) -> None:
    receive(store, shards, 1)
    again = ShardStore(tmp_path / "store")
    weights = load_manifest(shards).stages[1].weights
    assert again.weights(weights.sha256) is not None
    assert all(again.holds_run(place.sha256) for place in load_manifest(shards).stages[1].runs)
    assert again.held_bytes() == store.held_bytes()


def test_another_cut_finds_the_layers_it_needs(
    store: ShardStore, shards: Path, make_shards: Callable[..., Path], tmp_path: Path
) -> None:
    receive(store, shards, 0)
    other = make_shards(tmp_path / "other", cuts=(1,))
    parts = load_manifest(other).stages[1]
    held = [store.holds_run(place.sha256) for place in parts.runs]
    assert held == [True, False, False]
    path = store.incoming_path(parts.weights.sha256)
    assert store.copy_run(parts.runs[0].sha256, path, parts.runs[0].offset)
    assert not store.copy_run(parts.runs[1].sha256, path, parts.runs[1].offset)
    expected = (other / parts.weights.name).read_bytes()
    assert path.read_bytes() == expected[: path.stat().st_size]


def test_damaged_files_are_not_admitted(store: ShardStore, shards: Path) -> None:
    parts = load_manifest(shards).stages[0]
    store.incoming_path(parts.weights.sha256).write_bytes(b"something else")
    with pytest.raises(TransferError, match="damaged"):
        store.admit_weights(load_manifest(shards), 0)
    assert store.weights(parts.weights.sha256) is None
    store.incoming_path(parts.graph.sha256).write_bytes(b"something else")
    with pytest.raises(TransferError, match="damaged"):
        store.admit_blob(parts.graph.sha256)
    assert store.blob(parts.graph.sha256) is None
    with pytest.raises(TransferError, match="does not hold"):
        store.publish(DEPLOYMENT, load_manifest(shards), 0, with_tokenizer=False)


def test_a_weight_file_touched_since_is_checked_again(store: ShardStore, shards: Path, tmp_path: Path) -> None:
    receive(store, shards, 0)
    receive(store, shards, 1)
    good, bad = (stage.weights.sha256 for stage in load_manifest(shards).stages)
    for sha256 in (good, bad):
        path = store.weights(sha256)
        assert path is not None
        content = bytearray(path.read_bytes())
        content[5] ^= 255 if sha256 == bad else 0
        path.write_bytes(content)
    again = ShardStore(tmp_path / "store")
    assert again.weights(good) is not None
    assert again.weights(bad) is None
    assert not again.holds_run(load_manifest(shards).stages[1].runs[0].sha256)


def test_a_copy_from_a_damaged_file_is_refused_and_the_file_forgotten(
    store: ShardStore, shards: Path, tmp_path: Path
) -> None:
    receive(store, shards, 0)
    parts = load_manifest(shards).stages[0]
    path = store.weights(parts.weights.sha256)
    assert path is not None
    path.write_bytes(bytes(path.stat().st_size))
    assert not store.copy_run(parts.runs[0].sha256, tmp_path / "target", 0)
    assert store.weights(parts.weights.sha256) is None


@pytest.mark.parametrize("survivor", ["index only", "weights only", "neither complete"])
def test_what_a_kill_leaves_is_cleaned(store: ShardStore, shards: Path, tmp_path: Path, survivor: str) -> None:
    receive(store, shards, 0)
    sha256 = load_manifest(shards).stages[0].weights.sha256
    weights = tmp_path / "store" / "weights"
    if survivor == "index only":
        (weights / f"{sha256}.bin").unlink()
    elif survivor == "weights only":
        (weights / f"{sha256}.json").unlink()
    else:
        (weights / f"{sha256}.json").write_bytes(b"{")
        (weights / ".cut-off.json.1234").write_bytes(b"{")
        (tmp_path / "store" / "deployments" / DEPLOYMENT / ".0.new").mkdir(parents=True)
    again = ShardStore(tmp_path / "store")
    assert again.weights(sha256) is None
    assert list(weights.iterdir()) == []
    assert again.published() == []
    assert list((tmp_path / "store" / "deployments").glob("*/*")) == []


def test_room_is_made_from_what_no_deployment_uses(store: ShardStore, shards: Path) -> None:
    receive(store, shards, 0)
    receive(store, shards, 1)
    used, unused = (stage.weights.sha256 for stage in load_manifest(shards).stages)
    store.publish(DEPLOYMENT, load_manifest(shards), 0, with_tokenizer=True)

    def free_bytes() -> int:
        return DISK_RESERVE_BYTES + (0 if store.weights(unused) else 500)

    assert store.make_room(400, free_bytes, frozenset())
    assert store.weights(unused) is None
    assert store.weights(used) is not None
    assert not store.make_room(600, free_bytes, frozenset())
    assert store.weights(used) is not None


def test_nothing_is_removed_for_what_would_not_fit_all_the_same(store: ShardStore, shards: Path) -> None:
    receive(store, shards, 1)
    unused = load_manifest(shards).stages[1].weights.sha256
    assert not store.make_room(2**48, lambda: DISK_RESERVE_BYTES, frozenset())
    assert store.weights(unused) is not None


def test_what_receptions_left_unfinished_makes_room_first(store: ShardStore, shards: Path) -> None:
    receive(store, shards, 1)
    unused = load_manifest(shards).stages[1].weights.sha256
    left, kept = store.incoming_path("a" * 64), store.incoming_path("b" * 64)
    for path in (left, kept):
        path.write_bytes(bytes(1000))
        journal_of(path).touch()

    def free_bytes() -> int:
        return DISK_RESERVE_BYTES + (0 if left.exists() else 1000)

    assert store.make_room(900, free_bytes, frozenset({"b" * 64}))
    assert {path.name for path in store.incoming.iterdir()} == {kept.name, journal_of(kept).name}
    assert store.weights(unused) is not None


@pytest.mark.parametrize("name", ["../../etc/passwd", "x" * 64, "a" * 63, ""])
def test_only_hashes_name_files(store: ShardStore, name: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        store.incoming_path(name)
    with pytest.raises(ValueError, match=r".*"):
        store.folder("../x", 0)
