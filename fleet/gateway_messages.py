"""Messages between a gateway and its clients: the chat window, the command line, and the gateway's own HTTP API.

A client's DEALER, the gateway's ROUTER, one msgpack frame each way. Several requests share a connection; every message
about one carries its number.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fleet.node import Text

RequestNumber = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
PromptText = Annotated[str, msgspec.Meta(max_length=2_000_000)]
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

SIGN_OF_LIFE_S = 5.0
"""A client with running requests is heard at least this often."""
SILENCE_S = 20.0
"""A client, or a gateway, that was not heard for so long while requests run counts as gone."""

FinishReason = Literal["stop", "length", "cancelled"]
FailureCode = Literal[
    "bad_request", "context_full", "stage_lost", "not_ready", "overloaded", "template", "unknown_model", "internal"
]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the next token is chosen from the logits. ``temperature`` 0 is greedy.

    The order is that of the OpenAI API and of the common samplers: bias, penalties, temperature, top-k, top-p, min-p.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """0: no limit."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    logit_bias: Annotated[dict[TokenId, float], msgspec.Meta(max_length=1024)] = {}
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    """None: no log-probabilities; 0: the chosen token's; n: also the n most probable ones'."""
    ignore_stop_ids: bool = False
    """Go on past the model's stop ids; for benchmarks."""


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: PromptText


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="generate"):
    """Answer a chat, or complete a text or a token list: exactly one of the three."""

    number: RequestNumber
    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(max_length=4096)] | None = None
    prompt: PromptText | None = None
    tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=2_000_000)] | None = None
    sampling: Sampling = Sampling()
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """None: until the context is full."""
    stop: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...], msgspec.Meta(max_length=16)
    ] = ()
    model: Text | None = None
    """None: whichever the gateway serves; another name than the gateway's is refused."""
    plain_without_template: bool = False
    """Whether a chat with a model that has no chat template is put to it as plain text, rather than refused."""


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="cancel"):
    """Stop a request. Its end arrives as Finished with reason ``cancelled``."""

    number: RequestNumber


class AskStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="status"):
    """The first message of a connection and a sign of life; answered with ServiceStatus.

    A client that has requests running sends it at least every ``SIGN_OF_LIFE_S``; one that falls silent for
    ``SILENCE_S`` counts as gone.
    """

    number: RequestNumber
    protocol: Annotated[int, msgspec.Meta(ge=1, le=65535)]


ClientMessage = Generate | Cancel | AskStatus


class TokenLogprob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: TokenId
    text: str
    logprob: float
    top: tuple[tuple[TokenId, str, float], ...] = ()


class Accepted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="accepted"):
    """The request is in the queue."""

    number: RequestNumber
    prompt_tokens: TokenCount


class PrefillProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="prefill"):
    """How much of a long prompt has been read."""

    number: RequestNumber
    done_tokens: TokenCount
    total_tokens: TokenCount


class Delta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="delta"):
    """More of the answer. ``text`` may be empty while a character is incomplete."""

    number: RequestNumber
    text: str
    tokens: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Finished(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="finished"):
    """The end of an answer."""

    number: RequestNumber
    reason: FinishReason
    prompt_tokens: TokenCount
    completion_tokens: TokenCount
    time_to_first_token_s: float
    """From the request's arrival at the gateway; 0 where no token was made."""
    decode_s: float
    """From the first token to the last."""


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="failed"):
    """The end of a request that could not be answered; ``message`` is one plain sentence, naming the node at fault."""

    number: RequestNumber
    code: FailureCode
    message: str
    node: str = ""


class StageReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage as the gateway sees it."""

    stage: int
    node: str
    first_layer: int
    end_layer: int
    connected: bool
    device: str = ""
    compute_ms: float = 0.0
    """Exponentially smoothed time of a decode step in this stage."""


class ServiceStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="service"):
    """What the gateway serves and how it is."""

    number: RequestNumber
    protocol: int
    model: str
    state: Literal["starting", "ready", "degraded"]
    detail: str
    context_tokens: int
    has_chat_template: bool
    kv_precision: str
    running: int
    """Sequences that hold KV cache on the stages."""
    waiting: int
    """Requests in the queue."""
    stages: tuple[StageReport, ...]
    tokens_total: int


GatewayMessage = Accepted | PrefillProgress | Delta | Finished | Failed | ServiceStatus
