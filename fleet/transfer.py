"""Getting files from the controller to an agent: the agent pulls chunks by hash, resumes where it stopped, and uses
nothing whose SHA-256 it has not checked.

The controller's side is ``fleet.transfer_source``; what to fetch next is decided in ``fleet.transfer_machine``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import zmq
import zmq.asyncio

from fleet.codec import PROTOCOL_VERSION, Decoder, encode
from fleet.control_messages import Chunk, FetchChunk, TransferHello
from fleet.errors import MessageError, TransferError
from fleet.identity import Identity
from fleet.limited_log import LimitedLog
from fleet.sockets import bind_tcp, curve_server_socket
from fleet.transfer_files import PartFiles, Wanted, journal_of
from fleet.transfer_machine import ChunkMachine, Fetch
from fleet.transfer_source import MAX_TRANSFER_MESSAGE_BYTES, TRANSFER_HIGH_WATER_MARK, TransferSource
from fleet.zap import AllowList, authorised_sender

__all__ = ["TransferReceiver", "TransferSource", "Wanted", "journal_of"]

CHUNK_TIMEOUT_S = 60.0
BUSY_PAUSE_S = 0.05
MAX_SOURCES = 256

_log = logging.getLogger("paceline.transfer")
_decoder: Decoder[TransferHello | Chunk] = Decoder(TransferHello | Chunk, max_bytes=64 << 10)


@dataclass(frozen=True)
class _Source:
    """A controller's connection that serves a deployment's files."""

    connection: bytes
    public_key: str


@dataclass(frozen=True)
class _Pending:
    source: _Source
    bytes: int
    answer: asyncio.Future[zmq.Frame]


class _SourceLostError(Exception):
    """The chunk will not come over this connection; ask again."""


class TransferReceiver:
    """The agent's transfer port. ``start_zap(context, allow_list)`` must have been called on the same context."""

    def __init__(self, context: zmq.asyncio.Context, identity: Identity, allow_list: AllowList) -> None:
        self._allow_list = allow_list
        self._limited_log = LimitedLog(_log)
        self._socket: zmq.asyncio.Socket = curve_server_socket(
            context,
            zmq.ROUTER,
            identity,
            high_water_mark=TRANSFER_HIGH_WATER_MARK,
            max_message_bytes=MAX_TRANSFER_MESSAGE_BYTES,
        )
        self._sources: dict[str, _Source] = {}
        self._source_came = asyncio.Event()
        self._pending: dict[int, _Pending] = {}
        self._last_number = 0
        self._reader: asyncio.Task[None] | None = None

    def start(self, address: str = "0.0.0.0", port: int = 0) -> int:
        """Binds, begins to listen in the running loop, and returns the port.

        Raises:
            UnreachableError: the port is taken.
        """
        bound_port = bind_tcp(self._socket, address, port)
        self._reader = asyncio.create_task(self._read(), name="transfer receiver")
        return bound_port

    async def close(self) -> None:
        """Ends listening. Cancel running fetches first. Safe to call twice."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close(0)

    def has_source(self, deployment: str) -> bool:
        """Whether somebody serves this deployment's files now, as far as is known."""
        return deployment in self._sources

    async def fetch(
        self, deployment: str, wanted: Sequence[Wanted], on_progress: Callable[[int], None] = lambda arrived_bytes: None
    ) -> None:
        """Returns when all wanted bytes are in their files, checked and on disk.

        Waits while nobody serves the deployment, and goes on when somebody does. Cancelled or killed, it leaves
        the files and their journals, from which the next call goes on. No two calls may share a path.

        Args:
            on_progress: called in the loop with the bytes that have arrived, those of earlier calls included.

        Raises:
            TransferError: the source refuses, sends damaged bytes again and again, or the disk fails.
        """
        files = PartFiles(wanted)
        machine = ChunkMachine([piece.bytes for piece in wanted])
        loop = asyncio.get_running_loop()
        disk = ThreadPoolExecutor(1, thread_name_prefix="transfer-disk")
        tasks: dict[asyncio.Task[bool | None], Fetch | int] = {}

        def spawn(what: Fetch | int) -> None:
            if isinstance(what, Fetch):
                coroutine = self._fetch_chunk(deployment, wanted[what.piece], what, files, disk)
                tasks[loop.create_task(coroutine, name="fetch chunk")] = what
            else:
                tasks[loop.create_task(_verify(files, what), name="verify piece")] = what

        try:
            for piece in machine.begin(*await loop.run_in_executor(disk, files.open, machine)):
                spawn(piece)
            on_progress(machine.arrived_bytes)
            while not machine.done:
                for fetch in machine.next_fetches():
                    spawn(fetch)
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    what, outcome = tasks.pop(task), task.result()
                    if isinstance(what, Fetch):
                        if outcome:
                            complete = machine.on_written(what)
                            if complete is not None:
                                spawn(complete)
                        else:
                            machine.on_lost(what)
                    elif outcome:
                        machine.on_verified(what)
                    else:
                        _log.warning("a run for %s arrived damaged", wanted[what].path.name)
                        await loop.run_in_executor(disk, files.forget, what)
                        if not machine.on_damaged(what):
                            raise TransferError(
                                f"{wanted[what].sha256[:12]} for {wanted[what].path.name} arrived damaged again and "
                                "again; verify the shards on the controller's PC with 'paceline shard verify'."
                            )
                on_progress(machine.arrived_bytes)
            await loop.run_in_executor(disk, files.finish)
        finally:
            files.cancelled.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # The disk thread ends after the write that it is in; only then may the files be closed.
            await loop.run_in_executor(None, _end, disk, files)

    async def _fetch_chunk(
        self, deployment: str, piece: Wanted, fetch: Fetch, files: PartFiles, disk: ThreadPoolExecutor
    ) -> bool:
        """Whether the chunk is written; False: ask again."""
        try:
            frame = await self._request(deployment, piece.sha256, fetch)
        except _SourceLostError:
            return False
        await asyncio.get_running_loop().run_in_executor(disk, files.write, fetch, frame.buffer)
        return True

    async def _request(self, deployment: str, sha256: str, fetch: Fetch) -> zmq.Frame:
        while (source := self._sources.get(deployment)) is None or source.public_key not in self._allow_list:
            self._source_came.clear()
            await self._source_came.wait()
        self._last_number += 1
        number = self._last_number
        request = FetchChunk(number=number, sha256=sha256, offset=fetch.offset, bytes=fetch.bytes)
        answer: asyncio.Future[zmq.Frame] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(source, fetch.bytes, answer)
        try:
            await self._ask(source, request)
            async with asyncio.timeout(CHUNK_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise _SourceLostError from None
        finally:
            del self._pending[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # may have been set after this stopped waiting

    async def _ask(self, source: _Source, request: FetchChunk) -> None:
        try:
            await self._socket.send_multipart([source.connection, encode(request)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if isinstance(error, zmq.Again):
                await asyncio.sleep(BUSY_PAUSE_S)
            else:
                self._drop(source)
            raise _SourceLostError from None

    def _drop(self, source: _Source) -> None:
        self._sources = {key: known for key, known in self._sources.items() if known != source}
        for pending in self._pending.values():
            if pending.source == source and not pending.answer.done():
                pending.answer.set_exception(_SourceLostError())

    async def _read(self) -> None:
        while True:
            self._take(await self._socket.recv_multipart(copy=False))
            # A receive that has data ready does not yield: without this a flood would starve the loop.
            await asyncio.sleep(0)

    def _take(self, frames: list[zmq.Frame]) -> None:
        if len(frames) not in (2, 3):
            self._limited_log.warning(f"dropped a message of {len(frames)} frames")
            return
        sender = authorised_sender(frames[1], self._allow_list)
        if sender is None:
            self._limited_log.warning("dropped a message of a key that is not trusted")
            return
        try:
            message = _decoder.decode(frames[1].buffer)
        except MessageError as error:
            self._limited_log.warning(f"dropped a message: {error}")
            return
        source = _Source(frames[0].bytes, sender)
        if isinstance(message, TransferHello):
            self._greet(message, source)
        else:
            self._deliver(message, source, frames[2] if len(frames) == 3 else None)

    def _greet(self, hello: TransferHello, source: _Source) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            self._limited_log.warning(f"a controller that speaks protocol {hello.protocol} was not listened to")
            return
        for deployment in hello.deployments:
            before = self._sources.pop(deployment, None)
            if before is not None and before != source:
                # The newest connection serves: the one before is gone, or will be.
                self._drop(before)
            self._sources[deployment] = source
        while len(self._sources) > MAX_SOURCES:
            del self._sources[next(iter(self._sources))]
        self._source_came.set()

    def _deliver(self, chunk: Chunk, source: _Source, data: zmq.Frame | None) -> None:
        pending = self._pending.get(chunk.number)
        if pending is None or pending.source != source or pending.answer.done():
            return  # late, or nobody's
        if chunk.error or data is None:
            pending.answer.set_exception(TransferError(chunk.error or "The controller sent a chunk without bytes."))
        elif len(data) != pending.bytes:
            pending.answer.set_exception(
                TransferError(f"The controller sent {len(data)} bytes where {pending.bytes} were asked for.")
            )
        else:
            pending.answer.set_result(data)


async def _verify(files: PartFiles, piece: int) -> bool:
    return await asyncio.to_thread(files.is_right, piece)


def _end(disk: ThreadPoolExecutor, files: PartFiles) -> None:
    disk.shutdown(wait=True)
    files.close()
