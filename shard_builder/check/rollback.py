"""Taking rejected tokens back from a shard's states, and judging which ways of it are right for a model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino as ov

from fleet.errors import ModelError
from fleet.manifest import KvPrecision, RollbackKind, RollbackResult
from shard_builder.cut.layers import find_states
from shard_builder.cut.opened_model import OpenedModel, cache_pattern

ROLLBACK_WORDS: dict[RollbackKind, str] = {
    "mask": "masking rejected tokens in the cache",
    "trim": "trimming rejected tokens from the states",
}
_TOLERANCES: dict[KvPrecision, float] = {"f32": 1e-4, "f16": 2e-3, "bf16": 1e-2, "u8": 3e-2}
"""Largest difference that is noise, as a share of the range of the logits. Masked slots group the sums differently, and
a cache of low precision rounds the difference up: 1.5e-6, 1.3e-4 and 6e-3 were seen in f32, f16 and u8 with 30 layers.
An accepted token that falls out of a window of 8, or a state that saw a rejected one, shows as 5e-2 and more."""


class UntrimmableError(ModelError):
    """A state cannot be cut short; the text names it."""


def is_noise(result: RollbackResult, kv_precision: KvPrecision) -> bool:
    """Whether the difference to a run without rejected tokens is no more than the order of sums explains."""
    return result.max_abs_diff <= _TOLERANCES[kv_precision] * result.logit_range


def past_axes(opened: OpenedModel) -> dict[str, int]:
    """For every state of a shard the axis along which it grows with the tokens.

    Raises:
        UntrimmableError: a state does not grow, so that nothing can be cut off.
    """
    found = {}
    for state in find_states(opened.graph):
        pattern = cache_pattern(opened, state)
        if pattern is None:
            raise UntrimmableError(f"The state '{state.variable}' does not grow with the tokens.")
        found[state.variable] = pattern.past_axis
    return found


def state_trimmer(request: ov.InferRequest, axes: dict[str, int]) -> Callable[[int], None]:
    """A function that cuts so many slots off the end of all states of a request."""

    def trim(slots: int) -> None:
        for state in request.query_state():
            content = state.state.data
            axis = axes[state.name]
            kept = content.take(np.arange(content.shape[axis] - slots), axis)
            # A view that is not contiguous would silently corrupt a cache in u8.
            state.state = ov.Tensor(np.ascontiguousarray(kept))

    return trim
