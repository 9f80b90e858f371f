"""Running a compiled shard: one infer request, and with it one KV cache, per sequence; the weights are shared.

Nothing is allocated per step but what the step's own size demands: masks and positions are slices of arrays that grow.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from pipeline.stage.shard import (
    BEAM_INPUT,
    HIDDEN_INPUT,
    MASK_INPUT,
    POSITION_INPUT,
    SAMPLED_INPUT,
    TOKEN_INPUT,
    Shard,
)

MAX_IDLE_REQUESTS = 4
"""Released requests kept for the next sequences; each may still hold the memory of its longest KV cache."""
_FIRST_SLOTS = 1024
_log = logging.getLogger(__name__)


@dataclass
class _Request:
    """An infer request and the arrays that its decode steps write into."""

    request: ov.InferRequest
    token: NDArray[np.int64] = field(default_factory=lambda: np.zeros((1, 1), np.int64))
    token_tensor: ov.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.token_tensor = ov.Tensor(self.token, shared_memory=True)


class ShardRuntime:
    """Runs entries of steps through a shard, one after the other. Not safe to share between threads."""

    def __init__(self, shard: Shard) -> None:
        self._compiled = shard.compiled
        self._index = {name: index for index, name in enumerate(shard.inputs)}
        self._requests: dict[int, _Request] = {}
        self._idle: list[_Request] = []
        self._mask = np.ones((1, _FIRST_SLOTS), np.int64)
        self._positions = np.arange(_FIRST_SLOTS, dtype=np.int64)[None]
        self._beam = ov.Tensor(np.zeros(1, np.int32), shared_memory=False)
        self._one_sampled = np.zeros(1, np.int64)
        self._one_sampled_tensor = ov.Tensor(self._one_sampled, shared_memory=True)
        self._no_sampled_tensor = ov.Tensor(np.zeros(1, np.int64), shared_memory=False)

    @property
    def sequences(self) -> int:
        """Sequences that hold KV cache."""
        return len(self._requests)

    def run_tokens(self, sequence: int, start: int, tokens: tuple[int, ...], sampled: int = 0) -> NDArray[np.float32]:
        """Run token ids through a first stage. See ``run_hidden`` for the rest."""
        request = self._request(sequence)
        if len(tokens) == 1:
            request.token[0, 0] = tokens[0]
            tensor = request.token_tensor
        else:
            tensor = ov.Tensor(np.array([tokens], np.int64), shared_memory=False)
        return self._run(request.request, TOKEN_INPUT, tensor, start, len(tokens), sampled)

    def run_hidden(
        self, sequence: int, start: int, hidden: NDArray[np.float32], sampled: int = 0
    ) -> NDArray[np.float32]:
        """Run hidden states through a later stage.

        Args:
            sequence: a number of the caller's; its first use begins a KV cache.
            start: tokens that the KV cache holds already.
            hidden: ``[tokens, input width]``, C order.
            sampled: at how many of the last positions the last stage gives logits.

        Returns:
            ``[tokens, output width]``, or ``[sampled, vocabulary]`` from the last stage. It is the request's own
            memory: copy it, or be done with it, before the sequence runs again or is freed.

        Raises:
            RuntimeError: the device failed. The sequence's KV cache is in no known state then: discard it.
        """
        request = self._request(sequence)
        # A received frame is read-only memory, which OpenVINO does not share.
        data = hidden[None] if hidden.flags.writeable else np.array(hidden[None])
        tensor = ov.Tensor(data, shared_memory=True)
        return self._run(request.request, HIDDEN_INPUT, tensor, start, len(hidden), sampled)

    def free(self, sequence: int) -> None:
        """Give up the sequence's KV cache and keep its request for another."""
        request = self._requests.pop(sequence, None)
        if request is None:
            return
        if len(self._idle) >= MAX_IDLE_REQUESTS:
            return
        try:
            request.request.reset_state()
        except RuntimeError:
            _log.exception("a request that could not be reset is not used again")
            return
        self._idle.append(request)

    def discard(self, sequence: int) -> None:
        """Give up the sequence's KV cache and its request, which a failed device may have left unusable."""
        self._requests.pop(sequence, None)

    def free_all(self) -> None:
        """Free every sequence."""
        for sequence in list(self._requests):
            self.free(sequence)

    def _request(self, sequence: int) -> _Request:
        request = self._requests.get(sequence)
        if request is None:
            request = self._idle.pop() if self._idle else self._new_request()
            self._requests[sequence] = request
        return request

    def _new_request(self) -> _Request:
        request = _Request(self._compiled.create_infer_request())
        if BEAM_INPUT in self._index:
            request.request.set_input_tensor(self._index[BEAM_INPUT], self._beam)
        return request

    def _run(
        self, request: ov.InferRequest, name: str, data: ov.Tensor, start: int, tokens: int, sampled: int
    ) -> NDArray[np.float32]:
        index = self._index
        end = start + tokens
        if end > self._mask.shape[1]:
            slots = max(end, 2 * self._mask.shape[1])
            self._mask = np.ones((1, slots), np.int64)
            self._positions = np.arange(slots, dtype=np.int64)[None]
        # A tensor with shared memory does not keep its array alive. These arrays outlive the inference because this
        # object or a caller's frame holds them, and every input is set anew before the next one.
        request.set_input_tensor(index[name], data)
        if MASK_INPUT in index:
            request.set_input_tensor(index[MASK_INPUT], ov.Tensor(self._mask[:, :end], shared_memory=True))
        if POSITION_INPUT in index:
            positions = ov.Tensor(self._positions[:, start:end], shared_memory=True)
            request.set_input_tensor(index[POSITION_INPUT], positions)
        if SAMPLED_INPUT in index:
            request.set_input_tensor(index[SAMPLED_INPUT], self._sampled_positions(tokens, sampled))
        request.infer(share_outputs=True)
        output: NDArray[Any] = request.get_output_tensor(0).data[0]
        if SAMPLED_INPUT in index:
            output = output[:sampled]
        return output.astype(np.float32, copy=False)

    def _sampled_positions(self, tokens: int, sampled: int) -> ov.Tensor:
        if sampled == 0:
            # One row that nobody reads: not every device takes an empty Gather.
            return self._no_sampled_tensor
        if sampled == 1:
            self._one_sampled[0] = tokens - 1
            return self._one_sampled_tensor
        return ov.Tensor(np.arange(tokens - sampled, tokens, dtype=np.int64), shared_memory=False)
