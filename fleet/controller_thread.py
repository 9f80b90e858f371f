"""A controller in a thread with a selector loop of its own, for programs whose main loop is another one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from fleet.controller import FleetController
from fleet.views import FleetView

Result = TypeVar("Result")


class ControllerThread:
    """Runs a FleetController. Methods may be called from any thread but the controller's own.

    Args:
        on_view: called in the controller's thread with every snapshot.
    """

    def __init__(self, data_dir: Path, name: str, on_view: Callable[[FleetView], None] = lambda view: None) -> None:
        self._data_dir = data_dir
        self._name = name
        self._on_view = on_view
        self._loop = asyncio.SelectorEventLoop()
        self._started: concurrent.futures.Future[FleetController] = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fleet controller", daemon=True)

    def start(self) -> concurrent.futures.Future[FleetController]:
        """Start the thread. The future gives the controller when it looks for nodes, or why it does not."""
        self._thread.start()
        return self._started

    @property
    def controller(self) -> FleetController:
        """The controller, once it has started. Use it inside ``call`` only."""
        return self._started.result(timeout=0)

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Run a coroutine in the controller's loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, work: Callable[[], object]) -> None:
        """Call a function in the controller's loop."""
        self._loop.call_soon_threadsafe(work)

    def close(self, timeout_s: float | None = None) -> None:
        """Close the controller and wait until its thread has ended. Safe to call twice."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself meanwhile
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        try:
            controller = FleetController(self._data_dir, self._name)
            controller.subscribe(self._on_view)
            await controller.start()
        except Exception as error:
            self._started.set_exception(error)
            return
        self._started.set_result(controller)
        try:
            await self._stop.wait()
        finally:
            await controller.close()
