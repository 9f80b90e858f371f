"""Asking an agent over CURVE: the agent's server and the controller's client.

One connection begins with Hello, which carries the range of protocol versions, and is over with the TCP connection:
the client does not reconnect by itself, ``fleet.liveness`` says when to. Whatever arrives, nothing that the other
side sends raises out of the server or the client's reading loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
import zmq
import zmq.asyncio

from fleet.codec import MAX_CONTROL_BYTES, PROTOCOL_VERSION, Decoder, encode
from fleet.connection import Connection, open_connection
from fleet.control_messages import ControlReply, ControlRequest, Hello, Refused, RequestNumber, Welcome
from fleet.enrolment import new_nonce
from fleet.errors import MessageError, PacelineError, RefusedError, UnreachableError
from fleet.identity import Identity
from fleet.limited_log import LimitedLog
from fleet.node import PeerAddress
from fleet.sockets import bind_tcp, curve_server_socket
from fleet.zap import AllowList, authorised_sender

PROTOCOL_MIN = PROTOCOL_VERSION
PROTOCOL_MAX = PROTOCOL_VERSION
MAX_CONNECTIONS = 256
MAX_REQUESTS_IN_WORK = 64
SERVER_HIGH_WATER_MARK = 16
MAX_REFUSAL_CHARACTERS = 4096

RequestHandler = Callable[[ControlRequest, str], Awaitable[ControlReply]]
"""Carries out a request for the controller with this public key. A PacelineError becomes a Refused with its text."""

_log = logging.getLogger("paceline.control")


class _AnyHello(msgspec.Struct, tag_field="type", tag="hello"):
    """What every version's Hello has."""

    number: RequestNumber
    protocol_min: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    protocol_max: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _AnyRequest(msgspec.Struct):
    """What every version's request has."""

    number: RequestNumber


_request_decoder: Decoder[ControlRequest] = Decoder(ControlRequest)
_any_hello_decoder: Decoder[_AnyHello] = Decoder(_AnyHello)
_any_request_decoder: Decoder[_AnyRequest] = Decoder(_AnyRequest)
_reply_decoder: Decoder[ControlReply] = Decoder(ControlReply)


def read_request(frame: bytes | memoryview) -> ControlRequest | Refused:
    """The request in a frame, or the refusal that its sender must be told. Never raises.

    A Hello of another protocol version is refused with the remedy even where it has fields that are not known here.
    """
    number = 0
    try:
        number = _any_request_decoder.decode(frame).number
        hello = _any_hello_decoder.decode(frame)
    except MessageError:
        hello = None
    if hello is not None and (hello.protocol_max < PROTOCOL_MIN or hello.protocol_min > PROTOCOL_MAX):
        older = "this PC" if hello.protocol_min > PROTOCOL_MAX else "the controller"
        return Refused(
            number=hello.number,
            message=f"Update needed: {older} runs an older Paceline that does not understand the other one. "
            f"(Protocol {PROTOCOL_MIN} to {PROTOCOL_MAX} here, {hello.protocol_min} to {hello.protocol_max} there.)",
        )
    try:
        return _request_decoder.decode(frame)
    except MessageError as error:
        return Refused(
            number=number,
            message=f"Update needed: the request is not understood here ({error})."[:MAX_REFUSAL_CHARACTERS],
        )


class ControlServer:
    """The agent's side. Requests of different connections and of one are worked on side by side."""

    def __init__(
        self, context: zmq.asyncio.Context, identity: Identity, allow_list: AllowList, handler: RequestHandler
    ) -> None:
        """``start_zap(context, allow_list)`` must have been called on the same context."""
        self._allow_list = allow_list
        self._limited_log = LimitedLog(_log)
        self._handler = handler
        self._socket: zmq.asyncio.Socket = curve_server_socket(
            context, zmq.ROUTER, identity, high_water_mark=SERVER_HIGH_WATER_MARK
        )
        # The connections that said Hello; the ROUTER never tells which are gone, so the oldest make way.
        self._greeted: OrderedDict[bytes, str] = OrderedDict()
        self._in_work: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None

    def start(self, address: str = "0.0.0.0", port: int = 0) -> int:
        """Binds, begins to serve in the running loop, and returns the port.

        Raises:
            UnreachableError: the port is taken.
        """
        bound_port = bind_tcp(self._socket, address, port)
        self._reader = asyncio.create_task(self._read(), name="control server")
        return bound_port

    async def close(self) -> None:
        """Ends serving; requests in work are cancelled."""
        tasks = [task for task in (self._reader, *self._in_work) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close(0)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            self._take(frames)
            # A receive that has data ready does not yield: without this a flood would starve the loop.
            await asyncio.sleep(0)

    def _take(self, frames: list[zmq.Frame]) -> None:
        if len(frames) != 2:
            self._limited_log.warning(f"dropped a message of {len(frames)} frames")
            return
        sender = authorised_sender(frames[1], self._allow_list)
        if sender is None:
            self._limited_log.warning("dropped a message of a key that is not trusted")
            return
        connection = frames[0].bytes
        request = read_request(frames[1].buffer)
        if isinstance(request, Refused):
            self._send(connection, request)
            return
        if isinstance(request, Hello):
            self._greeted[connection] = sender
            self._greeted.move_to_end(connection)
            while len(self._greeted) > MAX_CONNECTIONS:
                self._greeted.popitem(last=False)
        elif self._greeted.get(connection) != sender:
            self._send(connection, Refused(number=request.number, message="The connection must begin with a greeting."))
            return
        if len(self._in_work) >= MAX_REQUESTS_IN_WORK:
            self._send(connection, Refused(number=request.number, message="Too many requests at once; try again."))
            return
        task = asyncio.create_task(self._work(connection, request, sender), name=f"control {type(request).__name__}")
        self._in_work.add(task)
        task.add_done_callback(self._in_work.discard)

    async def _work(self, connection: bytes, request: ControlRequest, sender: str) -> None:
        try:
            reply = await self._handler(request, sender)
        except PacelineError as error:
            reply = Refused(number=request.number, message=str(error)[:MAX_REFUSAL_CHARACTERS])
        except Exception as error:
            _log.exception("the request %s failed", type(request).__name__)
            reply = Refused(
                number=request.number,
                message=f"The request failed with {type(error).__name__}; the agent's log has the details.",
            )
        if reply.number != request.number:
            reply = msgspec.structs.replace(reply, number=request.number)
        self._send(connection, reply)

    def _send(self, connection: bytes, reply: ControlReply) -> None:
        frame = encode(reply)
        if len(frame) > MAX_CONTROL_BYTES:
            _log.error("an answer of %d bytes exceeds the limit and was not sent", len(frame))
            frame = encode(Refused(number=reply.number, message="The answer is too large to be sent."))
        try:
            # Without waiting: a peer that does not read must not hold up the others, and it asks again anyway.
            # The future is done on return then.
            sent: Any = self._socket.send_multipart([connection, frame], flags=zmq.NOBLOCK)
            sent.result()
        except zmq.ZMQError as error:
            _log.debug("an answer was not sent: %s", error)


class ControlClient:
    """The controller's side of one connection to one agent.

    Made once per connection: after a refusal or a loss close it and make another.
    """

    def __init__(
        self, context: zmq.asyncio.Context, identity: Identity, peer: PeerAddress, *, controller_name: str
    ) -> None:
        self.peer = peer
        self.nonce = new_nonce()
        """What this connection's Hello carries; an enrolment proof in the Welcome must cover it."""
        self.disconnected = asyncio.Event()
        """Set when the connection is lost or closed; requests fail from then on."""
        self._context = context
        self._identity = identity
        self._controller_name = controller_name
        self._limited_log = LimitedLog(_log)
        self._connection: Connection | None = None
        self._waiting: dict[int, asyncio.Future[ControlReply]] = {}
        self._last_number = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.endpoint = ""

    async def connect(self, timeout_s: float = 5.0) -> Welcome:
        """Finds an address behind which the peer proves its key, and greets it.

        Raises:
            UnreachableError: no address answers, or whoever answers does not hold the peer's key.
            EnrolmentError: the peer does not admit this controller.
            RefusedError: the peer speaks no version of the protocol that this controller does.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connect(timeout_s)
        except TimeoutError:
            await self.close()
            raise UnreachableError(f"{self.peer.node_name} does not answer within {timeout_s:g} s.") from None
        except BaseException:
            await self.close()
            raise

    async def request(self, message: ControlRequest, timeout_s: float = 10.0) -> ControlReply:
        """Sends a request and returns its answer. The client numbers requests; the number given is replaced.

        Raises:
            RefusedError: the peer did not carry it out.
            UnreachableError: no connection, lost while waiting, or no answer in time.
            MessageError: the request is too large to be sent.
        """
        if self._connection is None or self.disconnected.is_set():
            raise UnreachableError(f"There is no connection to {self.peer.node_name}.")
        self._last_number += 1
        number = self._last_number
        frame = encode(msgspec.structs.replace(message, number=number))
        if len(frame) > MAX_CONTROL_BYTES:
            raise MessageError(f"A request of {len(frame)} bytes exceeds the limit of {MAX_CONTROL_BYTES}.")
        answer: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._connection.socket.send(frame)
                reply = await answer
        except TimeoutError:
            raise UnreachableError(
                f"{self.peer.node_name} did not answer a request ({type(message).__name__}) within {timeout_s:g} s."
            ) from None
        except zmq.ZMQError:
            raise UnreachableError(f"The connection to {self.peer.node_name} is closed.") from None
        finally:
            del self._waiting[number]
            if answer.done() and not answer.cancelled():
                answer.exception()
        if isinstance(reply, Refused):
            raise RefusedError(f"{self.peer.node_name}: {reply.message}")
        return reply

    async def close(self) -> None:
        """Ends the connection; requests that wait fail. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._connection is not None:
            self._connection.close()
        self._lose()

    async def _connect(self, timeout_s: float) -> Welcome:
        connection = await open_connection(self._context, self._identity, self.peer, timeout_s)
        self._connection = connection
        self.endpoint = connection.endpoint
        self._tasks = [
            asyncio.create_task(self._read(connection.socket), name="control client"),
            asyncio.create_task(self._watch(connection), name="control client monitor"),
        ]
        reply = await self.request(
            Hello(
                number=0,
                protocol_min=PROTOCOL_MIN,
                protocol_max=PROTOCOL_MAX,
                controller_name=self._controller_name,
                nonce=self.nonce,
            ),
            timeout_s,
        )
        if not isinstance(reply, Welcome) or not PROTOCOL_MIN <= reply.protocol <= PROTOCOL_MAX:
            raise RefusedError(f"{self.peer.node_name}: Update needed: it answered the greeting with something else.")
        return reply

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames: list[Any] = await socket.recv_multipart()
            if len(frames) == 1:
                try:
                    reply = _reply_decoder.decode(frames[0])
                except MessageError as error:
                    self._limited_log.warning(f"{self.peer.node_name} sent an answer that is not understood: {error}")
                else:
                    answer = self._waiting.get(reply.number)
                    if answer is not None and not answer.done():
                        answer.set_result(reply)
            await asyncio.sleep(0)

    async def _watch(self, connection: Connection) -> None:
        await connection.lost()
        self._lose()

    def _lose(self) -> None:
        self.disconnected.set()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(UnreachableError(f"The connection to {self.peer.node_name} was lost."))
