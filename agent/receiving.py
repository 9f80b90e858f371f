"""Getting one stage of a deployment into the store: copy what is held, fetch what is not, check, publish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import psutil

from agent.shard_store import DISK_RESERVE_BYTES, ShardStore
from fleet.control_messages import Progress
from fleet.errors import PacelineError, TransferError
from fleet.manifest import FileEntry, Manifest
from fleet.transfer import Wanted

_log = logging.getLogger("paceline.agent.receiving")
SILENCE_S = 600.0
_MB = 1_000_000


class Fetcher(Protocol):
    """Fetches from whoever serves a deployment's files, and waits while nobody does: ``TransferReceiver``."""

    async def fetch(self, deployment: str, wanted: Sequence[Wanted], on_progress: Callable[[int], None]) -> None:
        """Return when all is there and right. ``on_progress`` is told the bytes that have arrived so far.

        Raises:
            TransferError: it cannot be had.
        """


class Reception:
    """One stage on its way in. ``progress`` and ``detail`` may be read at any time.

    Args:
        turn: receptions of one agent take turns, so that two of them never write the same file.
        on_end: called in the event loop when it has succeeded or failed.
    """

    def __init__(
        self,
        store: ShardStore,
        fetcher: Fetcher,
        turn: asyncio.Lock,
        deployment: str,
        manifest: Manifest,
        stage: int,
        on_end: Callable[[], None],
    ) -> None:
        self._store = store
        self._fetcher = fetcher
        self._turn = turn
        self._deployment = deployment
        self._manifest = manifest
        self._stage = stage
        self._on_end = on_end
        self._parts = manifest.stages[stage]
        small = (self._parts.graph, *(manifest.tokenizer if stage == 0 else ()))
        # Files of the same content are one to the store.
        self._small: tuple[FileEntry, ...] = tuple({entry.sha256: entry for entry in small}.values())
        self._total_bytes = sum(entry.bytes for entry in self._small) + sum(
            manifest.run(place.sha256).bytes for place in self._parts.runs
        )
        self._held_bytes = 0
        self._arrived_bytes = 0
        self.detail = ""
        self.failure: str | None = None
        self.complete = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"receive-{deployment}-{stage}")

    @property
    def progress(self) -> Progress:
        """Bytes that are there, of all that the stage needs."""
        done = self._total_bytes if self.complete else min(self._held_bytes + self._arrived_bytes, self._total_bytes)
        return Progress(done_bytes=done, total_bytes=self._total_bytes, held_bytes=self._held_bytes)

    async def cancel(self) -> None:
        """Stop; what has arrived stays for the next time."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            if self._turn.locked():
                self.detail = "waiting until another shard has arrived"
            async with self._turn:
                self.detail = ""
                await self._receive()
        except PacelineError as error:
            self.failure = str(error)
        except OSError as error:
            self.failure = f"The store cannot be written: {error.strerror or error}."
        except Exception as error:
            _log.exception("receiving failed")
            self.failure = f"Receiving met an internal error ({type(error).__name__}: {error})."
        else:
            self.complete = True
        finally:
            self._on_end()

    async def _receive(self) -> None:
        store, parts = self._store, self._parts
        wanted: list[Wanted] = []
        missing = [entry for entry in self._small if store.blob(entry.sha256) is None]
        self._held_bytes = sum(entry.bytes for entry in self._small if entry not in missing)
        wanted += [Wanted(entry.sha256, entry.bytes, store.incoming_path(entry.sha256)) for entry in missing]
        need_weights = store.weights(parts.weights.sha256) is None
        await asyncio.to_thread(self._make_room, [*missing, *([parts.weights] if need_weights else [])])
        if need_weights:
            wanted += await self._copy_held_runs()
        else:
            self._held_bytes += sum(self._manifest.run(place.sha256).bytes for place in parts.runs)
        if wanted:
            await self._fetch(wanted)
        self.detail = "checking"
        for entry in missing:
            await asyncio.to_thread(store.admit_blob, entry.sha256)
        if need_weights:
            await asyncio.to_thread(store.admit_weights, self._manifest, self._stage)
        store.mark_used(parts.weights.sha256)
        await asyncio.to_thread(store.publish, self._deployment, self._manifest, self._stage, self._stage == 0)
        self.detail = ""

    async def _fetch(self, wanted: Sequence[Wanted]) -> None:
        """Fetches, and gives up when nothing has come for long: whoever wanted it here may be gone for good."""
        fetching = asyncio.create_task(self._fetcher.fetch(self._deployment, wanted, self._arrived))
        try:
            while True:
                before = self._arrived_bytes
                done, _ = await asyncio.wait([fetching], timeout=SILENCE_S)
                if done:
                    fetching.result()
                    return
                if self._arrived_bytes == before:
                    raise TransferError(f"Nothing has arrived for {SILENCE_S:.0f} s; deploy again.")
        finally:
            fetching.cancel()
            await asyncio.wait([fetching])

    async def _copy_held_runs(self) -> list[Wanted]:
        """Copies what other weight files hold, and returns the rest."""
        path = self._store.incoming_path(self._parts.weights.sha256)
        rest = []
        for place in self._parts.runs:
            size = self._manifest.run(place.sha256).bytes
            if await asyncio.to_thread(self._store.copy_run, place.sha256, path, place.offset):
                self._held_bytes += size
            else:
                rest.append(Wanted(place.sha256, size, path, place.offset))
        return rest

    def _make_room(self, missing: Sequence[FileEntry]) -> None:
        needed_bytes = 0
        for entry in missing:
            path = self._store.incoming_path(entry.sha256)
            needed_bytes += max(0, entry.bytes - (path.stat().st_size if path.exists() else 0))
        keep = frozenset({self._parts.weights.sha256, *(entry.sha256 for entry in missing)})

        def free_bytes() -> int:
            return int(psutil.disk_usage(str(self._store.incoming)).free)

        if needed_bytes and not self._store.make_room(needed_bytes, free_bytes, keep):
            raise TransferError(
                f"The disk has {free_bytes() / _MB:,.0f} MB free, and stage {self._stage} needs "
                f"{needed_bytes / _MB:,.0f} MB besides the {DISK_RESERVE_BYTES / _MB:,.0f} MB that stay free; "
                "make room on this PC."
            )

    def _arrived(self, bytes_so_far: int) -> None:
        self._arrived_bytes = bytes_so_far
