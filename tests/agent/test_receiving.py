"""A reception with a fetcher that plays a part."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from agent import receiving
from agent.receiving import Reception
from agent.shard_store import DISK_RESERVE_BYTES, ShardStore
from fleet.errors import TransferError
from fleet.manifest import MANIFEST_NAME, encode_manifest, load_manifest
from fleet.transfer import Wanted

DEPLOYMENT = "0123456789ab"


class PlayedFetcher:
    """Has everything at hand, or breaks, or is silent."""

    def __init__(self, shards: Path, fault: Exception | None = None, silent: bool = False) -> None:
        self._contents: dict[str, bytes] = {}
        self._fault = fault
        self._silent = silent
        self.fetched_bytes = 0
        manifest = load_manifest(shards)
        for stage in manifest.stages:
            weights = (shards / stage.weights.name).read_bytes()
            for place in stage.runs:
                self._contents[place.sha256] = weights[place.offset : place.offset + manifest.run(place.sha256).bytes]
            self._contents[stage.graph.sha256] = (shards / stage.graph.name).read_bytes()
        for entry in manifest.tokenizer:
            self._contents[entry.sha256] = (shards / entry.name).read_bytes()

    async def fetch(self, deployment: str, wanted: Sequence[Wanted], on_progress: Callable[[int], None]) -> None:
        assert deployment == DEPLOYMENT
        if self._fault is not None:
            raise self._fault
        if self._silent:
            await asyncio.Event().wait()
        for piece in wanted:
            piece.path.touch()
            with piece.path.open("r+b") as file:
                file.seek(piece.offset)
                file.write(self._contents[piece.sha256])
            self.fetched_bytes += piece.bytes
            on_progress(self.fetched_bytes)


def receive(store: ShardStore, fetcher: PlayedFetcher, shards: Path, stage: int) -> Reception:
    async def main() -> Reception:
        ended = asyncio.Event()
        reception = Reception(
            store, fetcher, asyncio.Lock(), DEPLOYMENT, load_manifest(shards), stage, on_end=ended.set
        )
        await asyncio.wait_for(ended.wait(), 20.0)
        return reception

    return asyncio.run(main())


def test_it_is_there_when_it_says_so(tmp_path: Path, shards: Path) -> None:
    store, fetcher = ShardStore(tmp_path / "store"), PlayedFetcher(shards)
    reception = receive(store, fetcher, shards, 0)
    assert reception.complete
    assert reception.progress.done_bytes == reception.progress.total_bytes == fetcher.fetched_bytes
    folder = store.folder(DEPLOYMENT, 0)
    for name in ("stage-0.bin", "stage-0.xml", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (shards / name).read_bytes()


def test_only_the_layers_that_are_missing_are_fetched(
    tmp_path: Path, shards: Path, make_shards: Callable[..., Path]
) -> None:
    store = ShardStore(tmp_path / "store")
    receive(store, PlayedFetcher(shards), shards, 0)
    other = make_shards(tmp_path / "other", cuts=(3,))
    fetcher = PlayedFetcher(other)
    reception = receive(store, fetcher, other, 0)
    manifest = load_manifest(other)
    parts = manifest.stages[0]
    assert reception.failure is None
    assert fetcher.fetched_bytes == manifest.run(parts.runs[2].sha256).bytes + parts.graph.bytes
    assert reception.progress.held_bytes == reception.progress.total_bytes - fetcher.fetched_bytes


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (TransferError("The disk is full."), "The disk is full."),
        (PermissionError(13, "Permission denied"), "The store cannot be written: Permission denied."),
        (ZeroDivisionError("oops"), "internal error (ZeroDivisionError: oops)"),
    ],
)
def test_what_goes_wrong_is_told_in_words(tmp_path: Path, shards: Path, fault: Exception, words: str) -> None:
    reception = receive(ShardStore(tmp_path / "store"), PlayedFetcher(shards, fault), shards, 1)
    assert not reception.complete
    assert reception.failure is not None
    assert words in reception.failure


def test_silence_is_given_up(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "SILENCE_S", 0.1)
    reception = receive(ShardStore(tmp_path / "store"), PlayedFetcher(shards, silent=True), shards, 1)
    assert reception.failure is not None
    assert "Nothing has arrived" in reception.failure


def test_a_full_disk_is_told_before_anything_is_fetched(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr("agent.receiving.psutil.disk_usage", lambda path: usage)
    fetcher = PlayedFetcher(shards)
    reception = receive(ShardStore(tmp_path / "store"), fetcher, shards, 1)
    assert reception.failure is not None
    assert "The disk has 1 MB free" in reception.failure
    assert fetcher.fetched_bytes == 0


def test_graphs_and_tokenizers_leave_the_reserve_alone_too(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ShardStore(tmp_path / "store")
    assert receive(store, PlayedFetcher(shards), shards, 0).complete
    manifest = load_manifest(shards)
    graph = msgspec.structs.replace(manifest.stages[0].graph, sha256="f" * 64, bytes=2 << 20)
    stages = (msgspec.structs.replace(manifest.stages[0], graph=graph), *manifest.stages[1:])
    (shards / MANIFEST_NAME).write_bytes(encode_manifest(msgspec.structs.replace(manifest, stages=stages)))
    usage = shutil.disk_usage(tmp_path)._replace(free=DISK_RESERVE_BYTES + (1 << 20))
    monkeypatch.setattr("agent.receiving.psutil.disk_usage", lambda path: usage)
    reception = receive(store, PlayedFetcher(shards), shards, 0)
    assert reception.failure is not None
    assert "make room on this PC" in reception.failure


def test_two_files_of_the_same_content_arrive(tmp_path: Path, shards: Path) -> None:
    manifest = load_manifest(shards)
    [entry] = manifest.tokenizer
    twin = msgspec.structs.replace(entry, name="special_tokens_map.json")
    shutil.copy(shards / entry.name, shards / twin.name)
    (shards / MANIFEST_NAME).write_bytes(encode_manifest(msgspec.structs.replace(manifest, tokenizer=(entry, twin))))
    store = ShardStore(tmp_path / "store")
    reception = receive(store, PlayedFetcher(shards), shards, 0)
    assert reception.failure is None
    folder = store.folder(DEPLOYMENT, 0)
    assert (folder / twin.name).read_bytes() == (folder / entry.name).read_bytes() == b"{}"


def test_a_cancelled_reception_leaves_the_next_its_turn(tmp_path: Path, shards: Path) -> None:
    async def main() -> None:
        store, turn = ShardStore(tmp_path / "store"), asyncio.Lock()
        manifest = load_manifest(shards)
        silent, willing = PlayedFetcher(shards, silent=True), PlayedFetcher(shards)
        ended = asyncio.Event()
        first = Reception(store, silent, turn, DEPLOYMENT, manifest, 0, on_end=lambda: None)
        await asyncio.sleep(0)
        second = Reception(store, willing, turn, DEPLOYMENT, manifest, 1, on_end=ended.set)
        await asyncio.sleep(0)
        assert "waiting" in second.detail
        await first.cancel()
        await asyncio.wait_for(ended.wait(), 20.0)
        assert second.complete
        assert first.failure is None

    asyncio.run(main())
