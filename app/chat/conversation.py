"""A chat as data: who said what, and what became of each answer. Free of Qt and of the network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fleet.gateway_messages import ChatMessage, Delta, Failed, Finished, GatewayMessage, PrefillProgress

AnswerState = Literal["waiting", "reading", "writing", "finished", "stopped", "failed"]


@dataclass
class Answer:
    """One answer, from its question to its end. Times are seconds of one clock."""

    asked_s: float
    text: str = ""
    state: AnswerState = "waiting"
    read_tokens: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    time_to_first_token_s: float | None = None
    tokens_per_second: float | None = None
    cut_short: bool = False
    """The answer ended at the limit of tokens, not by itself."""
    error: str = ""
    error_details: str = ""

    @property
    def running(self) -> bool:
        return self.state in ("waiting", "reading", "writing")

    def take(self, message: GatewayMessage, now_s: float) -> None:
        """What a message of the gateway changes."""
        match message:
            case PrefillProgress(done_tokens=done, total_tokens=total):
                if self.state == "waiting":
                    self.state = "reading"
                self.read_tokens, self.prompt_tokens = done, total
            case Delta(text=text, tokens=tokens):
                self._grow(text, len(tokens), now_s)
            case Finished():
                self._finish(message)
            case Failed(code=code, message=text, node=node):
                self.fail(text, f"{text}\ncode: {code}\nnode: {node or 'unknown'}")
            case _:
                pass

    def fail(self, error: str, details: str = "") -> None:
        self.state, self.error, self.error_details = "failed", error, details or error

    def stop(self) -> None:
        """The person stopped it before its end."""
        if self.running:
            self.state = "stopped"

    def _grow(self, text: str, tokens: int, now_s: float) -> None:
        self.text += text
        if not tokens:
            return
        self.state = "writing"
        self.tokens += tokens
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.time_to_first_token_s = now_s - self.asked_s
        elif now_s > self.first_token_s:
            self.tokens_per_second = (self.tokens - 1) / (now_s - self.first_token_s)
        self.last_token_s = now_s

    def _finish(self, message: Finished) -> None:
        """The gateway's own figures replace those that were measured here."""
        self.state = "stopped" if message.reason == "cancelled" else "finished"
        self.cut_short = message.reason == "length"
        self.tokens = message.completion_tokens
        self.prompt_tokens = message.prompt_tokens
        if message.completion_tokens:
            self.time_to_first_token_s = message.time_to_first_token_s
        if message.completion_tokens > 1 and message.decode_s > 0:
            self.tokens_per_second = (message.completion_tokens - 1) / message.decode_s


@dataclass
class Turn:
    """A question and its answer."""

    question: str
    answer: Answer


@dataclass
class Conversation:
    """All turns of a chat, the last one possibly still being answered."""

    turns: list[Turn] = field(default_factory=list)

    def ask(self, question: str, now_s: float) -> Turn:
        turn = Turn(question, Answer(now_s))
        self.turns.append(turn)
        return turn

    def ask_again(self, now_s: float) -> Turn:
        """The last question once more; its answer so far is dropped."""
        turn = self.turns[-1]
        turn.answer = Answer(now_s)
        return turn

    def messages(self, system_prompt: str) -> tuple[ChatMessage, ...]:
        """What the model reads: everything up to the last question. Questions whose answer failed are left out."""
        result = [ChatMessage("system", system_prompt.strip())] if system_prompt.strip() else []
        for number, turn in enumerate(self.turns):
            last = number == len(self.turns) - 1
            if not last and not turn.answer.text:
                continue
            result.append(ChatMessage("user", turn.question))
            if not last:
                result.append(ChatMessage("assistant", turn.answer.text))
        return tuple(result)
