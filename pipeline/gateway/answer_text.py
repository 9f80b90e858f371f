"""From tokens to the text of an answer, piece by piece: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleet.gateway_messages import TokenLogprob
from pipeline.gateway.sequence import LogprobsOfTokens
from pipeline.gateway.tokenizer import ModelTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_INCOMPLETE = 3
"""Bytes of a character that can be there without it being whole, hence the most U+FFFD that may still change."""
LONGEST_CLEAN_UP = 4
"""Clean-up rules take a space away in front of at most three characters (" n't")."""
KEPT_TOKENS = 6
WINDOW_TOKENS = 32


class IncrementalDetokenizer:
    """Text of a growing list of tokens: what was returned, put together, is the text of the whole list.

    A window of the last tokens is decoded at every token. Its start moves on only where all text is certain, and some
    tokens before that point stay, because a tokenizer may treat the first token of a text in its own way.

    Args:
        decode: text of a list of tokens.
        cleans_up_spaces: the last characters from a space on are held back until it is certain that the space stays.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, cleans_up_spaces: bool = False) -> None:
        self._decode = decode
        self._cleans_up_spaces = cleans_up_spaces
        self._window: list[int] = []
        self._returned = 0
        """Characters of the window's text that were returned."""

    def push(self, token: int) -> str:
        """The text that is certain with this token, beyond what was returned."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = self._certain_length(text)
        piece = text[self._returned : certain]
        self._returned = max(self._returned, certain)
        if len(self._window) >= WINDOW_TOKENS and piece and certain == len(text):
            self._window = self._window[-KEPT_TOKENS:]
            self._returned = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """What was held back, at the end."""
        text = self._decode(self._window)
        piece = text[self._returned :]
        self._returned = max(self._returned, len(text))
        return piece

    def _certain_length(self, text: str) -> int:
        certain = len(text)
        while certain and len(text) - certain < LONGEST_INCOMPLETE and text[certain - 1] == REPLACEMENT:
            certain -= 1
        if self._cleans_up_spaces:
            space = text.rfind(" ", max(0, certain - LONGEST_CLEAN_UP), certain)
            if space >= 0:
                certain = space
        return certain


class StopFilter:
    """Holds back what may be the beginning of a stop string, and ends the text where one has come whole."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that belongs to no stop string, as far as that is certain."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        certain = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, at the end."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string, but not the whole of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


class Answer:
    """The text of one answer; see :class:`pipeline.gateway.sequence.AnswerText`."""

    def __init__(self, tokenizer: ModelTokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer.decode, cleans_up_spaces=tokenizer.cleans_up_spaces)
        self._filter = StopFilter(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._filter.stopped

    def push(self, token: int) -> str:
        """The text that is certain once this token is there."""
        return self._filter.push(self._detokenizer.push(token))

    def flush(self) -> str:
        """The text that was held back, at the end of the answer; nothing of a stop string."""
        text = self._filter.push(self._detokenizer.flush())
        return text if self._filter.stopped else text + self._filter.flush()

    def describe(self, tokens: Sequence[int], logprobs: LogprobsOfTokens) -> tuple[TokenLogprob, ...]:
        """Log-probabilities with the tokens' texts."""
        text = self._tokenizer.token_text
        return tuple(
            TokenLogprob(token, text(token), logprob, tuple((other, text(other), value) for other, value in top))
            for token, (logprob, top) in zip(tokens, logprobs, strict=False)
        )
