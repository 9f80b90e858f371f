"""The asyncio client of a gateway: for the chat window, the command line, and the gateway's own HTTP API.

One connection carries any number of requests side by side. It is made when it is first needed and made anew after
a loss: whatever ran when the gateway went away raises UnreachableError, and the next call connects again. The first
message of a connection is AskStatus, which carries the protocol version; while requests run it is repeated as a sign
of life, and its answers are the gateway's.

The loop must be able to watch sockets: on Windows that is the selector loop, not the default one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Coroutine
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio

from fleet.codec import MAX_CONTROL_BYTES, PROTOCOL_VERSION, Decoder, encode
from fleet.errors import MessageError, UnreachableError
from fleet.gateway_messages import (
    SIGN_OF_LIFE_S,
    SILENCE_S,
    AskStatus,
    Cancel,
    Failed,
    Finished,
    GatewayMessage,
    Generate,
    ServiceStatus,
)
from fleet.identity import Identity
from fleet.limited_log import LimitedLog
from fleet.node import PeerAddress
from fleet.socket_monitor import SocketMonitor
from fleet.sockets import curve_client_socket, pick_address_async

CONNECT_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 10.0
MESSAGES_BEFORE_YIELD = 32
"""Receiving a message that is there already does not give way to other tasks; after so many this client does."""
CLOSE_LINGER_MS = 100
SEND_HIGH_WATER_MARK = 1000
RECEIVE_HIGH_WATER_MARK = 10_000

_log = logging.getLogger("paceline.gateway_client")
_request_decoder: Decoder[Generate] = Decoder(Generate)


class GatewayClient:
    """Talks to one gateway: ``async with GatewayClient(identity, address) as client``.

    Args:
        identity: the keys that the gateway's allow-list knows.
        gateway: where it listens and the key that it must prove.
        sign_of_life_s: how often this client is heard while requests run.
        silence_s: without a word from the gateway for so long, running requests fail.
    """

    def __init__(
        self,
        identity: Identity,
        gateway: PeerAddress,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        sign_of_life_s: float = SIGN_OF_LIFE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._identity = identity
        self._gateway = gateway
        self._connect_timeout_s = connect_timeout_s
        self._sign_of_life_s = sign_of_life_s
        self._silence_s = silence_s
        self._context: zmq.asyncio.Context | None = None
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._closed = False

    async def __aenter__(self) -> GatewayClient:
        try:
            await self._connected()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection, which cancels whatever still runs. Safe to call twice."""
        self._closed = True
        if self._connection is not None:
            await self._connection.close(UnreachableError("The connection to the gateway was closed."))
            self._connection = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def next_number(self) -> int:
        """A request number that this client has not used yet."""
        return next(self._numbers)

    async def generate(self, request: Generate) -> AsyncGenerator[GatewayMessage, None]:
        """The messages about a request, as they come: Accepted, PrefillProgress, Delta; at last Finished or Failed.

        Leaving the iteration early (``aclose``, best through ``contextlib.aclosing``, or a cancelled task) cancels
        the request.

        Raises:
            UnreachableError: the gateway cannot be reached, or was lost on the way.
            MessageError: a field of the request is out of its bounds, the request is too large to be sent, or the
                gateway speaks another protocol version.
            ValueError: this client has a request of that number running.
        """
        frame = encode(request)
        if len(frame) > MAX_CONTROL_BYTES:
            raise MessageError(
                f"The request is too large to be sent ({len(frame):,} bytes of at most {MAX_CONTROL_BYTES:,}); "
                "shorten the prompt."
            )
        # A gateway drops what it cannot read, for it would not know whom to answer.
        _request_decoder.decode(frame)
        connection = await self._connected()
        messages = connection.begin(request.number)
        ended = False
        try:
            await connection.send(frame)
            while not ended:
                message = await messages.get()
                if isinstance(message, UnreachableError):
                    ended = True
                    raise UnreachableError(str(message))
                ended = isinstance(message, Finished | Failed)
                yield message
        finally:
            connection.end(request.number)
            if not ended:
                connection.send_soon(encode(Cancel(request.number)))

    async def cancel(self, number: int) -> None:
        """Asks for the end of a request, which still arrives in its iteration. Does nothing without a connection."""
        if self._connection is not None and self._connection.error is None:
            await self._connection.send(encode(Cancel(number)))

    async def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> ServiceStatus:
        """What the gateway serves and how it is.

        Raises:
            UnreachableError: no answer within ``timeout_s``.
            MessageError: the gateway speaks another protocol version.
        """
        connection = await self._connected()
        return await connection.ask_status(timeout_s)

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._closed:
                raise UnreachableError("The connection to the gateway was closed.")
            if self._connection is not None:
                if self._connection.error is None:
                    return self._connection
                await self._connection.close(self._connection.error)
                self._connection = None
            if self._context is None:
                self._context = zmq.asyncio.Context()
            endpoint = await pick_address_async(self._gateway, self._connect_timeout_s)
            connection = _Connection(
                self._context, self._identity, self._gateway, endpoint, self._sign_of_life_s, self._silence_s
            )
            try:
                await connection.open(self._connect_timeout_s)
            except BaseException:
                await connection.close(UnreachableError("The connection to the gateway was closed."))
                raise
            self._connection = connection
            return connection


class _Connection:
    """One DEALER with the tasks that read it, watch it and keep it alive, from its making to its loss."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        identity: Identity,
        gateway: PeerAddress,
        endpoint: str,
        sign_of_life_s: float,
        silence_s: float,
    ) -> None:
        self.error: UnreachableError | None = None
        """Why it is lost; None as long as it lives."""
        self._gateway = gateway
        self._sign_of_life_s = sign_of_life_s
        self._silence_s = silence_s
        self._socket = curve_client_socket(
            context, zmq.DEALER, identity, gateway.public_key, high_water_mark=SEND_HIGH_WATER_MARK
        )
        self._socket.set(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self._monitor = SocketMonitor(self._socket)
        self._decoder: Decoder[GatewayMessage] = Decoder(GatewayMessage)
        self._limited_log = LimitedLog(_log)
        self._running: dict[int, asyncio.Queue[GatewayMessage | UnreachableError]] = {}
        self._statuses: dict[int, asyncio.Future[ServiceStatus]] = {}
        self._status_numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()
        self._heard_s = 0.0
        self._endpoint = endpoint

    async def open(self, timeout_s: float) -> None:
        """Connects, proves who is who, and exchanges protocol versions."""
        self._start(self._watch(), "gateway connection")
        self._socket.connect(self._endpoint)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise self._lose(f"{self._name} does not complete the connection within {timeout_s:.0f} s.") from None
        if self.error is not None:
            raise self.error
        self._heard_s = asyncio.get_running_loop().time()
        self._start(self._read(), "gateway reader")
        status = await self.ask_status(timeout_s)
        if status.protocol != PROTOCOL_VERSION:
            raise MessageError(
                f"{self._name} speaks version {status.protocol} of the protocol, this program version "
                f"{PROTOCOL_VERSION}; update the older of the two."
            )
        self._start(self._keep_alive(), "gateway sign of life")

    async def close(self, error: UnreachableError) -> None:
        """Ends the tasks and the socket; what still runs gets ``error``."""
        for number in self._running:
            self.send_soon(encode(Cancel(number)))
        self._fail(error)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._socket.closed:
            self._monitor.close()
            # The last word, which may be a Cancel, gets a moment to leave.
            self._socket.close(CLOSE_LINGER_MS)

    def begin(self, number: int) -> asyncio.Queue[GatewayMessage | UnreachableError]:
        """The queue of messages about a request."""
        if number in self._running:
            raise ValueError(f"request number {number} is running")
        messages: asyncio.Queue[GatewayMessage | UnreachableError] = asyncio.Queue()
        self._running[number] = messages
        if self.error is not None:
            messages.put_nowait(self.error)
        return messages

    def end(self, number: int) -> None:
        """No more messages about this request."""
        del self._running[number]

    async def send(self, frame: bytes) -> None:
        """Sends a frame; raises UnreachableError where the gateway takes none."""
        if self.error is not None:
            raise UnreachableError(str(self.error))
        try:
            async with asyncio.timeout(self._silence_s):
                await self._socket.send(frame)
        except (TimeoutError, zmq.ZMQError):
            raise self._lose(f"{self._name} takes no more messages.") from None

    def send_soon(self, frame: bytes) -> None:
        """Sends a frame at once if the socket takes it, from code that must not wait."""
        if self.error is None:
            with contextlib.suppress(zmq.ZMQError):
                zmq.Socket.shadow(self._socket.underlying).send(frame, zmq.NOBLOCK)

    async def ask_status(self, timeout_s: float) -> ServiceStatus:
        """Asks and waits for the answer."""
        number = next(self._status_numbers)
        answer: asyncio.Future[ServiceStatus] = asyncio.get_running_loop().create_future()
        if self.error is not None:
            raise UnreachableError(str(self.error))
        self._statuses[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send(encode(AskStatus(number, PROTOCOL_VERSION)))
                return await answer
        except TimeoutError:
            raise UnreachableError(
                f"{self._name} does not answer within {timeout_s:.0f} s; look at the state of its node."
            ) from None
        finally:
            del self._statuses[number]

    @property
    def _name(self) -> str:
        return f"The gateway on {self._gateway.node_name}"

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: the task %r ended with an error", self._name, task.get_name(), exc_info=error)
            self._lose(f"{self._name} sent something that this program cannot handle.")

    def _lose(self, message: str) -> UnreachableError:
        error = UnreachableError(message)
        self._fail(error)
        return error

    def _fail(self, error: UnreachableError) -> None:
        if self.error is not None:
            return
        self.error = error
        self._ready.set()
        for messages in self._running.values():
            messages.put_nowait(error)
        for answer in self._statuses.values():
            if not answer.done():
                answer.set_exception(error)

    async def _watch(self) -> None:
        async for event in self._monitor.events():
            if event.kind == "ready":
                self._ready.set()
            elif event.kind == "refused":
                self._lose(f"{self._name} does not know this client's key; ask the fleet's controller for access.")
            elif event.kind == "handshake_failed":
                self._lose(f"{self._name} did not prove the key that was expected of it.")
            elif event.kind in ("disconnected", "connect_failed"):
                self._lose(f"{self._name} went away; try again when it is back.")

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        for count in itertools.count(1):
            frames = await self._socket.recv_multipart()
            self._heard_s = loop.time()
            if len(frames) == 1:
                self._take(frames[0])
            if count % MESSAGES_BEFORE_YIELD == 0:
                await asyncio.sleep(0)

    def _take(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except MessageError as error:
            self._limited_log.warning(f"{self._name}: {error}")
            return
        if isinstance(message, ServiceStatus):
            answer = self._statuses.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)
            return
        messages = self._running.get(message.number)
        if messages is not None:
            messages.put_nowait(message)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while self.error is None:
            await asyncio.sleep(self._sign_of_life_s)
            if not self._running:
                self._heard_s = loop.time()
                continue
            if loop.time() - self._heard_s > self._silence_s:
                self._lose(f"{self._name} has not answered for {self._silence_s:.0f} s.")
                return
            with contextlib.suppress(UnreachableError):
                await self.send(encode(AskStatus(next(self._status_numbers), PROTOCOL_VERSION)))
