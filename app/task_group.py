"""The window's own asyncio tasks: kept while they run, their failures shown, ended when the window closes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class TaskGroup:
    """Starts coroutines in the running loop and keeps them.

    Args:
        failed: is told of every exception that ends a task, with the task's name.
    """

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, coroutine: Coroutine[Any, Any, object], name: str) -> asyncio.Task[object]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """Cancel whatever runs, and wait for it."""
        running = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(task.get_name(), error)
