"""Which chunk to fetch next and what has been proved, as a state machine without sockets and files.

A transfer is a list of pieces (a run of weights, a small file). A piece is fetched in chunks, in any order of
arrival, and is worth something only once its hash is right. Never more than ``window`` chunks are asked for and not yet
written, so the receiver's memory is bounded whatever the sender does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

CHUNK_BYTES = 1 << 20
WINDOW_CHUNKS = 8
"""Chunks on the way at once: 8 MiB cover a round trip of 60 ms at 1 Gbit/s."""
ATTEMPTS = 3


@dataclass(frozen=True)
class Fetch:
    """Ask for ``bytes`` bytes at ``offset`` of a piece; its chunk number is ``chunk``."""

    piece: int
    chunk: int
    offset: int
    bytes: int


class ChunkMachine:
    """One transfer. Every fetch that it hands out must come back through ``on_written`` or ``on_lost``, and every
    piece that it says to verify through ``on_verified`` or ``on_damaged``.

    Args:
        piece_bytes: size of each piece, which may be 0.
    """

    def __init__(
        self,
        piece_bytes: Sequence[int],
        *,
        window: int = WINDOW_CHUNKS,
        chunk_bytes: int = CHUNK_BYTES,
        attempts: int = ATTEMPTS,
    ) -> None:
        self._piece_bytes = tuple(piece_bytes)
        self._window = window
        self._chunk_bytes = chunk_bytes
        self._attempts_left = [attempts] * len(self._piece_bytes)
        self._missing = [set(range(self.chunks_of(piece))) for piece in range(len(self._piece_bytes))]
        self._verified: set[int] = set()
        self._verifying: set[int] = set()
        self._on_the_way: set[Fetch] = set()
        self._queue: deque[tuple[int, int]] = deque()
        self._arrived_bytes = 0

    def chunks_of(self, piece: int) -> int:
        """How many chunks a piece has."""
        return -(-self._piece_bytes[piece] // self._chunk_bytes)

    @property
    def done(self) -> bool:
        """Every piece is verified."""
        return len(self._verified) == len(self._piece_bytes)

    @property
    def arrived_bytes(self) -> int:
        """Bytes that are written, verified or not."""
        return self._arrived_bytes

    def begin(self, verified: Collection[int], written: Mapping[int, Collection[int]]) -> list[int]:
        """Starts from what an earlier attempt left; returns the pieces to verify now.

        Args:
            verified: pieces whose hash was found right.
            written: by piece, chunks that were written and not yet proved.
        """
        for piece in verified:
            self._verified.add(piece)
            self._missing[piece].clear()
            self._arrived_bytes += self._piece_bytes[piece]
        to_verify = []
        for piece in range(len(self._piece_bytes)):
            if piece in self._verified:
                continue
            for chunk in written.get(piece, ()):
                if chunk in self._missing[piece]:
                    self._missing[piece].discard(chunk)
                    self._arrived_bytes += self._fetch(piece, chunk).bytes
            self._queue.extend((piece, chunk) for chunk in sorted(self._missing[piece]))
            if not self._missing[piece]:
                self._verifying.add(piece)
                to_verify.append(piece)
        return to_verify

    def next_fetches(self) -> list[Fetch]:
        """What to ask for now, in order; empty while the window is full."""
        fetches = []
        while self._queue and len(self._on_the_way) < self._window:
            fetch = self._fetch(*self._queue.popleft())
            self._on_the_way.add(fetch)
            fetches.append(fetch)
        return fetches

    def on_written(self, fetch: Fetch) -> int | None:
        """A chunk is written; returns its piece if that is to be verified now."""
        self._on_the_way.remove(fetch)
        self._missing[fetch.piece].remove(fetch.chunk)
        self._arrived_bytes += fetch.bytes
        if self._missing[fetch.piece]:
            return None
        self._verifying.add(fetch.piece)
        return fetch.piece

    def on_lost(self, fetch: Fetch) -> None:
        """A chunk did not come; it is asked for again before all others."""
        self._on_the_way.remove(fetch)
        self._queue.appendleft((fetch.piece, fetch.chunk))

    def on_verified(self, piece: int) -> None:
        """The piece's hash is right."""
        self._verifying.remove(piece)
        self._verified.add(piece)

    def on_damaged(self, piece: int) -> bool:
        """The piece's hash is wrong: it is fetched again as a whole. False once that was tried too often."""
        self._verifying.remove(piece)
        self._arrived_bytes -= self._piece_bytes[piece]
        self._missing[piece] = set(range(self.chunks_of(piece)))
        self._attempts_left[piece] -= 1
        if self._attempts_left[piece] <= 0 or not self._missing[piece]:
            return False
        self._queue.extend((piece, chunk) for chunk in range(self.chunks_of(piece)))
        return True

    def _fetch(self, piece: int, chunk: int) -> Fetch:
        offset = chunk * self._chunk_bytes
        return Fetch(piece, chunk, offset, min(self._chunk_bytes, self._piece_bytes[piece] - offset))
