"""The tray's connection to the agent of this PC, in a thread of its own. It uses the node's own key. No Qt here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import zmq.asyncio

from agent.agent_state import load_state
from agent.tray.words import UNREACHABLE, Face, face_of
from fleet.control import ControlClient
from fleet.control_messages import ControlRequest, Heartbeat, HeartbeatReply, Quit, SetPaused
from fleet.errors import PacelineError
from fleet.identity import load_or_create_identity
from fleet.node import PeerAddress

INTERVAL_S = 1.0
REQUEST_TIMEOUT_S = 5.0
_log = logging.getLogger("paceline.tray")


class AgentLink:
    """Asks the agent once a second how it is.

    Args:
        on_face: called in the link's thread with what to show, whenever that changes.
    """

    def __init__(self, data_dir: Path, on_face: Callable[[Face], None]) -> None:
        self._data_dir = data_dir
        self._on_face = on_face
        self._last: Face | None = None
        self._client: ControlClient | None = None
        self._loop = asyncio.SelectorEventLoop()
        self._closing = asyncio.Event()
        self._again = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="agent-link", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Stop asking and wait for the thread."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        self._loop.call_soon_threadsafe(self._again.set)
        self._thread.join()

    def set_paused(self, paused: bool) -> None:
        """Ask the agent to take no new work, or to take it again. Returns at once; the next face shows it."""
        self._send(SetPaused(number=0, paused=paused))

    def quit_agent(self) -> None:
        """Ask the agent to end. Returns at once."""
        self._send(Quit(number=0))

    def _send(self, request: ControlRequest) -> None:
        asyncio.run_coroutine_threadsafe(self._ask(request), self._loop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        context = zmq.asyncio.Context()
        try:
            while not self._closing.is_set():
                self._show(await self._look(context))
                self._again.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._again.wait(), INTERVAL_S)
            await self._drop()
        finally:
            context.destroy(linger=0)

    async def _look(self, context: zmq.asyncio.Context) -> Face:
        try:
            if self._client is None:
                self._client = await self._connect(context)
            reply = await self._client.request(Heartbeat(number=0), REQUEST_TIMEOUT_S)
        except PacelineError as error:
            _log.debug("%s", error)
            await self._drop()
            return UNREACHABLE
        return face_of(reply.status) if isinstance(reply, HeartbeatReply) else UNREACHABLE

    async def _connect(self, context: zmq.asyncio.Context) -> ControlClient:
        identity = load_or_create_identity(self._data_dir)
        port = load_state(self._data_dir).control_port or 1
        peer = PeerAddress("the agent of this PC", ("127.0.0.1",), port, identity.public_key)
        client = ControlClient(context, identity, peer, controller_name="the tray")
        await client.connect()
        return client

    async def _ask(self, request: ControlRequest) -> None:
        client = self._client
        if client is None:
            return
        try:
            await client.request(request, REQUEST_TIMEOUT_S)
        except PacelineError as error:
            _log.warning("%s", error)
        self._again.set()

    async def _drop(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    def _show(self, face: Face) -> None:
        if face != self._last:
            self._last = face
            self._on_face(face)
