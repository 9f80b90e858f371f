"""From other threads to the data thread: a queue, and a socket that wakes its poller."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """``post`` from any thread; register ``wake`` in a poller (for reading) and ``take`` what has come."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.wake, self._waker = socket.socketpair()
        self.wake.setblocking(False)
        self._waker.setblocking(False)

    def post(self, item: Item) -> None:
        """Leave an item and wake the reader. After ``close`` nobody reads it."""
        self._items.put(item)
        # A full buffer wakes as well as one byte does.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def take(self) -> Iterator[Item]:
        """The items that are there."""
        with contextlib.suppress(BlockingIOError):
            while self.wake.recv(4096):
                pass
        while True:
            try:
                yield self._items.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """Close both sockets."""
        self.wake.close()
        self._waker.close()
