"""Between the network thread and the window: snapshots come out as signals, wishes go in as awaitables."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from PySide6.QtCore import QObject, Qt, QTimer, Signal

from app.backend import Controller, NetworkThread
from app.chat_connections import ChatConnections
from fleet.control_messages import DeploymentId
from fleet.gateway_messages import GatewayMessage, Generate
from fleet.manifest import KvPrecision
from fleet.placement import Placement, PlacementNode
from fleet.views import FleetView

SNAPSHOT_INTERVAL_MS = 250
"""The window takes at most four snapshots a second, however many the network makes."""

Result = TypeVar("Result")


class FleetBridge(QObject):
    """The window's only way to the fleet. Lives in the window's thread; nothing here waits for the network.

    Signals:
        view_changed: the newest snapshot (``FleetView``), at most every ``SNAPSHOT_INTERVAL_MS``.
    """

    view_changed = Signal(object)
    _snapshot_came = Signal()

    def __init__(
        self,
        thread: NetworkThread,
        parent: QObject | None = None,
        *,
        make_connections: Callable[[Controller], ChatConnections] = ChatConnections,
    ) -> None:
        super().__init__(parent)
        self._thread = thread
        self._connections = make_connections(thread.controller)
        self._newest: FleetView | None = None
        self._shown = FleetView()
        self._announced = False
        self._closed = False
        self._pause = QTimer(self)
        self._pause.setSingleShot(True)
        self._pause.setInterval(SNAPSHOT_INTERVAL_MS)
        self._pause.timeout.connect(self._show_newest)
        self._snapshot_came.connect(self._on_snapshot, Qt.ConnectionType.QueuedConnection)

    @property
    def view(self) -> FleetView:
        """The snapshot that the window shows."""
        return self._shown

    async def start(self) -> None:
        """Begin to follow the fleet."""

        async def subscribe() -> FleetView:
            self._thread.controller.subscribe(self._take_snapshot)
            return self._thread.controller.view

        self._take_snapshot(await self._call(subscribe()))

    async def close(self) -> None:
        """Close the connections, then the controller and its thread."""
        self._closed = True
        self._pause.stop()
        await self._call(self._connections.close())
        await asyncio.get_running_loop().run_in_executor(None, self._thread.close)

    async def create_token(self, uses: int, expires_s: float) -> str:
        """A new enrolment token."""

        async def create() -> str:
            return self._thread.controller.create_token(uses, expires_s)

        return await self._call(create())

    async def placement_nodes(self) -> Sequence[PlacementNode]:
        """The nodes that may take a stage now."""

        async def ask() -> Sequence[PlacementNode]:
            return self._thread.controller.placement_nodes()

        return await self._call(ask())

    async def deploy(self, shard_folder: Path, placement: Placement, kv_precision: KvPrecision) -> DeploymentId:
        """Begin a deployment; its progress shows in the snapshots.

        Raises:
            PacelineError: it cannot begin; the text says why.
        """
        return await self._call(self._thread.controller.deploy(shard_folder, placement, kv_precision=kv_precision))

    async def cancel(self, deployment: DeploymentId) -> None:
        """Stop a deployment that is being made."""
        await self._call(self._thread.controller.cancel(deployment))

    async def undeploy(self, deployment: DeploymentId) -> None:
        """Stop a deployment on all its nodes."""
        await self._call(self._thread.controller.undeploy(deployment))

    async def run(self, work: Callable[[Any], Coroutine[Any, Any, Result]]) -> Result:
        """Run ``work(controller)`` in the network thread."""
        return await self._call(work(self._thread.controller))

    async def answer(self, deployment: DeploymentId, request: Generate) -> AsyncGenerator[list[GatewayMessage], None]:
        """The messages about a request in batches: all that came since the last batch was taken.

        Leaving the iteration early cancels the request at the gateway.

        Raises:
            UnreachableError: the gateway cannot be reached, or was lost on the way.
        """
        relay = _Relay(asyncio.get_running_loop())
        pump = asyncio.wrap_future(self._thread.call(self._connections.answer(deployment, request, relay.push)))
        pump.add_done_callback(lambda _future: relay.wake())
        try:
            while True:
                batch = relay.take()
                if batch:
                    yield batch
                elif pump.done():
                    await pump
                    return
                else:
                    await relay.wait()
        finally:
            if not pump.done():
                pump.cancel()

    async def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.wrap_future(self._thread.call(coroutine))

    def _take_snapshot(self, view: FleetView) -> None:
        """Called in the network's thread: only remember the snapshot, and wake the window once."""
        self._newest = view
        if not self._announced and not self._closed:
            self._announced = True
            self._snapshot_came.emit()

    def _on_snapshot(self) -> None:
        if not self._pause.isActive() and not self._closed:
            self._show_newest()

    def _show_newest(self) -> None:
        self._announced = False
        view, self._newest = self._newest, None
        if view is None:
            return
        if view != self._shown:
            self._shown = view
            self.view_changed.emit(view)
        self._pause.start()


class _Relay:
    """Carries messages from the network thread to a coroutine in the window's loop, waking it once per batch."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: collections.deque[GatewayMessage] = collections.deque()
        self._arrived = asyncio.Event()
        self._woken = False

    def push(self, message: GatewayMessage) -> None:
        """Called in the network's thread."""
        self._messages.append(message)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._arrived.set)

    def wake(self) -> None:
        """Called in the window's loop: let a waiting reader look again."""
        self._arrived.set()

    async def wait(self) -> None:
        await self._arrived.wait()
        self._arrived.clear()

    def take(self) -> list[GatewayMessage]:
        self._woken = False
        batch: list[GatewayMessage] = []
        while self._messages:
            batch.append(self._messages.popleft())
        return batch
