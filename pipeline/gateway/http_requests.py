"""Requests of the OpenAI API: read leniently, checked strictly, and turned into Generate messages.

Fields that this API does not know are ignored, as OpenAI's own servers and clients of other versions expect.
Fields that ask for something that is not served here (several choices, tools, a JSON answer) are refused rather than
ignored, because an answer without them would be wrong.

Where a request says nothing, sampling follows the model's ``generation_config.json``, and where that says nothing
either the OpenAI API: temperature 1, top_p 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from fleet.gateway_messages import ChatMessage, Generate, Sampling

DEFAULT_COMPLETION_TOKENS = 16
"""Of ``/v1/completions``, as OpenAI documents it; a chat goes on until it ends."""
SMALLEST_TOP_P = 1e-6
"""OpenAI allows 0, which keeps the most probable token alone; so does this."""
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
ROLES: dict[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class BadRequest(Exception):  # noqa: N818 it is an answer, not a fault of the program
    """HTTP 400; ``param`` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    """Fields that both kinds of completion have. ``ignore_eos`` and the samplers OpenAI lacks have vLLM's names."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    n: int | None = None
    ignore_eos: bool | None = None


class RequestMessage(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatCompletionRequest(_Common):
    """POST /v1/chat/completions; https://platform.openai.com/docs/api-reference/chat/create."""

    messages: list[RequestMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(_Common):
    """POST /v1/completions; https://platform.openai.com/docs/api-reference/completions/create."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


RequestType = TypeVar("RequestType", ChatCompletionRequest, CompletionRequest)


def decode_request(body: bytes, request_type: type[RequestType]) -> RequestType:
    """The request.

    Raises:
        BadRequest: it is not JSON, or a field has the wrong type.
    """
    try:
        return msgspec.json.decode(body, type=request_type)
    except msgspec.ValidationError as error:
        raise BadRequest(f"The request is not valid: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The request is not JSON: {error}.") from None


def load_sampling_defaults(folder: Path) -> dict[str, float]:
    """What the model's ``generation_config.json`` says of sampling, if it is there and can be read."""
    try:
        found = msgspec.json.decode((folder / "generation_config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}
    defaults: dict[str, float] = {}
    for name in SAMPLING_DEFAULTS:
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[name] = value
    if found.get("do_sample") is False:
        # Its authors want the most probable token.
        defaults["temperature"] = 0.0
    try:
        msgspec.convert(_within_bounds(defaults), Sampling)
    except msgspec.ValidationError:
        return {}
    return defaults


def chat_generate(request: ChatCompletionRequest, number: int, defaults: Mapping[str, float]) -> Generate:
    """The gateway's request for a chat.

    Raises:
        BadRequest: a field is out of its bounds or asks for what is not served.
    """
    _refuse(bool(request.tools) or bool(request.functions), "tools", "This server does not call tools.")
    wanted_format = (request.response_format or {}).get("type", "text")
    _refuse(wanted_format != "text", "response_format", f"The response format {wanted_format!r} is not served here.")
    top = request.top_logprobs
    _refuse(top is not None and not request.logprobs, "top_logprobs", "top_logprobs needs logprobs to be true.")
    top_logprobs = (top or 0) if request.logprobs else None
    most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    return _checked(
        number=number,
        model=request.model,
        messages=[_message(message, index) for index, message in enumerate(request.messages)],
        sampling=_sampling(request, top_logprobs, defaults),
        max_tokens=most,
        stop=_stops(request.stop),
    )


def completion_generate(request: CompletionRequest, number: int, defaults: Mapping[str, float]) -> Generate:
    """The gateway's request for a plain completion.

    Raises:
        BadRequest: a field is out of its bounds or asks for what is not served.
    """
    _refuse(bool(request.echo), "echo", "echo is not served here.")
    _refuse(bool(request.suffix), "suffix", "suffix is not served here.")
    _refuse(request.best_of not in (None, 1), "best_of", "Only one choice is made per request.")
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    content: dict[str, Any]
    if isinstance(prompt, str):
        content = {"prompt": prompt}
    elif isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        content = {"tokens": prompt}
    else:
        raise BadRequest("prompt is one text, a list with one text, or a list of token ids.", "prompt")
    return _checked(
        number=number,
        model=request.model,
        sampling=_sampling(request, request.logprobs, defaults),
        max_tokens=DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens,
        stop=_stops(request.stop),
        **content,
    )


def _refuse(condition: bool, param: str, message: str) -> None:
    if condition:
        raise BadRequest(message, param)


def _message(message: RequestMessage, index: int) -> ChatMessage:
    role = ROLES.get(message.role)
    where = f"messages[{index}]"
    if role is None:
        raise BadRequest(f"{where} has the role {message.role!r}; known are {', '.join(ROLES)}.", "messages")
    if isinstance(message.content, str):
        return ChatMessage(role, message.content)
    texts: list[str] = []
    for part in message.content or []:
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise BadRequest(f"{where} has a part of type {part.get('type')!r}; only text is served.", "messages")
        texts.append(text)
    return ChatMessage(role, "\n".join(texts))


def _stops(stop: str | list[str] | None) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else stop


def _sampling(
    request: ChatCompletionRequest | CompletionRequest, top_logprobs: int | None, defaults: Mapping[str, float]
) -> dict[str, Any]:
    _refuse(request.n not in (None, 1), "n", "Only one choice is made per request; ask n times instead.")
    sampling: dict[str, Any] = {"temperature": 1.0, **defaults}
    for name in (*SAMPLING_DEFAULTS, "presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        if value is not None:
            sampling[name] = value
    if request.seed is not None:
        sampling["seed"] = request.seed % 2**63
    if request.logit_bias:
        sampling["logit_bias"] = _logit_bias(request.logit_bias)
    sampling["top_logprobs"] = top_logprobs
    sampling["ignore_stop_ids"] = bool(request.ignore_eos)
    return _within_bounds(sampling)


def _within_bounds(sampling: dict[str, Any]) -> dict[str, Any]:
    """Values that other systems write and mean something else here: top_p 0, and -1 for no top_k."""
    changed = dict(sampling)
    if changed.get("top_p") == 0:
        changed["top_p"] = SMALLEST_TOP_P
    if changed.get("top_k") == -1:
        changed["top_k"] = 0
    return changed


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise BadRequest("The keys of logit_bias are token ids.", "logit_bias") from None


def _checked(**fields: Any) -> Generate:
    try:
        return msgspec.convert({"type": "generate", **fields}, Generate, from_attributes=True)
    except msgspec.ValidationError as error:
        raise BadRequest(f"The request is not valid: {error}.") from None
