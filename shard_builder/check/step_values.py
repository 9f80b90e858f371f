"""The numbers that a sequence's steps are fed with, and at which positions their logits are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from shard_builder.check.cases import Sequence

SEED = 20240229
ALL_COMPARED_TOKENS = 24
"""Of a step with more tokens only some positions are compared, spread evenly, so that the stored logits stay small."""
_LONG_STEP_BYTES = 1 << 20


@dataclass(frozen=True)
class StepValues:
    """One step of a sequence of ``rows`` rows; ``slots`` are the cache's, with the step's own tokens.

    ``compared`` are the rows and the positions in the step that are compared: neither padding, nor all of many.
    """

    ids: NDArray[np.int64]
    """[rows, tokens]"""
    mask: NDArray[np.int64]
    """[rows, slots]"""
    positions: NDArray[np.int64]
    """[rows, tokens]"""
    beams: NDArray[np.int32]
    """[rows]"""
    trimmed_slots: int
    """How many slots to cut off the end of the states before the step."""
    compared: tuple[NDArray[np.intp], NDArray[np.intp]]

    @property
    def tokens(self) -> int:
        """New tokens per row."""
        return int(self.ids.shape[1])


def step_values(sequence: Sequence, vocabulary_size: int) -> Iterator[StepValues]:
    """The steps of a sequence; always the same ones.

    The ids that are not rejected are those of ``sequence.accepted``. Positions count the tokens that the mask shows,
    so they go on from the accepted token where a rejected one stays in the cache.
    """
    rows = sequence.rows
    accepted = np.random.default_rng([SEED, rows, *(step.tokens for step in sequence.accepted.steps)])
    rejected = np.random.default_rng([SEED, 0])
    seen = np.zeros((rows, 0), dtype=np.int64)
    trimmed = 0
    for number, step in enumerate(sequence.steps):
        beams = np.array(step.beams or range(rows), dtype=np.int32)
        new = np.ones((rows, step.tokens), dtype=np.int64)
        if number == 0:
            for row, padding in enumerate(sequence.padding):
                new[row, :padding] = 0
        seen = seen[beams]
        positions = seen.sum(axis=1, keepdims=True) + new.cumsum(axis=1) - 1
        seen = np.concatenate([seen, new], axis=1)
        ids = (rejected if step.rejected else accepted).integers(0, vocabulary_size, (rows, step.tokens))
        yield StepValues(
            ids=ids,
            mask=seen.copy(),
            positions=np.maximum(positions, 0),
            beams=beams,
            trimmed_slots=trimmed,
            compared=_compared(new, vocabulary_size),
        )
        trimmed = 0
        if step.rejected and sequence.taken_back_by == "mask":
            seen[:, -step.tokens :] = 0
        elif step.rejected:
            seen = seen[:, : -step.tokens]
            trimmed = step.tokens


def _compared(new: NDArray[np.int64], vocabulary_size: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """It depends on the number of tokens alone, so that the same step of two sequences compares the same positions."""
    tokens = new.shape[1]
    count = tokens
    if tokens > ALL_COMPARED_TOKENS:
        count = min(tokens, 64, max(2, _LONG_STEP_BYTES // (4 * vocabulary_size)))
    chosen = np.zeros(tokens, dtype=bool)
    chosen[np.linspace(0, tokens - 1, count).astype(int)] = True
    rows, positions = np.nonzero((new == 1) & chosen)
    return rows, positions


def compared_rows(sequence: Sequence, vocabulary_size: int) -> int:
    """How many rows of logits are compared over all steps of a sequence."""
    return sum(len(values.compared[0]) for values in step_values(sequence, vocabulary_size))


def feed(ports: Mapping[str, Any], values: StepValues, entering: Mapping[str, NDArray[Any]]) -> dict[str, ov.Tensor]:
    """What an inference of a whole model or stage with these inputs is given.

    Args:
        ports: the model's inputs by name.
        values: the step's numbers.
        entering: what the caller has itself: hidden states, sampled positions.
    """
    known: dict[str, NDArray[Any]] = {
        "input_ids": values.ids,
        "attention_mask": values.mask,
        "position_ids": values.positions,
        "beam_idx": values.beams,
        **entering,
    }
    found = {}
    for name, port in ports.items():
        value = known[name]
        # Some models count positions along several axes (text, height, width), which are equal for text.
        lead = (3,) * (len(port.get_partial_shape()) - value.ndim) if name == "position_ids" else ()
        value = np.broadcast_to(value, (*lead, *value.shape))
        found[name] = ov.Tensor(np.ascontiguousarray(value, dtype=port.get_element_type().to_dtype()))
    return found
