"""Carries out a step: runs its entries through the shard and, in the last stage, samples."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ModelError
from pipeline.messages import Entry, Sampled
from pipeline.stage.machine import Compute
from pipeline.stage.runtime import ShardRuntime
from pipeline.stage.sampling import LogitsError, SequenceSampler, TopLogprobs
from pipeline.stage.shard import Shard, first_line

_log = logging.getLogger(__name__)
_WARM_UP_SEQUENCE = -1


@dataclass
class Outcome:
    """What came of a step."""

    compute_ms: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)
    """Why, for each sequence that did not get through."""
    device_failed: bool = False
    hidden: NDArray[np.float32] | None = None
    """``[tokens, output width]`` of the entries that got through; a view that holds until the next step."""
    sampled: list[Sampled] = field(default_factory=list)


class StepExecutor:
    """Holds the KV caches and samplers of one stage."""

    def __init__(self, shard: Shard, device: str) -> None:
        self._shard = shard
        self._device = device
        self._runtime = ShardRuntime(shard)
        self._samplers: dict[int, SequenceSampler] = {}

    def warm_up(self) -> None:
        """Run one token, so that the first request does not pay for what a device does on its first inference.

        Raises:
            ModelError: the device compiled the shard but does not run it.
        """
        try:
            if self._shard.stage.stage == 0:
                self._runtime.run_tokens(_WARM_UP_SEQUENCE, 0, (0,))
            else:
                width = self._shard.manifest.width_into(self._shard.stage.stage)
                hidden = np.zeros((1, width), np.float32)
                self._runtime.run_hidden(_WARM_UP_SEQUENCE, 0, hidden)
        except RuntimeError as error:
            raise ModelError(
                f"The device {self._device} fails to run stage {self._shard.stage.stage} of "
                f"{self._shard.manifest.name}: {first_line(error)}. Choose another device for it."
            ) from None
        self._runtime.free(_WARM_UP_SEQUENCE)

    def run(self, compute: Compute, tensor: NDArray[np.floating] | None) -> Outcome:
        """Run the entries of a step in their order.

        Args:
            compute: what the state machine let through.
            tensor: hidden states of the whole step, ``[tokens, input width]``; None in the first stage.
        """
        begin = time.perf_counter()
        outcome = Outcome()
        hidden = None if tensor is None else tensor.astype(np.float32, copy=False)
        parts: list[tuple[int, NDArray[np.float32]]] = []
        alone = len(compute.entries) == 1
        for entry, row in zip(compute.entries, compute.rows, strict=True):
            if entry.sequence in outcome.failed:
                continue
            try:
                output = self._run_entry(entry, None if hidden is None else hidden[row : row + len(entry.tokens)])
                if self._shard.is_last:
                    self._sample(entry, output, outcome)
                else:
                    # The request overwrites its output when the sequence occurs again in the step.
                    parts.append((entry.sequence, output if alone else output.copy()))
            except RuntimeError as error:
                _log.exception("the device %s failed", self._device)
                outcome.failed[entry.sequence] = f"the device {self._device} failed ({first_line(error)})"
                outcome.device_failed = True
                self.discard(entry.sequence)
            except LogitsError as error:
                outcome.failed[entry.sequence] = str(error)
        if not self._shard.is_last:
            kept = [part for sequence, part in parts if sequence not in outcome.failed]
            if kept:
                outcome.hidden = kept[0] if len(kept) == 1 else np.concatenate(kept)
        elif outcome.failed:
            outcome.sampled = [one for one in outcome.sampled if one.sequence not in outcome.failed]
        outcome.compute_ms = (time.perf_counter() - begin) * 1e3
        return outcome

    def free(self, sequences: tuple[int, ...]) -> None:
        """Give up the KV caches of these sequences."""
        for sequence in sequences:
            self._runtime.free(sequence)
            self._samplers.pop(sequence, None)

    def free_all(self) -> None:
        """Give up all KV caches."""
        self._runtime.free_all()
        self._samplers.clear()

    def discard(self, sequence: int) -> None:
        """Give up a KV cache whose device failed."""
        self._runtime.discard(sequence)
        self._samplers.pop(sequence, None)

    def _run_entry(self, entry: Entry, hidden: NDArray[np.float32] | None) -> NDArray[np.float32]:
        if hidden is None:
            return self._runtime.run_tokens(entry.sequence, entry.start, entry.tokens, entry.sampled_positions)
        return self._runtime.run_hidden(entry.sequence, entry.start, hidden, entry.sampled_positions)

    def _sample(self, entry: Entry, logits: NDArray[np.float32], outcome: Outcome) -> None:
        if entry.sampling is not None:
            self._samplers[entry.sequence] = SequenceSampler(entry.sampling, entry.prompt_tokens)
        sampler = self._samplers[entry.sequence]
        first = len(entry.tokens) - entry.sampled_positions
        # Before a position is sampled, the sampler has heard all tokens up to and including that position.
        sampler.extend(entry.tokens[: first + 1] if entry.sampled_positions else entry.tokens)
        tokens: list[int] = []
        logprobs: list[TopLogprobs] = []
        for index in range(entry.sampled_positions):
            if index:
                sampler.extend(entry.tokens[first + index : first + index + 1])
            token, logprob = sampler.sample(logits[index])
            tokens.append(token)
            if logprob is not None:
                logprobs.append(logprob)
        if tokens:
            outcome.sampled.append(Sampled(entry.sequence, tuple(tokens), tuple(logprobs)))
