"""The model's own tokenizer and chat template.

Chat templates and decoding go through OpenVINO GenAI's tokenizer. Encoding runs the same tokenizer graph on OpenVINO
directly, for two measured reasons: GenAI's ``encode`` holds the interpreter's lock while it works (0.4 s for 2 MB of
text), which would stop the data thread; and the graph carries the length that its model was trained for and cuts
longer prompts down to it without a word (``max_length`` does not lift this in graphs made from GGUF files), where a
prompt that does not fit must be refused.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
import openvino_tokenizers

from fleet.errors import ModelError, PacelineError
from fleet.gateway_messages import ChatMessage

TOKENIZER_GRAPH = "openvino_tokenizer.xml"
NO_LIMIT = 2**31 - 1
_SAMPLES = ("a", "b")

_log = logging.getLogger(__name__)


class TemplateError(PacelineError):
    """The model's chat template refuses the messages, or the model has none."""


class ModelTokenizer:
    """Tokenizer of a shard folder. Everything but the constructor may be called from any thread.

    Args:
        folder: with ``openvino_tokenizer.xml`` and ``openvino_detokenizer.xml``, and the model's configuration files.
        context_tokens: longest prompt that must come through whole.

    Raises:
        ModelError: the folder has no tokenizer, or one that cannot be used.
    """

    def __init__(self, folder: Path, context_tokens: int) -> None:
        graph = folder / TOKENIZER_GRAPH
        if not graph.is_file():
            raise ModelError(f"{folder} has no {TOKENIZER_GRAPH}; build the shards again.")
        try:
            self._genai = openvino_genai.Tokenizer(folder)
            self._core = openvino.Core()
            self._encoder = _compile(self._core, graph)
        except RuntimeError as error:
            raise ModelError(f"The tokenizer in {folder} cannot be loaded: {first_line(str(error))}") from None
        self._requests = threading.local()
        self._prefix, self._suffix = self._special_tokens_around()
        self.longest_prompt_tokens = self._measured_limit(context_tokens)
        """Longest prompt that is told apart from a longer one; at least ``context_tokens`` as a rule."""
        self.has_chat_template = self._template_works()
        self.cleans_up_spaces = self.decode(self.encode("a .", add_special_tokens=False)).endswith("a.")
        """Whether decoding takes spaces away in front of punctuation, which later tokens can bring about."""
        self._anchor = self.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self.decode(self._anchor)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids. Special tokens that are spelled out in the text are recognised either way.

        Args:
            add_special_tokens: also those that the tokenizer puts around a text (for plain completions; a chat template
                spells them out itself).
        """
        tokens = self._encode_raw(text)
        if not add_special_tokens and (self._prefix or self._suffix):
            tokens = tokens[len(self._prefix) : len(tokens) - len(self._suffix)]
        return tuple(tokens)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt that the model's own chat template makes of the messages, open for the assistant's answer.

        Raises:
            TemplateError: the template refuses them, in its own words.
        """
        if not self.has_chat_template:
            raise TemplateError(
                "This model has no chat template; send a plain prompt (POST /v1/completions) instead of a chat."
            )
        return self._render(messages)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens. Bytes that make no whole character are left out or become U+FFFD."""
        return str(self._genai.decode(list(tokens), skip_special_tokens=True))

    @functools.lru_cache(maxsize=4096)  # noqa: B019 the tokenizer lives as long as its process
    def token_text(self, token: int) -> str:
        """The text of one token inside a text, with its leading space."""
        return self.decode((*self._anchor, token))[len(self._anchor_text) :]

    def _encode_raw(self, text: str) -> list[int]:
        request = getattr(self._requests, "request", None)
        if request is None:
            request = self._requests.request = self._encoder.create_infer_request()
        # A surrogate without its twin has no UTF-8.
        text = text.encode("utf-8", "replace").decode("utf-8")
        ids: Any = request.infer([text])["input_ids"]
        return [int(token) for token in ids[0]]

    def _special_tokens_around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind every text, checked against GenAI's encoding without it."""
        around = self._encode_raw("")
        first, second = (self._encode_raw(sample) for sample in _SAMPLES)
        split = 0
        while split < len(around) and around[split] == first[split] == second[split]:
            split += 1
        prefix, suffix = around[:split], around[split:]
        for sample, tokens in zip(_SAMPLES, (first, second), strict=True):
            plain: Any = self._genai.encode(sample, add_special_tokens=False).input_ids.data
            if tokens != [*prefix, *(int(token) for token in plain[0]), *suffix]:
                raise ModelError("The model's tokenizer surrounds texts in a way that this version does not know.")
        return prefix, suffix

    def _measured_limit(self, context_tokens: int) -> int:
        """Whether the graph still cuts off long prompts, by trying one."""
        words = context_tokens + 8
        got = len(self.encode("a b " * words, add_special_tokens=False))
        if got >= words:
            return NO_LIMIT
        _log.warning("the tokenizer cuts prompts off at %d tokens, so the context is limited to that", got)
        return got - 1

    def _template_works(self) -> bool:
        """Whether there is a chat template that can render the plainest of chats; logs how it fares with others."""
        if not self._genai.chat_template:
            return False
        user, system = ChatMessage("user", "Hello"), ChatMessage("system", "Be brief.")
        try:
            self._render([user])
        except TemplateError as error:
            _log.warning("the model's chat template does not work: %s", error)
            return False
        for chat in ([system, user], [user, ChatMessage("assistant", "Hi."), user]):
            try:
                self._render(chat)
            except TemplateError as error:
                _log.info("roles %s: %s", [message.role for message in chat], error)
        return True

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        history = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self._genai.apply_chat_template(history, add_generation_prompt=True))
        except (RuntimeError, UnicodeError) as error:
            raise TemplateError(f"The model's chat template refuses this chat: {_template_fault(str(error))}") from None


def _compile(core: openvino.Core, graph: Path) -> openvino.CompiledModel:
    """The tokenizer graph, without its limit of length.

    Graphs of GGUF files and older exports keep the last n tokens through a Minimum of the length and a constant;
    newer exports have a Truncate operation with the length as its fourth input.
    """
    core.add_extension(str(openvino_tokenizers._ext_path))
    model = core.read_model(graph)
    for operation in model.get_ops():
        kind = operation.get_type_name()
        if kind == "Minimum":
            limit = operation.input(1)
        elif kind == "Truncate" and len(operation.inputs()) > 3:
            limit = operation.input(3)
        else:
            continue
        source = limit.get_source_output()
        if source.get_node().get_type_name() == "Constant" and source.get_element_type() == openvino.Type.i32:
            shape = [int(dimension) for dimension in source.get_shape()]
            lifted = openvino.op.Constant(np.full(shape, NO_LIMIT, np.int32))
            limit.replace_source_output(lifted.output(0))
    return core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1})


def _template_fault(text: str) -> str:
    """The template's own words in GenAI's long message."""
    return first_line(text.rsplit("Minja's error:", 1)[-1])


def first_line(text: str) -> str:
    """The first line that says something, without OpenVINO's file names in front."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    meaningful = [line for line in lines if not line.startswith(("Exception from", "Check '"))]
    return (meaningful or lines or ["unknown error"])[0].rstrip(" .:") + "."
