"""The OpenAI-compatible HTTP API: a client of the gateway like any other.

It listens on loopback and has no password, so it must not take requests from web pages: a page may send them to
127.0.0.1, and by DNS rebinding (https://en.wikipedia.org/wiki/DNS_rebinding) even read the answers. Requests whose
Host is not this PC, or that a page of another origin has sent, are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fleet.errors import MessageError, PacelineError
from fleet.gateway_client import GatewayClient
from fleet.gateway_messages import (
    Accepted,
    Delta,
    Failed,
    Finished,
    GatewayMessage,
    Generate,
    PrefillProgress,
    ServiceStatus,
)
from pipeline.gateway.http_answers import STATUS_OF, AnswerShape, error_body, event, failed_body, model_body
from pipeline.gateway.http_requests import (
    BadRequest,
    ChatCompletionRequest,
    CompletionRequest,
    chat_generate,
    completion_generate,
    decode_request,
)

MAX_BODY_BYTES = 8 << 20
RETRY_AFTER_S = 2
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for an answer that nobody waits for."""
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class ClientGone(Exception):  # noqa: N818 it is an outcome, not a fault
    """The HTTP client has closed its connection."""


class LocalCallersOnly:
    """Refuses requests that come from a web page, or under another name than this PC's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            origin = headers.get(b"origin")
            if _host(f"//{headers.get(b'host', '')}") not in LOCAL_HOSTS or (
                origin is not None and _host(origin) not in LOCAL_HOSTS
            ):
                text = "This API answers programs of this PC only, under the name localhost or 127.0.0.1."
                await _json(403, error_body(403, text, code="forbidden"))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class HttpApi:
    """The routes. ``client`` must live in the loop that serves them.

    Args:
        defaults: sampling values for requests that give none.
    """

    def __init__(self, client: GatewayClient, defaults: Mapping[str, float]) -> None:
        self._client = client
        self._defaults = defaults
        self._started_s = int(time.time())

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/status", self._status),
            Route("/health", self._health),
        ]
        handlers: dict[Any, Any] = {
            HTTPException: _http_exception,
            BadRequest: _bad_request,
            ClientGone: _client_gone,
            PacelineError: _unreachable,
        }
        return LocalCallersOnly(Starlette(routes=routes, exception_handlers=handlers))

    async def _chat(self, request: Request) -> Response:
        wanted = decode_request(await _body(request), ChatCompletionRequest)
        generate = chat_generate(wanted, self._client.next_number(), self._defaults)
        with_usage = bool(wanted.stream_options and wanted.stream_options.include_usage)
        return await self._answer(request, generate, bool(wanted.stream), with_usage)

    async def _completion(self, request: Request) -> Response:
        wanted = decode_request(await _body(request), CompletionRequest)
        generate = completion_generate(wanted, self._client.next_number(), self._defaults)
        with_usage = bool(wanted.stream_options and wanted.stream_options.include_usage)
        return await self._answer(request, generate, bool(wanted.stream), with_usage)

    async def _answer(self, request: Request, generate: Generate, stream: bool, with_usage: bool) -> Response:
        model = generate.model or (await self._client.status()).model
        shape = AnswerShape(
            model,
            is_chat=generate.messages is not None,
            with_logprobs=generate.sampling.top_logprobs is not None,
        )
        messages = self._client.generate(generate)
        try:
            # No answer is begun before there is something of it: until then an error can still be an HTTP status.
            first = await _unless_gone(_first_message(messages), request.receive)
            if isinstance(first, Failed):
                return _failed(first)
            if stream:
                return EventStream(_events(messages, first, shape, with_usage))
            return await _unless_gone(_whole(messages, first, shape), request.receive)
        except BaseException:
            await messages.aclose()
            raise

    async def _models(self, request: Request) -> Response:
        status = await self._client.status()
        model = model_body(status.model, status.context_tokens, self._started_s)
        return _json(200, {"object": "list", "data": [model]})

    async def _model(self, request: Request) -> Response:
        status = await self._client.status()
        name = request.path_params["name"]
        if name != status.model:
            return _failed(Failed(0, "unknown_model", f"The model {name!r} is not served here; {status.model!r} is."))
        return _json(200, model_body(status.model, status.context_tokens, self._started_s))

    async def _status(self, request: Request) -> Response:
        return _json(200, await self._client.status())

    async def _health(self, request: Request) -> Response:
        status = await self._client.status()
        body = {"status": status.state, "detail": status.detail}
        return _json(200 if status.state == "ready" else 503, body)


class EventStream(Response):
    """Sends the events until they end or the client goes away, and closes them either way."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(ClientGone):
                await _unless_gone(self._write(send), receive)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _first_message(messages: AsyncIterator[GatewayMessage]) -> GatewayMessage:
    """The first message that shows that the request is being worked on, or its end."""
    async for message in messages:
        if not isinstance(message, Accepted):
            return message
    raise AssertionError("a request ends with Finished or Failed")


async def _whole(messages: AsyncIterator[GatewayMessage], first: GatewayMessage, shape: AnswerShape) -> Response:
    deltas: list[Delta] = []
    message = first
    while True:
        if isinstance(message, Delta):
            deltas.append(message)
        elif isinstance(message, Finished):
            return _json(200, shape.whole(deltas, message))
        elif isinstance(message, Failed):
            return _failed(message)
        message = await anext(messages)


async def _events(
    messages: AsyncGenerator[GatewayMessage, None], first: GatewayMessage, shape: AnswerShape, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(messages):
        head = shape.first()
        if head is not None:
            yield event(head)
        message = first
        try:
            while not isinstance(message, Finished | Failed):
                if isinstance(message, PrefillProgress):
                    # A comment: it keeps whatever stands in between from giving the connection up.
                    yield f": {message.done_tokens} of {message.total_tokens} prompt tokens read\n\n".encode()
                elif isinstance(message, Delta) and (message.text or message.logprobs):
                    yield event(shape.piece(message))
                message = await anext(messages)
        except PacelineError as error:
            yield event(error_body(503, str(error), code="unreachable"))
            return
        if isinstance(message, Failed):
            yield event(failed_body(message))
            return
        yield event(shape.last(message))
        if with_usage:
            yield event(shape.usage(message))
        yield b"data: [DONE]\n\n"


async def _unless_gone(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of ``work``, which is cancelled when the client closes the connection.

    Raises:
        ClientGone: the client was gone first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"The request exceeds {MAX_BODY_BYTES >> 20} MiB.")
    return bytes(body)


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _json(status: int, body: dict[str, Any] | ServiceStatus) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _failed(failed: Failed) -> Response:
    return _json(STATUS_OF[failed.code], failed_body(failed))


def _http_exception(request: Request, error: HTTPException) -> Response:
    text = {404: f"There is nothing at {request.url.path}.", 405: f"{request.method} is not served here."}
    return _json(error.status_code, error_body(error.status_code, text.get(error.status_code, error.detail)))


def _bad_request(request: Request, error: BadRequest) -> Response:
    return _json(400, error_body(400, str(error), param=error.param))


def _client_gone(request: Request, error: ClientGone) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _unreachable(request: Request, error: PacelineError) -> Response:
    if isinstance(error, MessageError):
        return _json(400, error_body(400, str(error)))
    return _json(503, error_body(503, str(error), code="unreachable"))
