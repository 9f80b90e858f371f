"""The paged form of a shard: its KV cache in blocks that the caller hands out, many sequences in one inference.

It is made from a stage's graph wherever it is run, and never written to the shard folder: the operation that reads the
blocks is internal to OpenVINO, and its inputs differ from version to version. Two steps make it:

1. ``openvino._offline_transformations.paged_attention_transformation``. It goes by the inputs' names ``input_ids`` or
   ``inputs_embeds`` and ``position_ids``, which a stage has, and makes them ``[tokens]`` and ``[tokens, width]``: the
   tokens of all sequences one after the other. Inside the graph every token is a row of its own, a sequence of one
   token, so what leaves is ``[tokens, 1, width]``.
2. The Gather in front of the head, which drops the positions that nobody samples, works along the tokens: axis 1 in a
   stateful shard, axis 0 here.

A step is described by ``past_lens`` (tokens of each sequence that its blocks hold), ``subsequence_begins`` (where each
sequence's new tokens begin, and where the last ones end), ``block_indices`` (the blocks of all sequences, one list
after the other), ``block_indices_begins`` and ``max_context_len``. A smaller ``past_lens`` takes tokens back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

from fleet.errors import ModelError
from shard_builder.cut.source_form import TOKEN_INPUT
from shard_builder.cut.surgery import HIDDEN_INPUT, SAMPLED_INPUT

POSITION_INPUT = "position_ids"
STEP_INPUTS = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len")
KEY_CACHE_PREFIX, VALUE_CACHE_PREFIX = "key_cache.", "value_cache."
_THROWN = re.compile(r"\[(?P<transformation>\w+)\] END: node: (?:\w+::)?(?P<kind>\w+) .*CALLBACK HAS THROWN", re.DOTALL)


class NotPagedError(ModelError):
    """A shard has no paged form, or none that a stage can feed; the text says why."""


@dataclass(frozen=True)
class PagedStep:
    """One inference of a paged shard over ``sequences`` sequences with ``tokens`` new tokens together."""

    ids: NDArray[np.int64]
    """[tokens]; what a first stage reads."""
    positions: NDArray[np.int64]
    """[tokens]"""
    past_lens: NDArray[np.int32]
    """[sequences]"""
    subsequence_begins: NDArray[np.int32]
    """[sequences + 1]"""
    block_indices: NDArray[np.int32]
    """[blocks of all sequences]"""
    block_indices_begins: NDArray[np.int32]
    """[sequences + 1]"""
    max_context_len: int
    """Tokens of the longest sequence, its new ones included."""
    sampled: NDArray[np.int64]
    """The tokens for which a last stage gives logits."""


def make_paged(model: ov.Model) -> None:
    """Turns a stage's model, freshly read, into its paged form.

    Raises:
        NotPagedError: OpenVINO refuses, or what comes out keeps states or wants inputs that a stage does not feed. The
            model is of no use then.
    """
    try:
        paged_attention_transformation(model)
        for target in _targets(model, SAMPLED_INPUT):
            target.get_node().input(2).replace_source_output(opset13.constant(np.int64(0)).output(0))
        model.validate_nodes_and_infer_types()
    except RuntimeError as error:
        raise NotPagedError(f"OpenVINO does not make a paged form of it: {_refusal(error)}.") from None
    if model.get_sinks():
        name = str(model.get_sinks()[0].get_attributes()["variable_id"])
        raise NotPagedError(
            f"The state '{name}' stays a state in the paged form, so sequences cannot share an inference."
        )
    known = {TOKEN_INPUT, HIDDEN_INPUT, POSITION_INPUT, SAMPLED_INPUT, *STEP_INPUTS}
    for port in model.inputs:
        name = input_name(port)
        if name not in known and not name.startswith((KEY_CACHE_PREFIX, VALUE_CACHE_PREFIX)):
            raise NotPagedError(f"The paged form has an input '{name}', which a stage does not feed.")


def _refusal(error: RuntimeError) -> str:
    """What OpenVINO says over several lines, without the places in its source and without dumps of nodes."""
    thrown = _THROWN.search(str(error))
    if thrown is not None:
        return f"its pass {thrown['transformation']} fails at a {thrown['kind']}"
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return " ".join(kept)[:300].rstrip(". ") or type(error).__name__


def input_name(port: Any) -> str:
    """What the node of an input is called; its tensor may have several names."""
    return str(port.get_node().get_friendly_name())


def _targets(model: ov.Model, name: str) -> list[Any]:
    return [
        target
        for parameter in model.get_parameters()
        if name in parameter.output(0).get_names()
        for target in parameter.output(0).get_target_inputs()
    ]


class PagedShard:
    """A compiled paged shard and the blocks of its KV cache."""

    def __init__(self, compiled: ov.CompiledModel, blocks: int) -> None:
        """``blocks`` are allocated for every layer; ``block_tokens`` says how many tokens fit into one."""
        self._request = compiled.create_infer_request()
        self._ports = {input_name(port): port for port in compiled.inputs}
        self._caches = {
            name: _allocate(port, blocks)
            for name, port in self._ports.items()
            if name.startswith((KEY_CACHE_PREFIX, VALUE_CACHE_PREFIX))
        }

    def run(self, step: PagedStep, hidden: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Runs a step.

        Args:
            step: what to run.
            hidden: [tokens, width] for a stage that is not the first.

        Returns:
            [tokens, width], or [sampled, vocabulary] from a last stage; a copy.

        Raises:
            RuntimeError: the device does not run it.
        """
        known: dict[str, Any] = {
            TOKEN_INPUT: step.ids,
            HIDDEN_INPUT: hidden,
            POSITION_INPUT: step.positions,
            SAMPLED_INPUT: step.sampled,
            "past_lens": step.past_lens,
            "subsequence_begins": step.subsequence_begins,
            "block_indices": step.block_indices,
            "block_indices_begins": step.block_indices_begins,
            "max_context_len": np.array(step.max_context_len, dtype=np.int32),
        }
        feed: dict[Any, ov.Tensor] = dict(self._caches)
        for name in self._ports.keys() - self._caches.keys():
            value = known[name]
            if name == POSITION_INPUT:
                # Some models count positions along several axes (text, height, width), which are equal for text.
                value = np.broadcast_to(value, (*_lead(self._ports[name]), len(value)))
            feed[name] = ov.Tensor(np.require(value, requirements="C"))
        self._request.infer(feed)
        output = np.array(self._request.get_output_tensor(0).data, dtype=np.float32)
        return output.reshape(output.shape[0], -1)


def block_tokens(compiled: ov.CompiledModel) -> int:
    """How many tokens one block holds: on every device the third dimension of a value cache.

    Raises:
        NotPagedError: the device does not say.
    """
    for port in compiled.inputs:
        if input_name(port).startswith(VALUE_CACHE_PREFIX):
            dimension = port.get_partial_shape()[2]
            if dimension.is_static:
                return int(dimension.get_length())
    raise NotPagedError("The device does not say how many tokens a block of its cache holds.")


def _lead(port: Any) -> tuple[int, ...]:
    return tuple(int(dimension.get_length()) for dimension in list(port.get_partial_shape())[:-1])


def _allocate(port: Any, blocks: int) -> ov.Tensor:
    shape = [blocks, *(int(dimension.get_length()) for dimension in list(port.get_partial_shape())[1:])]
    tensor = ov.Tensor(port.get_element_type(), ov.Shape(shape))
    # What was in the memory before could be NaN, which a weight of 0 does not make 0.
    tensor.data.fill(0)
    return tensor
