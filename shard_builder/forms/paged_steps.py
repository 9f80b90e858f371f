"""Several sequences side by side, as a paged shard is fed with them: one begins a step after the other.

So there are steps in which one sequence is decoded while another's prompt goes in, and the blocks of the sequences lie
between each other's. Tokens that are taken back are so by a smaller past alone.
"""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shard_builder.check.cases import Sequence
from shard_builder.check.step_values import StepValues, step_values
from shard_builder.forms.paged import PagedStep


@dataclass(frozen=True)
class RaggedStep:
    """A step of a ragged batch. ``members`` are the (sequence, step of it) pairs in the order of their tokens."""

    step: PagedStep
    members: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    """How many sampled tokens each member has, in the same order."""


def can_be_paged(sequence: Sequence) -> bool:
    """Whether a sequence of a check says something about paged shards: one row, and nothing under the mask."""
    return sequence.rows == 1 and not any(sequence.padding) and sequence.taken_back_by != "mask"


def count_blocks(sequences: AnySequence[Sequence], tokens_per_block: int) -> int:
    """How many blocks the sequences need together."""
    return sum(_blocks(_slots(sequence), tokens_per_block) for sequence in sequences)


def ragged_steps(
    sequences: AnySequence[Sequence], vocabulary_size: int, tokens_per_block: int
) -> tuple[RaggedStep, ...]:
    """The steps of all sequences; sequence n begins with step n.

    Args:
        sequences: those for which ``can_be_paged`` holds.
        vocabulary_size: of the model.
        tokens_per_block: of the device.
    """
    values = [list(step_values(sequence, vocabulary_size)) for sequence in sequences]
    tables = _block_tables([_slots(sequence) for sequence in sequences], tokens_per_block)
    found = []
    for round_number in range(max(number + len(steps) for number, steps in enumerate(values))):
        members = tuple(
            (number, round_number - number)
            for number, steps in enumerate(values)
            if 0 <= round_number - number < len(steps)
        )
        if members:
            found.append(_join(members, [values[number][step] for number, step in members], tables, tokens_per_block))
    return tuple(found)


def _join(
    members: tuple[tuple[int, int], ...],
    steps: list[StepValues],
    tables: list[NDArray[np.int32]],
    tokens_per_block: int,
) -> RaggedStep:
    ends = [values.mask.shape[1] for values in steps]
    begins = np.cumsum([0, *(values.tokens for values in steps)])
    blocks = [tables[number][: _blocks(end, tokens_per_block)] for (number, _), end in zip(members, ends, strict=True)]
    sampled = [values.compared[1] + begin for values, begin in zip(steps, begins, strict=False)]
    return RaggedStep(
        step=PagedStep(
            ids=np.concatenate([values.ids[0] for values in steps]),
            positions=np.concatenate([values.positions[0] for values in steps]),
            past_lens=np.array([end - values.tokens for end, values in zip(ends, steps, strict=True)], dtype=np.int32),
            subsequence_begins=begins.astype(np.int32),
            block_indices=np.concatenate(blocks),
            block_indices_begins=np.cumsum([0, *(len(table) for table in blocks)]).astype(np.int32),
            max_context_len=max(ends),
            sampled=np.concatenate(sampled).astype(np.int64),
        ),
        members=members,
        rows=tuple(len(positions) for positions in sampled),
    )


def _slots(sequence: Sequence) -> int:
    """The most tokens that a sequence has in its blocks at one time."""
    stored = longest = 0
    for step in sequence.steps:
        longest = max(longest, stored + step.tokens)
        stored += 0 if step.rejected else step.tokens
    return longest


def _blocks(tokens: int, tokens_per_block: int) -> int:
    return -(-tokens // tokens_per_block)


def _block_tables(slots: list[int], tokens_per_block: int) -> list[NDArray[np.int32]]:
    """The blocks of every sequence; they are handed out in turns, the highest first."""
    wanted = [_blocks(count, tokens_per_block) for count in slots]
    free = sum(wanted)
    tables: list[list[int]] = [[] for _ in slots]
    while free:
        for table, count in zip(tables, wanted, strict=True):
            if len(table) < count:
                free -= 1
                table.append(free)
    return [np.array(table, dtype=np.int32) for table in tables]
