"""Choosing the next token from logits, in numpy, fast enough for vocabularies of 150,000 tokens.

The order is that of :class:`fleet.gateway_messages.Sampling`:

1. ``logit_bias`` is added.
2. Repetition penalty r over the prompt and the answer: a positive logit is divided by r, a negative one multiplied
   (Keskar et al. 2019, CTRL, https://arxiv.org/abs/1909.05858, section 4.1, in the form for negative logits that
   Hugging Face Transformers introduced and others follow).
3. Frequency and presence penalty over the answer: ``logit[j] - count[j] * frequency - (count[j] > 0) * presence``,
   where ``count[j]`` says how often token j was sampled before this position (OpenAI API reference, "Frequency and
   presence penalties").
4. Temperature 0: the largest logit, the lowest id among equals. Otherwise the logits are divided by it.
5. Top-k keeps the k largest (Fan et al. 2018, https://arxiv.org/abs/1805.04833).
6. Top-p keeps the smallest set of most probable tokens whose share of what top-k left is at least p (Holtzman et
   al. 2020, https://arxiv.org/abs/1904.09751).
7. Min-p keeps the tokens that are at least min_p times as probable as the most probable one (Nguyen et al. 2024,
   https://arxiv.org/abs/2407.01082).
8. One of the rest is drawn in proportion to its probability.

The number that decides a draw depends on the sequence's seed and the token's position alone (a counter-based generator,
Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405), so that a replay after a lost stage draws the same ones.
Log-probabilities are those of the model, before steps 1 to 8.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.errors import PacelineError
from fleet.gateway_messages import Sampling

MIN_TEMPERATURE = 1e-5
"""Below it a draw is greedy: the quotient would leave the range of f32."""
_BLOCK = 64

Logits = NDArray[np.float32]
TokenIds = NDArray[np.int64]
TopLogprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The chosen token's log-probability, and the most probable tokens with theirs, most probable first."""


class LogitsError(PacelineError):
    """The model gave logits that no token can be chosen from."""


class TokenCounts:
    """How often each token occurs, for those that do, in arrays that grow: a penalty is one numpy operation."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._tokens = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            index = self._index.get(token)
            if index is None:
                index = self._index[token] = len(self._index)
                if index == len(self._tokens):
                    self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._tokens[index] = token
            self._counts[index] += 1

    @property
    def tokens(self) -> TokenIds:
        """Distinct token ids, ``[n]``."""
        return self._tokens[: len(self._index)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of ``tokens`` occurs, ``[n]``."""
        return self._counts[: len(self._index)]


class SequenceSampler:
    """Samples the tokens of one sequence. Tell it every token, in order, with ``extend``.

    Args:
        sampling: the sequence's settings.
        prompt_tokens: the prompt's length, or None where the prompt ends with the first sampled position.
    """

    def __init__(self, sampling: Sampling, prompt_tokens: int | None = None) -> None:
        self.sampling = sampling
        self._seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._prompt_tokens = prompt_tokens
        self._length = 0
        self._counts_all = sampling.repetition_penalty != 1.0
        self._counts_answer = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._all = TokenCounts()
        self._answer = TokenCounts()
        self._bias_tokens = np.fromiter(sampling.logit_bias, np.int64, len(sampling.logit_bias))
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float32, len(sampling.logit_bias))

    @property
    def length(self) -> int:
        """Tokens that were told so far; the position of the token that is sampled next."""
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens come next in the sequence."""
        if self._counts_all:
            self._all.add(tokens)
        if self._counts_answer and self._prompt_tokens is not None:
            self._answer.add(tokens[max(0, self._prompt_tokens - self._length) :])
        self._length += len(tokens)

    def sample(self, logits: Logits) -> tuple[int, TopLogprobs | None]:
        """The token after those told so far, and its log-probabilities if the settings ask for them.

        Args:
            logits: ``[vocabulary]``; not changed.

        Raises:
            LogitsError: a logit is not a number, or the largest is infinite.
        """
        if self._prompt_tokens is None:
            self._prompt_tokens = self._length
        largest = float(logits.max())
        if not math.isfinite(largest):
            raise LogitsError("the model gave logits that are not numbers")
        adjusted = self._adjust(logits)
        temperature = self.sampling.temperature
        if temperature < MIN_TEMPERATURE:
            token = int(adjusted.argmax())
        else:
            tokens, weights = candidates(adjusted, self.sampling)
            token = draw(tokens, weights, uniform(self._seed, self._length))
        wanted = self.sampling.top_logprobs
        return token, None if wanted is None else top_logprobs(logits, token, wanted)

    def _adjust(self, logits: Logits) -> Logits:
        """Steps 1 to 3; the same array where there is nothing to do."""
        sampling = self.sampling
        if not (len(self._bias) or self._counts_all or self._counts_answer):
            return logits
        adjusted = logits.copy()
        if len(self._bias):
            adjusted[self._bias_tokens] += self._bias
        if self._counts_all:
            tokens = self._all.tokens
            values = adjusted[tokens]
            penalty = np.float32(sampling.repetition_penalty)
            adjusted[tokens] = np.where(values > 0, values / penalty, values * penalty)
        if self._counts_answer:
            presence = np.float32(sampling.presence_penalty)
            frequency = np.float32(sampling.frequency_penalty)
            adjusted[self._answer.tokens] -= self._answer.counts * frequency + presence
        return adjusted


def candidates(logits: Logits, sampling: Sampling) -> tuple[TokenIds | None, Logits]:
    """Steps 4 to 7 for a temperature above 0: token ids and their weights, in proportion to probability.

    The ids are None where nothing was cut off: then ``weights[i]`` is that of token i. Ties at an edge go to lower ids.
    """
    tokens: TokenIds | None = None
    scores = logits
    if 0 < sampling.top_k < len(logits):
        tokens = _largest(logits, sampling.top_k)
        scores = logits[tokens]
    weights = scores - scores.max()
    weights /= np.float32(sampling.temperature)
    np.exp(weights, out=weights)
    if sampling.top_p < 1.0:
        kept = _nucleus(scores, weights, sampling.top_p)
        tokens = kept if tokens is None else tokens[kept]
        weights = weights[kept]
    if sampling.min_p > 0.0:
        # The most probable token always survives the steps before, with weight 1.
        kept = np.flatnonzero(weights >= sampling.min_p)
        tokens = kept if tokens is None else tokens[kept]
        weights = weights[kept]
    return tokens, weights


def draw(tokens: TokenIds | None, weights: Logits, number: float) -> int:
    """The token at ``number`` (0 to 1, exclusive) of the weights' cumulative sum."""
    cumulative = weights.cumsum(dtype=np.float64)
    index = int(cumulative.searchsorted(number * cumulative[-1], side="right"))
    # Rounding of the product can reach the very end, where weights of 0 may stand.
    index = min(index, int(cumulative.searchsorted(cumulative[-1], side="left")))
    return index if tokens is None else int(tokens[index])


def uniform(seed: int, position: int) -> float:
    """A number from 0 to 1 (exclusive) that depends on nothing but seed and position."""
    bits = np.random.Philox(key=seed, counter=position)
    return float(np.random.Generator(bits).random())


def top_logprobs(logits: Logits, token: int, wanted: int) -> TopLogprobs:
    """Log-probabilities of a token and of the ``wanted`` most probable ones, most probable first."""
    largest = logits.max()
    exponentials = np.exp(logits - largest)
    log_sum = float(largest) + math.log(float(exponentials.sum(dtype=np.float64)))
    most: list[tuple[int, float]] = []
    if wanted:
        best = _largest(logits, min(wanted, len(logits)))
        best = best[np.argsort(-logits[best], kind="stable")]
        most = [(int(index), float(logits[index]) - log_sum) for index in best]
    return float(logits[token]) - log_sum, tuple(most)


def _largest(values: NDArray[Any], count: int) -> TokenIds:
    """Indices of the ``count`` largest values, ascending; among equals at the edge the lower indices."""
    considered = values
    blocks = len(values) // _BLOCK
    if blocks > count:
        # The count-th largest maximum of a block is no larger than the count-th largest value: less is out of question.
        maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        considered = values[values >= np.partition(maxima, blocks - count)[blocks - count]]
    edge = np.partition(considered, len(considered) - count)[len(considered) - count]
    above = np.flatnonzero(values > edge)
    if len(above) == count:
        return above
    equal = np.flatnonzero(values == edge)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(scores: Logits, weights: Logits, share: float) -> TokenIds:
    """Indices of the fewest largest weights that make up ``share`` of their sum, ascending.

    They are ranked by ``scores``, of which unequal ones can have equal weights.
    """
    target = share * float(weights.sum(dtype=np.float64))
    # Sorting the whole vocabulary is what makes top-p slow. A few tokens carry nearly all the weight, as a rule.
    considered = np.arange(len(weights))
    floor = 1e-2
    while floor > 1e-12:
        heavy = np.flatnonzero(weights >= floor)
        if float(weights[heavy].sum(dtype=np.float64)) > target:
            considered = heavy
            break
        floor /= 16
    order = considered[np.argsort(-scores[considered], kind="stable")]
    needed = int(weights[order].cumsum(dtype=np.float64).searchsorted(target, side="left")) + 1
    return np.sort(order[:needed])
