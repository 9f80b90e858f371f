"""Bodies of the OpenAI API: completions whole and in pieces, models, errors."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from fleet.gateway_messages import Delta, Failed, FailureCode, Finished, TokenLogprob

STATUS_OF: dict[FailureCode, int] = {
    "bad_request": 400,
    "context_full": 400,
    "template": 400,
    "unknown_model": 404,
    "overloaded": 429,
    "internal": 500,
    "not_ready": 503,
    "stage_lost": 503,
}
"""Of the HTTP answer, where no part of it was sent yet."""
_CODE_OF: dict[FailureCode, str] = {"context_full": "context_length_exceeded", "unknown_model": "model_not_found"}
"""OpenAI's own names, which clients look for."""


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def failed_body(failed: Failed) -> dict[str, Any]:
    """The error of a request that failed at the gateway; its message names the node."""
    code = _CODE_OF.get(failed.code, failed.code)
    body = error_body(STATUS_OF[failed.code], failed.message, code=code)
    if failed.node:
        body["error"]["node"] = failed.node
    return body


def model_body(name: str, context_tokens: int, created_s: int) -> dict[str, Any]:
    """One model; ``max_model_len`` as vLLM has it."""
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "paceline",
        "max_model_len": context_tokens,
    }


class AnswerShape:
    """How the answer to one request is written; the two kinds of completion differ in this."""

    def __init__(self, model: str, *, is_chat: bool, with_logprobs: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._with_logprobs = with_logprobs
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created_s = int(time.time())
        self._text_offset = 0

    def whole(self, deltas: Sequence[Delta], finished: Finished) -> dict[str, Any]:
        """The answer in one piece."""
        text = "".join(delta.text for delta in deltas)
        logprobs = self._logprobs([one for delta in deltas for one in delta.logprobs])
        choice: dict[str, Any] = {"index": 0, "logprobs": logprobs, "finish_reason": _reason(finished)}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {**self._head(is_chunk=False), "choices": [choice], "usage": _usage(finished)}

    def first(self) -> dict[str, Any] | None:
        """The piece in front of all others, if there is one."""
        return self._chunk({"role": "assistant", "content": ""}, "", None, None) if self._is_chat else None

    def piece(self, delta: Delta) -> dict[str, Any]:
        """A piece of the answer."""
        return self._chunk({"content": delta.text}, delta.text, self._logprobs(delta.logprobs), None)

    def last(self, finished: Finished) -> dict[str, Any]:
        """The piece that says why the answer ends."""
        return self._chunk({}, "", None, _reason(finished))

    def usage(self, finished: Finished) -> dict[str, Any]:
        """The piece behind the last one, for those who asked for it."""
        return {**self._head(is_chunk=True), "choices": [], "usage": _usage(finished)}

    def _head(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self._id, "object": kind, "created": self._created_s, "model": self._model}

    def _chunk(
        self, delta: dict[str, Any], text: str, logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": logprobs, "finish_reason": reason}
        if self._is_chat:
            choice["delta"] = delta
        else:
            choice["text"] = text
        return {**self._head(is_chunk=True), "choices": [choice]}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        if self._is_chat:
            content = [
                {
                    **_token(one.text, one.logprob),
                    "top_logprobs": [_token(text, logprob) for _, text, logprob in one.top],
                }
                for one in logprobs
            ]
            return {"content": content, "refusal": None}
        offsets: list[int] = []
        for one in logprobs:
            offsets.append(self._text_offset)
            self._text_offset += len(one.text)
        return {
            "tokens": [one.text for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [{text: logprob for _, text, logprob in one.top} for one in logprobs],
            "text_offset": offsets,
        }


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _reason(finished: Finished) -> str:
    return "length" if finished.reason == "length" else "stop"


def _usage(finished: Finished) -> dict[str, int]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }
