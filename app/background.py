"""Work that goes on in the network thread while the window is open, such as the demo's fleet, and what it may show."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from app.fleet_bridge import FleetBridge
from app.main_window import MainWindow, PageName
from fleet.controller import FleetController
from fleet.errors import PacelineError


class WindowGuide:
    """What the work may do with the window, from any thread: nothing waits for it to be done."""

    def __init__(self, window: MainWindow, open_model: Callable[[Path], None]) -> None:
        self._window = window
        self._open_model = open_model
        self._loop = asyncio.get_running_loop()

    def tell(self, text: str) -> None:
        """Show a line of progress above the page."""
        self._loop.call_soon_threadsafe(self._window.show_progress, text)

    def show_page(self, page: PageName) -> None:
        """Turn to a page."""
        self._loop.call_soon_threadsafe(self._window.show_page, page)

    def open_model(self, path: Path) -> None:
        """Open a model or shard folder on the placement page, as if the person had chosen it."""
        self._loop.call_soon_threadsafe(self._open_model, path)


BackgroundWork = Callable[[FleetController, WindowGuide], Coroutine[Any, Any, object]]


async def run_background(window: MainWindow, bridge: FleetBridge, work: BackgroundWork, guide: WindowGuide) -> None:
    """Do the work, and show in words where it fails."""
    try:
        await bridge.run(lambda controller: work(controller, guide))
    except PacelineError as error:
        window.banner.show_message(str(error))
    finally:
        # Behind the lines that the work has told.
        guide.tell("")
