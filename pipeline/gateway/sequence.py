"""A request as the scheduler sees it, and a sequence: a request that holds KV cache on the stages."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Protocol

from fleet.gateway_messages import Sampling, TokenLogprob

LogprobsOfTokens = tuple[tuple[float, tuple[tuple[int, float], ...]], ...]
"""As in :class:`pipeline.messages.Sampled`."""


class AnswerText(Protocol):
    """Turns the tokens of one answer into text, piece by piece."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come; the text before it has been returned, and no more will be."""

    def push(self, token: int) -> str:
        """The text that is certain once this token is there; it may be empty."""

    def flush(self) -> str:
        """The text that was held back, at the end of the answer."""

    def describe(self, tokens: Tokens[int], logprobs: LogprobsOfTokens) -> tuple[TokenLogprob, ...]:
        """Log-probabilities with the tokens' texts."""


@dataclass(frozen=True)
class RequestKey:
    """Whose request: the connection's routing id at the gateway's ROUTER, and the client's number."""

    client: bytes
    number: int


@dataclass(frozen=True)
class Request:
    """A request whose prompt has been turned into tokens. ``arrived_s`` is when it reached the gateway."""

    key: RequestKey
    tokens: tuple[int, ...]
    sampling: Sampling
    max_tokens: int | None
    answer: AnswerText
    arrived_s: float


@dataclass
class Sequence:
    """A request that was given a number on the stages."""

    number: int
    request: Request
    max_generated: int
    reserved_tokens: int
    """What it may at most hold in the KV cache."""
    sent: int = 0
    """Tokens that were sent in steps."""
    done: int = 0
    """Prompt tokens that came through the stages."""
    generated: int = 0
    last_token: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    unanswered_since_s: float | None = None
    """Set when a result lacks this sequence's token: a Fault that says why is on its way over another connection."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.tokens)

    @property
    def unsent(self) -> int:
        """Prompt tokens that were not sent yet."""
        return max(0, self.prompt_tokens - self.sent)
