"""What steps cost on the stages, learned from their results, and how long a prefill chunk may be in consequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.messages import StageTiming

SMOOTHING = 0.2
"""Weight of the newest step in the exponential mean."""
READER_SLOWDOWN = 2.7
"""How many times as far apart a reader's tokens may come while somebody else's prompt is read."""
LARGEST_SHARE = 8
MIN_CHUNK_TOKENS = 4
MARGINAL_COST_GUESS = 0.25
"""Cost of one more token in a chunk, in decode steps, until it was measured; 0.22 on a CPU core with a 135M model."""


@dataclass
class StepCosts:
    """Smoothed times in ms. Feed every result to ``record``."""

    stages: int
    decode_ms: dict[int, float] = field(default_factory=dict)
    """Per stage: a decode step as it was sent, be it of one or of several sequences."""
    _entry_ms: float = 0.0
    """One sequence's part of a decode step, on the slowest stage."""
    _token_ms: float = 0.0
    """One more token in a chunk, on the slowest stage."""

    def record(self, tokens_per_entry: tuple[int, ...], timings: Iterable[StageTiming]) -> None:
        """Learn from a step that came back: how many tokens its entries had, and what each stage spent on it."""
        slowest_ms = 0.0
        tokens = sum(tokens_per_entry)
        entries = len(tokens_per_entry)
        is_decode = tokens == entries
        for timing in timings:
            slowest_ms = max(slowest_ms, timing.compute_ms)
            if is_decode:
                self.decode_ms[timing.stage] = _smooth(self.decode_ms.get(timing.stage, 0.0), timing.compute_ms)
        if slowest_ms <= 0:
            return
        if is_decode:
            self._entry_ms = _smooth(self._entry_ms, slowest_ms / entries)
        elif self._entry_ms:
            beyond_first_ms = slowest_ms - entries * self._entry_ms
            self._token_ms = _smooth(self._token_ms, max(beyond_first_ms / (tokens - entries), 1e-6))

    def chunk_tokens(self, largest: int, decoding: int, prefilling: int) -> int:
        """How many prompt tokens the next step may carry.

        Nobody reads an answer: ``largest``. Otherwise as many as :data:`READER_SLOWDOWN` allows, more where more
        people wait for their first token than read, so that a crowd of new prompts is not served last.
        """
        if decoding == 0:
            return largest
        if not self._entry_ms:
            return max(MIN_CHUNK_TOKENS, largest // 4)
        stages = self.stages
        if decoding + prefilling <= stages:
            # As many steps as stages: they move on together, each waiting for the longest, which is the chunk.
            budget = READER_SLOWDOWN
        else:
            # One step more than stages: while a reader's next token is on its way, a stage works off the other
            # readers' tokens and ``stages`` chunks.
            budget = (READER_SLOWDOWN * max(stages, decoding) - decoding) / stages
        share = min(max(prefilling / decoding, 1.0), LARGEST_SHARE)
        further_ms = (budget * share - 1) * self._entry_ms
        token_ms = self._token_ms or MARGINAL_COST_GUESS * self._entry_ms
        return min(largest, max(MIN_CHUNK_TOKENS, 1 + int(further_ms / token_ms)))


def _smooth(mean: float, value: float) -> float:
    return value if mean <= 0 else mean + SMOOTHING * (value - mean)
