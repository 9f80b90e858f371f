"""What a check of a cut runs: sequences of inferences, each step of which belongs to a named case.

The choice depends only on what the manifest says, so that a stored reference can be told to be the right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from fleet.manifest import Manifest, RollbackKind

MASK_INPUT = "attention_mask"
ROWS = 3
"""Of the batches: enough to tell a permutation of rows from a swap, and 1 row from several."""
BEYOND_WINDOW_TOKENS = 8
MAX_WINDOW_TOKENS = 4608
MAX_STEP_LOGITS_BYTES = 64 << 20
"""The whole model gives the logits of all tokens of an inference, so a long prompt goes in chunks."""
_WINDOW_BUDGET = 2 * 10**12
_SAMPLED_WINDOW_BUDGET = 10**11
"""Tokens times weight bytes that a prompt over the sliding window may cost: about a minute on two cores."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One inference: ``tokens`` new tokens in every row."""

    case: str
    tokens: int
    beams: tuple[int, ...] = ()
    """For every row the row of the step before that it goes on from; empty: its own."""
    rejected: bool = False
    """The tokens are drafts, which are taken back before the next step."""


class Sequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps that start from empty states."""

    steps: tuple[Step, ...]
    rows: int = 1
    padding: tuple[int, ...] = ()
    """Masked tokens on the left of every row of the first step; empty: none."""
    taken_back_by: RollbackKind | None = None
    """How rejected tokens are taken back: by 0 in the mask, or by cutting the states short."""

    @property
    def accepted(self) -> Sequence:
        """The same without the rejected steps, as far as feeding goes; the steps' cases are those of this one."""
        return Sequence(tuple(step for step in self.steps if not step.rejected), self.rows, self.padding)

    @property
    def is_essential(self) -> bool:
        """Whether a model that cannot run it cannot be served at all."""
        return self.rows == 1 and self.taken_back_by is None


@dataclass(frozen=True)
class CheckedModel:
    """What the choice of cases depends on: the same for every cut of a model."""

    inputs: frozenset[str]
    vocabulary_size: int
    sliding_window: int
    """In tokens; 0: none."""
    layer_bytes: int
    """Of all layers together."""


def checked_model(manifest: Manifest) -> CheckedModel:
    """The model that a manifest describes."""
    return CheckedModel(
        inputs=frozenset(name for stage in manifest.stages for name in stage.inputs),
        vocabulary_size=manifest.vocabulary_size,
        sliding_window=manifest.sliding_window,
        layer_bytes=sum(layer.bytes for layer in manifest.layers),
    )


def choose_sequences(model: CheckedModel, *, sampled: bool) -> tuple[Sequence, ...]:
    """What to run for a model; those of a sampled check are among those of a full one.

    A model without an attention mask is run neither with padding nor with rejected tokens under the mask. A prompt that
    exceeds the sliding window is left out where it would cost too much (see ``crosses_window``).
    """
    plain = Sequence((_prefill(6), _single(), _chunk(3)))
    found = [plain]
    if MASK_INPUT in model.inputs:
        found.append(_padded_batch())
    if not sampled or MASK_INPUT not in model.inputs:
        found.append(_batch())
    if not sampled:
        found.append(Sequence((_prefill(1), _single())))
        found.append(Sequence((_prefill(24), _single(), _single(), _chunk(6), _single())))
    base = plain
    rejected = 4
    if crosses_window(model, sampled=sampled):
        base = _over_window(model)
        found.append(base)
        rejected = min(max(4, model.sliding_window // 4), 64, _chunk_tokens(model))
    if MASK_INPUT in model.inputs:
        found.append(_with_rejected(base, "rejected tokens under the mask", rejected, "mask"))
    found.append(_with_rejected(plain, "rejected tokens trimmed from the states", 4, "trim"))
    return tuple(found)


def crosses_window(model: CheckedModel, *, sampled: bool) -> bool:
    """Whether a check runs a prompt that exceeds the model's sliding window; False where it has none."""
    tokens = model.sliding_window + BEYOND_WINDOW_TOKENS
    cost = tokens * model.layer_bytes
    budget = _SAMPLED_WINDOW_BUDGET if sampled else _WINDOW_BUDGET
    return model.sliding_window > 0 and tokens <= MAX_WINDOW_TOKENS and cost <= budget


def whole_sequences(sequences: Iterable[Sequence]) -> tuple[Sequence, ...]:
    """Those that the whole model runs: what is trimmed is compared with the run that it shall equal."""
    return tuple(sequence for sequence in sequences if sequence.taken_back_by != "trim")


def step_count(sequences: Iterable[Sequence]) -> int:
    """Inferences of all sequences."""
    return sum(len(sequence.steps) for sequence in sequences)


def without_rejected(sequence: Sequence, sequences: Iterable[Sequence]) -> Sequence:
    """The sequence that feeds the same tokens but the rejected ones.

    Raises:
        KeyError: it is not among ``sequences``.
    """
    fed = [step.tokens for step in sequence.accepted.steps]
    for other in sequences:
        same = (other.rows, other.padding) == (sequence.rows, sequence.padding)
        if other.taken_back_by is None and same and [step.tokens for step in other.steps] == fed:
            return other
    raise KeyError(sequence)


def case_names(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    """The cases in the order in which they are met."""
    return tuple(dict.fromkeys(step.case for sequence in sequences for step in sequence.steps))


def _prefill(tokens: int) -> Step:
    return Step(f"prefill of {tokens} {'tokens' if tokens > 1 else 'token'}", tokens)


def _single() -> Step:
    return Step("single steps", 1)


def _chunk(tokens: int) -> Step:
    return Step(f"chunk of {tokens} tokens after a past", tokens)


def _batch() -> Sequence:
    case = f"batch of {ROWS}"
    steps = (Step(case, 7), Step(case, 1), Step("beam reorder", 1, beams=(2, 0, 0)), Step("beam reorder", 4))
    return Sequence(steps, rows=ROWS)


def _padded_batch() -> Sequence:
    case = f"batch of {ROWS} with padding"
    steps = (
        Step(case, 5),
        Step(case, 1),
        Step("beam reorder with padding", 1, beams=(1, 2, 2)),
        Step("beam reorder with padding", 2),
    )
    return Sequence(steps, rows=ROWS, padding=(0, 1, 3))


def _chunk_tokens(model: CheckedModel) -> int:
    return max(1, MAX_STEP_LOGITS_BYTES // (4 * model.vocabulary_size))


def _over_window(model: CheckedModel) -> Sequence:
    total, share = model.sliding_window + BEYOND_WINDOW_TOKENS, _chunk_tokens(model)
    prompt = f"prefill of {total} tokens, over the sliding window"
    chunks = [min(share, total - start) for start in range(0, total, share)]
    after = "steps behind the sliding window"
    return Sequence((*(Step(prompt, tokens) for tokens in chunks), Step(after, 1), Step(after, 3)))


def _with_rejected(base: Sequence, case: str, rejected: int, kind: RollbackKind) -> Sequence:
    """Rejected tokens before each of the last two steps."""

    def steps() -> Iterator[Step]:
        for step in base.steps[:-2]:
            yield Step(case, step.tokens)
        yield Step(case, rejected, rejected=True)
        yield Step(case, base.steps[-2].tokens)
        yield Step(case, 2, rejected=True)
        yield Step(case, base.steps[-1].tokens)

    return Sequence(tuple(steps()), base.rows, base.padding, kind)
