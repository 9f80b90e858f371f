"""Throughput and latency figures from the times at which tokens arrived."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class RequestTimes(msgspec.Struct, frozen=True):
    """When one request was sent and when each of its tokens arrived, in seconds of one monotonic clock."""

    sent_s: float
    tokens_s: tuple[float, ...]


class Percentiles(msgspec.Struct, frozen=True):
    """Median and 95th percentile, in seconds."""

    p50: float
    p95: float


class Round(msgspec.Struct, frozen=True):
    """One round of ``users`` requests sent at the same moment."""

    users: int
    requests: tuple[RequestTimes, ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests over the time from sending the first to the arrival of the last token."""
        tokens = sum(len(request.tokens_s) for request in self.requests)
        sent_s = min(request.sent_s for request in self.requests)
        last_s = max(request.tokens_s[-1] for request in self.requests)
        return tokens / (last_s - sent_s)


class Run(msgspec.Struct, frozen=True):
    """What several rounds with the same number of users gave.

    ``tokens_per_second`` is the median over the rounds, with the lowest and the highest beside it; the latencies are
    over all tokens of all rounds.
    """

    users: int
    rounds: int
    tokens_per_second: float
    tokens_per_second_lowest: float
    tokens_per_second_highest: float
    time_to_first_token_s: Percentiles
    inter_token_s: Percentiles


def percentiles(values_s: Sequence[float]) -> Percentiles:
    """The percentiles of at least one value."""
    p50, p95 = np.percentile(np.asarray(values_s, dtype=np.float64), [50, 95])
    return Percentiles(float(p50), float(p95))


def summarise(rounds: Sequence[Round]) -> Run:
    """The figures of at least one round, all with the same number of users and at least one token per request."""
    requests = [request for one in rounds for request in one.requests]
    rates = sorted(one.tokens_per_second for one in rounds)
    first_s = [request.tokens_s[0] - request.sent_s for request in requests]
    gaps_s = [
        later - earlier
        for request in requests
        for earlier, later in zip(request.tokens_s, request.tokens_s[1:], strict=False)
    ]
    return Run(
        users=rounds[0].users,
        rounds=len(rounds),
        tokens_per_second=float(np.median(rates)),
        tokens_per_second_lowest=rates[0],
        tokens_per_second_highest=rates[-1],
        time_to_first_token_s=percentiles(first_s),
        inter_token_s=percentiles(gaps_s or [0.0]),
    )
