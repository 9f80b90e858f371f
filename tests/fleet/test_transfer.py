"""Transfers over real sockets: whole, interrupted, killed, tampered with, refused."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from fleet.codec import encode
from fleet.control_messages import Chunk, FetchChunk, TransferHello
from fleet.errors import TransferError
from fleet.identity import Identity
from fleet.manifest import MANIFEST_NAME, FileEntry, Layer, Manifest, Run, RunPlace, Stage, encode_manifest
from fleet.node import PeerAddress
from fleet.sockets import bind_tcp, curve_client_socket, curve_server_socket
from fleet.transfer import TransferReceiver, TransferSource, Wanted, journal_of
from fleet.zap import AllowList, start_zap

AGENT, CONTROLLER, STRANGER = Identity.generate(), Identity.generate(), Identity.generate()
DEPLOYMENT = "0123456789ab"
MutatedMessages = Callable[[Sequence[bytes], int], Sequence[list[bytes]]]
LAYER_BYTES = 5 << 20


def entry(path: Path) -> FileEntry:
    content = path.read_bytes()
    return FileEntry(path.name, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture(scope="module")
def shard_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 5 MiB and a few bytes, a graph, a tokenizer and an empty file."""
    folder = tmp_path_factory.mktemp("shards")
    source = random.Random(7)
    blobs = [source.randbytes(LAYER_BYTES), source.randbytes(LAYER_BYTES + 777)]
    runs = tuple(Run(hashlib.sha256(blob).hexdigest(), len(blob), "layer", index) for index, blob in enumerate(blobs))
    second_offset = LAYER_BYTES + 4096
    (folder / "stage-0.bin").write_bytes(blobs[0] + bytes(4096) + blobs[1])
    (folder / "stage-0.xml").write_bytes(b"<net/>" * 1000)
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "empty.txt").write_bytes(b"")
    weights = entry(folder / "stage-0.bin")
    manifest = Manifest(
        manifest_version=1,
        model_id="model",
        name="model",
        architecture="llama",
        hidden_size=8,
        vocabulary_size=8,
        context_tokens=8,
        kv_precision="f16",
        layers=tuple(Layer(index, run.bytes, 4, 8) for index, run in enumerate(runs)),
        runs=runs,
        stages=(
            Stage(
                stage=0,
                first_layer=0,
                end_layer=2,
                bytes=weights.bytes,
                graph=entry(folder / "stage-0.xml"),
                weights=weights,
                runs=(RunPlace(runs[0].sha256, 0), RunPlace(runs[1].sha256, second_offset)),
                inputs=("input_ids",),
            ),
        ),
        tokenizer=(entry(folder / "tokenizer.json"), entry(folder / "empty.txt")),
        stop_token_ids=(),
    )
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return folder


def all_wanted(shards: Path, destination: Path) -> list[Wanted]:
    manifest = msgspec.json.decode((shards / MANIFEST_NAME).read_bytes(), type=Manifest)
    stage = manifest.stages[0]
    wanted = [
        Wanted(place.sha256, manifest.run(place.sha256).bytes, destination / "stage-0.bin.part", place.offset)
        for place in stage.runs
    ]
    return wanted + [
        Wanted(file.sha256, file.bytes, destination / f"{file.name}.part")
        for file in (stage.graph, *manifest.tokenizer)
    ]


def assert_arrived(shards: Path, destination: Path) -> None:
    names = ("stage-0.bin", "stage-0.xml", "tokenizer.json", "empty.txt")
    for name in names:
        assert (destination / f"{name}.part").read_bytes() == (shards / name).read_bytes()
    assert {path.name for path in destination.iterdir()} == {f"{name}.part" for name in names}


class Receiving:
    """A receiver on loopback with its own context."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.allow_list = AllowList([CONTROLLER.public_key])
        self.zap = start_zap(self.context, self.allow_list)
        self.receiver = TransferReceiver(self.context, AGENT, self.allow_list)
        self.port = self.receiver.start("127.0.0.1")
        self.peer = PeerAddress("PC-1", ("127.0.0.1",), self.port, AGENT.public_key)

    def source(self, folder: Path, identity: Identity = CONTROLLER) -> TransferSource:
        return TransferSource(self.context, identity, self.peer, [DEPLOYMENT], folder)

    def raw_client(self, identity: Identity = CONTROLLER) -> zmq.asyncio.Socket:
        client = curve_client_socket(self.context, zmq.DEALER, identity, AGENT.public_key)
        client.connect(f"tcp://127.0.0.1:{self.port}")
        return client

    async def close(self) -> None:
        await self.receiver.close()
        self.zap.close()
        self.context.destroy(0)


@contextlib.asynccontextmanager
async def receiving() -> AsyncIterator[Receiving]:
    side = Receiving()
    try:
        async with asyncio.timeout(60):
            yield side
    finally:
        await side.close()


async def router_send(router: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """Waits while the peer's queue is full; a ROUTER itself would say so and not wait."""
    while True:
        try:
            await router.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            await asyncio.sleep(0.001)
        else:
            await asyncio.sleep(0)
            return


def test_everything_arrives_and_progress_ends_at_the_total(shard_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with receiving() as side:
            wanted = all_wanted(shard_folder, tmp_path)
            seen: list[int] = []
            task = asyncio.create_task(side.receiver.fetch(DEPLOYMENT, wanted, seen.append))
            source = side.source(shard_folder)
            await task
            assert_arrived(shard_folder, tmp_path)
            assert seen == sorted(seen)
            assert seen[-1] == sum(piece.bytes for piece in wanted) == source.served_bytes
            # A second call finds all in place and fetches nothing.
            await side.receiver.fetch(DEPLOYMENT, wanted)
            assert seen[-1] == source.served_bytes
            await source.close()

    asyncio.run(main())


def test_a_lost_source_is_replaced_without_fetching_again(shard_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with receiving() as side:
            wanted = all_wanted(shard_folder, tmp_path)
            total_bytes = sum(piece.bytes for piece in wanted)
            first = side.source(shard_folder)
            some_arrived = asyncio.Event()

            def progress(arrived_bytes: int) -> None:
                if arrived_bytes > total_bytes // 4:
                    some_arrived.set()

            task = asyncio.create_task(side.receiver.fetch(DEPLOYMENT, wanted, progress))
            await some_arrived.wait()
            await first.close()
            second = side.source(shard_folder)
            await task
            await second.close()
            assert_arrived(shard_folder, tmp_path)
            # At most the window was on the way when the first source ended.
            assert first.served_bytes + second.served_bytes <= total_bytes + (8 << 20)

    asyncio.run(main())


def test_a_cancelled_transfer_goes_on_where_it_stopped(shard_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with receiving() as side:
            wanted = all_wanted(shard_folder, tmp_path)
            total_bytes = sum(piece.bytes for piece in wanted)
            source = side.source(shard_folder)
            arrived = 0
            enough = asyncio.Event()

            def progress(arrived_bytes: int) -> None:
                nonlocal arrived
                arrived = arrived_bytes
                if arrived_bytes > total_bytes // 3:
                    enough.set()

            task = asyncio.create_task(side.receiver.fetch(DEPLOYMENT, wanted, progress))
            await enough.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            kept_bytes, served_before = arrived, source.served_bytes
            begun: list[int] = []
            await side.receiver.fetch(DEPLOYMENT, wanted, begun.append)
            await source.close()
            assert begun[0] >= kept_bytes
            # What was on the way when it was cancelled may still be served.
            assert source.served_bytes - served_before <= total_bytes - kept_bytes + (8 << 20)
            assert_arrived(shard_folder, tmp_path)

    asyncio.run(main())


def receive_in_child(shards: Path, destination: Path, pipe: Any, agent: Identity, controller_key: str) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        allow_list = AllowList([controller_key])
        start_zap(context, allow_list)
        receiver = TransferReceiver(context, agent, allow_list)
        pipe.send(receiver.start("127.0.0.1"))
        await receiver.fetch(DEPLOYMENT, all_wanted(shards, destination), pipe.send)

    asyncio.run(main())


def test_a_killed_receiver_goes_on_where_it_stopped(shard_folder: Path, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(
        target=receive_in_child, args=(shard_folder, tmp_path, theirs, AGENT, CONTROLLER.public_key)
    )
    process.start()
    assert ours.poll(60)
    port = ours.recv()

    async def serve_half() -> None:
        context = zmq.asyncio.Context()
        peer = PeerAddress("PC-1", ("127.0.0.1",), port, AGENT.public_key)
        source = TransferSource(context, CONTROLLER, peer, [DEPLOYMENT], shard_folder)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if ours.poll(0) and ours.recv() > 6 << 20:
                break
            await asyncio.sleep(0.001)
        process.kill()
        await source.close()
        context.destroy(0)

    asyncio.run(serve_half())
    process.join(30)
    journal_lines = journal_of(tmp_path / "stage-0.bin.part").read_bytes().count(b"\n")
    assert journal_lines >= 5

    async def resume() -> None:
        async with receiving() as side:
            wanted = all_wanted(shard_folder, tmp_path)
            begun: list[int] = []
            source = side.source(shard_folder)
            await side.receiver.fetch(DEPLOYMENT, wanted, begun.append)
            await source.close()
            assert begun[0] >= 5 << 20
            assert source.served_bytes <= sum(piece.bytes for piece in wanted) - begun[0]
            assert_arrived(shard_folder, tmp_path)

    asyncio.run(resume())


def test_stale_and_torn_journals_cost_a_fetch_and_nothing_else(shard_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with receiving() as side:
            wanted = all_wanted(shard_folder, tmp_path)
            weights = wanted[0].path
            weights.write_bytes(b"\7" * LAYER_BYTES + bytes(4096) + b"\7" * (LAYER_BYTES + 777))
            lines = [f"{piece.sha256} {piece.offset} {chunk}\n" for piece in wanted[:2] for chunk in range(6)]
            journal_of(weights).write_text("".join(lines) + "\xff nonsense\n" + "torn lin", encoding="latin-1")
            source = side.source(shard_folder)
            await side.receiver.fetch(DEPLOYMENT, wanted)
            await source.close()
            assert_arrived(shard_folder, tmp_path)

    asyncio.run(main())


def test_tampered_bytes_are_noticed_and_named(shard_folder: Path, tmp_path: Path) -> None:
    tampered = tmp_path / "tampered"
    shutil.copytree(shard_folder, tampered)
    with (tampered / "stage-0.bin").open("r+b") as file:
        file.seek(100)
        file.write(b"evil")

    async def main() -> None:
        async with receiving() as side:
            destination = tmp_path / "destination"
            destination.mkdir()
            source = side.source(tampered)
            wanted = all_wanted(shard_folder, destination)
            with pytest.raises(TransferError, match=r"stage-0\.bin\.part arrived damaged"):
                await side.receiver.fetch(DEPLOYMENT, wanted)
            await source.close()
            # With good bytes at the source the same files are completed, and the good layer is not fetched again.
            good = side.source(shard_folder)
            await side.receiver.fetch(DEPLOYMENT, wanted)
            await good.close()
            assert_arrived(shard_folder, destination)

    asyncio.run(main())


def test_what_is_not_published_is_not_served(shard_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with receiving() as side:
            source = side.source(shard_folder)
            with pytest.raises(TransferError, match="does not serve"):
                await side.receiver.fetch(DEPLOYMENT, [Wanted("0" * 64, 10, tmp_path / "x")])
            known = all_wanted(shard_folder, tmp_path)[0]
            with pytest.raises(TransferError, match="has no"):
                await side.receiver.fetch(
                    DEPLOYMENT,
                    [
                        Wanted(known.sha256, known.bytes + 1, tmp_path / "y"),
                    ],
                )
            await source.close()

    asyncio.run(main())


def test_a_file_that_is_gone_at_the_source_is_named(shard_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with receiving() as side:
            incomplete = tmp_path / "incomplete"
            shutil.copytree(shard_folder, incomplete)
            (incomplete / "stage-0.xml").unlink()
            source = side.source(incomplete)
            with pytest.raises(TransferError, match=r"stage-0\.xml cannot be read"):
                await side.receiver.fetch(DEPLOYMENT, all_wanted(shard_folder, tmp_path))
            await source.close()

    asyncio.run(main())


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    shard_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("fleet.transfer_files.shutil.disk_usage", lambda path: real._replace(free=1_000_000))

    async def main() -> None:
        async with receiving() as side:
            source = side.source(shard_folder)
            with pytest.raises(TransferError, match=r"1 MB free and 1\d MB are still to arrive"):
                await side.receiver.fetch(DEPLOYMENT, all_wanted(shard_folder, tmp_path))
            assert source.served_bytes == 0
            await source.close()

    asyncio.run(main())
    assert not list(tmp_path.iterdir())


def test_a_stranger_cannot_offer_files(shard_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with receiving() as side:
            source = side.source(shard_folder, STRANGER)
            while "does not trust" not in source.detail:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not side.receiver.has_source(DEPLOYMENT)
            await source.close()

    asyncio.run(main())


def test_a_slow_reader_does_not_fill_the_senders_memory(shard_folder: Path) -> None:
    """An agent that asks for a gigabyte and reads none of it holds up the sender and nothing more."""

    async def main() -> None:
        context = zmq.asyncio.Context()
        zap = start_zap(context, AllowList([CONTROLLER.public_key]))
        agent = curve_server_socket(context, zmq.ROUTER, AGENT, high_water_mark=2, max_message_bytes=2 << 20)
        agent.set(zmq.RCVBUF, 1 << 16)
        peer = PeerAddress("PC-1", ("127.0.0.1",), bind_tcp(agent, "127.0.0.1"), AGENT.public_key)
        source = TransferSource(context, CONTROLLER, peer, [DEPLOYMENT], shard_folder)
        connection = (await asyncio.wait_for(agent.recv_multipart(), 10))[0]
        known = all_wanted(shard_folder, Path())[0]
        resident_before = psutil.Process().memory_info().rss

        async def ask() -> None:
            for number in range(1000):
                request = FetchChunk(number=number, sha256=known.sha256, offset=0, bytes=1 << 20)
                await router_send(agent, [connection, encode(request)])

        asking = asyncio.create_task(ask())
        stalled_s, before = 0.0, -1
        while stalled_s < 0.5:
            stalled_s = stalled_s + 0.1 if source.served_bytes == before and before > 0 else 0.0
            before = source.served_bytes
            await asyncio.sleep(0.1)
        assert source.served_bytes < 100 << 20
        assert psutil.Process().memory_info().rss - resident_before < 100 << 20
        asking.cancel()
        await source.close()
        zap.close()
        context.destroy(0)

    asyncio.run(main())


def test_ten_thousand_mutated_messages_harm_neither_side(
    shard_folder: Path, tmp_path: Path, mutated_messages: MutatedMessages
) -> None:
    async def main() -> None:
        process = psutil.Process()
        async with receiving() as side:
            wanted = all_wanted(shard_folder, tmp_path)
            resident_before = process.memory_info().rss
            attacker = side.raw_client()
            seeds = [
                encode(TransferHello(protocol=1, deployments=("f" * 12,))),
                encode(Chunk(number=1)),
                encode(Chunk(number=2, error="no")),
            ]
            for number, frames in enumerate(mutated_messages(seeds, 3)):
                await attacker.send_multipart([*frames, os.urandom(9)] if number % 2 else frames)
            source = side.source(shard_folder)
            await side.receiver.fetch(DEPLOYMENT, wanted)
            await source.close()
            assert_arrived(shard_folder, tmp_path)
            assert process.memory_info().rss - resident_before < 80 << 20

            # And the other way: an agent that asks for nonsense.
            agent = curve_server_socket(side.context, zmq.ROUTER, AGENT)
            peer = PeerAddress("PC-2", ("127.0.0.1",), bind_tcp(agent, "127.0.0.1"), AGENT.public_key)
            asked = TransferSource(side.context, CONTROLLER, peer, [DEPLOYMENT], shard_folder)
            connection = (await agent.recv_multipart())[0]
            request = encode(FetchChunk(number=1, sha256=wanted[0].sha256, offset=5, bytes=7))
            last = FetchChunk(number=123_456, sha256=wanted[0].sha256, offset=5, bytes=7)

            async def read_until_last() -> list[bytes]:
                while True:
                    frames: list[bytes] = await agent.recv_multipart()
                    if msgspec.msgpack.decode(frames[1])["number"] == 123_456:
                        return frames

            answer = asyncio.create_task(read_until_last())
            for frames in mutated_messages([request], 4):
                await router_send(agent, [connection, *frames])
            while not answer.done():
                await router_send(agent, [connection, encode(last)])
                await asyncio.wait([answer], timeout=0.2)
            content = (shard_folder / "stage-0.bin").read_bytes()
            assert answer.result()[2] == content[5:12]
            await asked.close()

    asyncio.run(main())
