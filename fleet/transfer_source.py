"""The controller's side of a transfer: serves the files of a shard folder to one agent, by hash, as the agent asks.

It connects to the agent's transfer port, so that no PC needs an open port but the agents'. The agent sets the pace; one
chunk is read at a time, in a thread, and only bytes that the manifest names by their hash are ever read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from fleet.codec import PROTOCOL_VERSION, Decoder, encode
from fleet.connection import Connection, open_connection
from fleet.control_messages import Chunk, FetchChunk, TransferHello
from fleet.errors import MessageError, PacelineError
from fleet.identity import Identity
from fleet.limited_log import LimitedLog
from fleet.manifest import Manifest, load_manifest
from fleet.node import PeerAddress
from fleet.transfer_machine import CHUNK_BYTES

TRANSFER_HIGH_WATER_MARK = 16
MAX_TRANSFER_MESSAGE_BYTES = CHUNK_BYTES + 8192
CONNECT_TIMEOUT_S = 10.0
RETRY_S = 1.0

_log = logging.getLogger("paceline.transfer")
_decoder: Decoder[FetchChunk] = Decoder(FetchChunk, max_bytes=8192)


@dataclass(frozen=True)
class Place:
    """Where the bytes of a hash lie."""

    path: Path
    offset: int
    bytes: int


def places_of(folder: Path, manifest: Manifest) -> dict[str, Place]:
    """Everything that a shard folder serves: the runs of its weight files, the graphs, the tokenizer files."""
    places: dict[str, Place] = {}
    for stage in manifest.stages:
        for run in stage.runs:
            places[run.sha256] = Place(folder / stage.weights.name, run.offset, manifest.run(run.sha256).bytes)
        places[stage.graph.sha256] = Place(folder / stage.graph.name, 0, stage.graph.bytes)
    for entry in manifest.tokenizer:
        places[entry.sha256] = Place(folder / entry.name, 0, entry.bytes)
    return places


class TransferSource:
    """Serves a shard folder to one agent from its construction in the running loop until ``close``.

    A lost connection is made again; ``detail`` says why there is none.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        identity: Identity,
        peer: PeerAddress,
        deployments: Sequence[str],
        folder: Path,
    ) -> None:
        """
        Args:
            peer: the agent, with its transfer port.
            deployments: ids whose files these are.
            folder: a shard folder.

        Raises:
            ModelError: the folder has no usable manifest.
        """
        self._context = context
        self._identity = identity
        self._peer = peer
        self._limited_log = LimitedLog(_log)
        self._hello = encode(TransferHello(protocol=PROTOCOL_VERSION, deployments=tuple(deployments)))
        self._places = places_of(folder, load_manifest(folder))
        self.detail = "connecting"
        self.served_bytes = 0
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"serve files to {peer.node_name}")

    async def close(self) -> None:
        """Stops serving. Safe to call twice."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                connection = await open_connection(
                    self._context,
                    self._identity,
                    self._peer,
                    CONNECT_TIMEOUT_S,
                    high_water_mark=TRANSFER_HIGH_WATER_MARK,
                    max_message_bytes=8192,
                )
            except PacelineError as error:
                self.detail = str(error)
            else:
                self.detail = ""
                await self._serve(connection)
                self.detail = f"The connection to {self._peer.node_name} was lost."
            await asyncio.sleep(RETRY_S)

    async def _serve(self, connection: Connection) -> None:
        tasks = [
            asyncio.create_task(connection.lost(), name="transfer source monitor"),
            asyncio.create_task(self._answer_all(connection.socket), name="transfer source"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            connection.close()

    async def _answer_all(self, socket: zmq.asyncio.Socket) -> None:
        await socket.send(self._hello)
        while True:
            # Neither a receive that has data ready nor a refusal yields: without this a flood would starve the loop.
            await asyncio.sleep(0)
            frames: list[bytes] = await socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise MessageError(f"a request has {len(frames)} frames")
                request = _decoder.decode(frames[0])
            except MessageError as error:
                self._limited_log.warning(f"{self._peer.node_name} asked for something that is not understood: {error}")
                continue
            # Waits while the agent does not read: nothing piles up here but the socket's few chunks.
            await socket.send_multipart(await self._answer(request))

    async def _answer(self, request: FetchChunk) -> list[bytes]:
        place = self._places.get(request.sha256)
        if place is None:
            return _refusal(request, f"The controller does not serve {request.sha256[:12]}.")
        if request.offset + request.bytes > place.bytes:
            return _refusal(request, f"{place.path.name} has no {request.bytes} bytes at {request.offset} of that run.")
        try:
            data = await asyncio.to_thread(_read_slice, place, request.offset, request.bytes)
        except OSError as error:
            return _refusal(request, f"{place.path.name} cannot be read on the controller's PC: {error.strerror}.")
        if len(data) != request.bytes:
            return _refusal(request, f"{place.path.name} is shorter than its manifest says; build the shards again.")
        self.served_bytes += len(data)
        return [encode(Chunk(number=request.number)), data]


def _read_slice(place: Place, offset: int, size: int) -> bytes:
    with place.path.open("rb", buffering=0) as file:
        file.seek(place.offset + offset)
        return file.read(size)


def _refusal(request: FetchChunk, text: str) -> list[bytes]:
    return [encode(Chunk(number=request.number, error=text))]
