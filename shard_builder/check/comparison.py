"""How far the shards' logits are from the whole model's: per case, and with rejected tokens taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleet.manifest import CaseResult, RollbackKind, RollbackResult
from shard_builder.check.cases import Sequence, Step, without_rejected
from shard_builder.check.reference import Reference


@dataclass
class Comparison:
    """Adds up what single steps show."""

    reference: Reference
    _cases: dict[str, float] = field(default_factory=dict)
    _rollbacks: dict[RollbackKind, tuple[float, float]] = field(default_factory=dict)
    _range: float = 0.0
    _same: int = 0
    _total: int = 0

    def add(self, sequence: Sequence, found: list[NDArray[np.float32]]) -> None:
        """Compares the logits [compared rows, vocabulary] of every step of a sequence.

        Raises:
            ModelError: the reference is damaged.
        """
        if sequence.taken_back_by != "trim":
            for step, logits, expected in _by_step(sequence.steps, found, self.reference.logits(sequence)):
                difference = _largest(logits - expected)
                self._cases[step.case] = max(self._cases.get(step.case, 0.0), difference)
                self._range = max(self._range, float(np.ptp(expected)))
                self._same += int(np.count_nonzero(logits.argmax(-1) == expected.argmax(-1)))
                self._total += len(expected)
        if sequence.taken_back_by is not None:
            self._add_rollback(sequence, sequence.taken_back_by, found)

    def _add_rollback(self, sequence: Sequence, kind: RollbackKind, found: list[NDArray[np.float32]]) -> None:
        clean = without_rejected(sequence, self.reference.head.sequences)
        kept = [logits for step, logits in zip(sequence.steps, found, strict=True) if not step.rejected]
        difference = scale = 0.0
        for _, logits, expected in _by_step(clean.steps, kept, self.reference.logits(clean)):
            difference = max(difference, _largest(logits - expected))
            scale = max(scale, float(np.ptp(expected)))
        self._rollbacks[kind] = (difference, scale)

    @property
    def cases(self) -> tuple[CaseResult, ...]:
        """In the order in which they were first met."""
        return tuple(CaseResult(case, difference) for case, difference in self._cases.items())

    @property
    def rollbacks(self) -> tuple[RollbackResult, ...]:
        """Of the kinds that were run."""
        return tuple(RollbackResult(kind, *found) for kind, found in self._rollbacks.items())

    @property
    def max_abs_diff(self) -> float:
        """Of all cases."""
        return max(self._cases.values(), default=0.0)

    @property
    def logit_range(self) -> float:
        """Largest minus smallest of the whole model's logits in one step, in the step where it is widest."""
        return self._range

    @property
    def greedy_match(self) -> float:
        """Share of compared positions whose largest logit is the same token."""
        return self._same / self._total if self._total else 0.0


def _by_step(
    steps: tuple[Step, ...], found: list[NDArray[np.float32]], expected: NDArray[np.float32]
) -> Iterator[tuple[Step, NDArray[np.float32], NDArray[np.float32]]]:
    start = 0
    for step, logits in zip(steps, found, strict=True):
        yield step, logits, expected[start : start + len(logits)]
        start += len(logits)


def _largest(difference: NDArray[np.float32]) -> float:
    return float(np.max(np.abs(difference), initial=0.0))
