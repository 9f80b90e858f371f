"""The thread that serves the HTTP API, with a loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import uvicorn

from fleet.errors import UnreachableError
from fleet.gateway_client import GatewayClient
from fleet.identity import Identity
from fleet.node import PeerAddress
from pipeline.gateway.http_api import HttpApi
from pipeline.gateway.http_requests import load_sampling_defaults

LOOPBACK = "127.0.0.1"
BACKLOG = 256
STOP_TIMEOUT_S = 1.0

_log = logging.getLogger(__name__)


def listen(port: int) -> socket.socket:
    """A listening socket on loopback; port 0 takes a free one.

    Raises:
        UnreachableError: the port is taken.
    """
    # With the protocol spelled out: asyncio switches off Nagle's algorithm only where it sees that this is TCP, and an
    # answer's body would wait 40 ms for the acknowledgement of its head.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform == "win32":
            # There, SO_REUSEADDR would let another program take over a port that is in use.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UnreachableError(
            f"The HTTP API cannot listen on port {port} of this PC: {error.strerror}. Choose another port."
        ) from None
    return listener


class HttpServer:
    """Serves from entering to leaving the context.

    Args:
        identity: with which the API connects to the gateway, as any client would.
        shard_folder: where the model's own sampling defaults are.
        on_failure: called from the thread if the server ends by itself.
    """

    def __init__(
        self,
        listener: socket.socket,
        identity: Identity,
        gateway: PeerAddress,
        shard_folder: Path,
        on_failure: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._identity = identity
        self._gateway = gateway
        self._defaults = load_sampling_defaults(shard_folder)
        self._on_failure = on_failure
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def __enter__(self) -> HttpServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._loop is not None:
            # A loop that has ended by itself takes no more calls.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            # pyzmq needs a loop that watches sockets, which Windows' default loop cannot.
            with asyncio.Runner(loop_factory=_selector_loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            _log.exception("the HTTP API failed")
            self._on_failure(f"The HTTP API failed ({type(error).__name__}: {error}).")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._stopping.is_set():
            return
        client = GatewayClient(self._identity, self._gateway)
        config = uvicorn.Config(
            HttpApi(client, self._defaults).app(),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Without the gateway the answers that are on their way end, and the server has nothing to wait for.
            await client.close()
            server.should_exit = True
            stopped.cancel()
            await serving


def _selector_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(selectors.DefaultSelector())
