"""From a client's Generate to tokens, in threads of its own, because long prompts take their time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fleet.errors import PacelineError
from fleet.gateway_messages import FailureCode, Generate
from pipeline.gateway.answer_text import Answer
from pipeline.gateway.sequence import Request, RequestKey
from pipeline.gateway.tokenizer import ModelTokenizer, TemplateError

THREADS = 2
"""So that a short prompt does not wait for a long one."""


class RequestRefused(PacelineError):  # noqa: N818 it is an answer, not a fault of the program
    """A request that cannot be served as it is."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Prepared:
    """A request whose prompt has become tokens, or why it has not."""

    key: RequestKey
    request: Request | None
    refused: RequestRefused | None = None


@dataclass(frozen=True)
class ServedModel:
    """What requests are checked against."""

    name: str
    vocabulary_size: int


def prompt_tokens(generate: Generate, model: ServedModel, tokenizer: ModelTokenizer) -> tuple[int, ...]:
    """The tokens of a request's prompt.

    Raises:
        RequestRefused: the request contradicts itself, names another model, or the chat template refuses it.
    """
    if generate.model is not None and generate.model != model.name:
        raise RequestRefused("unknown_model", f"The model {generate.model!r} is not served here; {model.name!r} is.")
    if sum(part is not None for part in (generate.messages, generate.prompt, generate.tokens)) != 1:
        raise RequestRefused("bad_request", "Give exactly one of: messages, prompt, tokens.")
    wrong = [token for token in generate.sampling.logit_bias if not 0 <= token < model.vocabulary_size]
    if wrong:
        raise RequestRefused(
            "bad_request", f"logit_bias names token {wrong[0]}, but the model has {model.vocabulary_size} tokens."
        )
    if generate.tokens is not None:
        largest = max(generate.tokens, default=0)
        if largest >= model.vocabulary_size:
            raise RequestRefused(
                "bad_request", f"The prompt has token {largest}, but the model has {model.vocabulary_size} tokens."
            )
        return generate.tokens
    if generate.prompt is not None:
        return tokenizer.encode(generate.prompt, add_special_tokens=True)
    assert generate.messages is not None
    if not generate.messages:
        raise RequestRefused("bad_request", "The chat has no messages.")
    if generate.plain_without_template and not tokenizer.has_chat_template:
        # Such a model goes on with a text; all that was said is the text.
        text = "\n\n".join(message.content for message in generate.messages)
        return tokenizer.encode(text, add_special_tokens=True)
    try:
        text = tokenizer.render_chat(generate.messages)
    except TemplateError as error:
        raise RequestRefused("template", str(error)) from None
    # The template spells out the special tokens that it wants.
    return tokenizer.encode(text, add_special_tokens=False)


class Intake:
    """Prepares requests and hands each result to ``deliver``, which is called in an intake thread."""

    def __init__(self, model: ServedModel, tokenizer: ModelTokenizer, deliver: Callable[[Prepared], None]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="intake")

    def prepare(self, key: RequestKey, generate: Generate, arrived_s: float) -> None:
        """Begin; what comes of it is delivered later."""
        self._executor.submit(self._prepare, key, generate, arrived_s)

    def close(self) -> None:
        """Finish what has begun and take no more."""
        self._executor.shutdown(cancel_futures=True)

    def _prepare(self, key: RequestKey, generate: Generate, arrived_s: float) -> None:
        try:
            tokens = prompt_tokens(generate, self._model, self._tokenizer)
            answer = Answer(self._tokenizer, generate.stop)
            request = Request(key, tokens, generate.sampling, generate.max_tokens, answer, arrived_s)
        except RequestRefused as refused:
            self._deliver(Prepared(key, None, refused))
        except Exception as error:
            # Whatever it is, the client must hear of it; nobody else waits for this thread.
            text = f"The prompt cannot be turned into tokens ({type(error).__name__}: {error})."
            self._deliver(Prepared(key, None, RequestRefused("internal", text)))
        else:
            self._deliver(Prepared(key, request))
