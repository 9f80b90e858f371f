"""Runs a stage's static graphs on a CPU as a host would for an NPU, beside the dynamic shard, and compares the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from fleet.errors import ModelError
from fleet.manifest import Manifest, NpuSlots, Stage
from shard_builder.check.reference import exact_properties
from shard_builder.cut.opened_model import plain_reason
from shard_builder.cut.source_form import TOKEN_INPUT
from shard_builder.cut.surgery import BEAM_INPUT, HIDDEN_INPUT, SAMPLED_INPUT
from shard_builder.forms.npu_form import MASK_INPUT, NpuSizes, past_name, present_name

DEVICE = "CPU"
POSITION_INPUT = "position_ids"
SEED = 20240229
SINGLE_STEPS = 6
TOLERANCE = 1e-4
"""Largest difference that is noise, as a share of the range of the logits, in f32. Masked slots group the sums
differently: 1e-6 to 1e-5 was seen. A window or bias that counts slots shows as 1e-2 and more."""


@dataclass(frozen=True)
class StaticCheck:
    """Largest absolute difference of any logit, the range of the logits, and the share of equal greedy tokens."""

    max_abs_diff: float
    logit_range: float
    greedy_match: float


class StaticStage:
    """A stage as two static graphs over one set of caches, run as a host would.

    With ``any`` slots the caches are filled from their first slot on, with ``adjacent`` ones they move up to make room
    at their end; where they are full, the sequence has reached its context.
    """

    def __init__(self, core: ov.Core, weights: Path, graphs: Sequence[Path], sizes: NpuSizes, slots: NpuSlots) -> None:
        self._sizes = sizes
        self._slots = slots
        self._past = 0
        self._requests: dict[int, ov.InferRequest] = {}
        self._caches: list[NDArray[Any]] = []
        for graph, tokens in zip(graphs, (sizes.chunk_tokens, 1), strict=True):
            compiled = core.compile_model(core.read_model(graph, weights), DEVICE, exact_properties(DEVICE, "f32"))
            self._requests[tokens] = compiled.create_infer_request()
        names = {name for port in compiled.inputs for name in port.get_names()}
        while (name := past_name(len(self._caches))) in names:
            port = compiled.input(name)
            self._caches.append(np.zeros(port.get_shape(), port.get_element_type().to_dtype()))
        self._names = names

    def begin_sequence(self) -> None:
        """Forgets all tokens: the mask hides what the caches still hold."""
        self._past = 0

    def run(self, entering: NDArray[Any]) -> NDArray[np.float32]:
        """One call with ``[1, tokens, ...]`` ids or hidden states gives all hidden states, or the last logits.

        More tokens than one go through the chunk's graph, which is filled up with tokens that the mask hides.
        """
        count = entering.shape[1]
        tokens = 1 if count == 1 else self._sizes.chunk_tokens
        padding = [(0, 0)] * entering.ndim
        padding[1] = (0, tokens - count)
        context = self._sizes.context_tokens
        mask = np.zeros((1, context + tokens), np.int64)
        mask[0, context : context + count] = 1
        mask[0, slice(self._past) if self._slots == "any" else slice(context - self._past, context)] = 1
        positions = np.minimum(np.arange(tokens), count - 1) + self._past
        feed = _feed(self._names, np.pad(entering, padding), mask, positions, count)
        for number, cache in enumerate(self._caches):
            feed[past_name(number)] = cache
        request = self._requests[tokens]
        request.infer(feed)
        for number, cache in enumerate(self._caches):
            new = request.get_tensor(present_name(number)).data
            axis = next(axis for axis, (one, two) in enumerate(zip(cache.shape, new.shape, strict=True)) if one != two)
            rows, new_rows = np.moveaxis(cache, axis, 0), np.moveaxis(new, axis, 0)[:count]
            if self._slots == "any":
                rows[self._past : self._past + count] = new_rows
            else:
                rows[:-count] = rows[count:].copy()
                rows[-count:] = new_rows
        self._past += count
        return np.array(request.get_output_tensor(0).data[:, :count], dtype=np.float32)


def calls_of(sizes: NpuSizes) -> tuple[tuple[int, ...], ...]:
    """Tokens of every call of the two sequences that are compared.

    A query is farthest from a cache's first slot in a later chunk that is full: ``context + chunk - 1`` slots, while it
    is fewer tokens away; a window or a bias that counts slots shows there or nowhere. The first sequence has one, and
    goes to the last slot with single steps. The second fills a later chunk partially.
    """
    part = sizes.chunk_tokens // 2 + 1
    full, rest = divmod(sizes.context_tokens - SINGLE_STEPS - part, sizes.chunk_tokens)
    to_the_last_slot = (part, *[sizes.chunk_tokens] * full, *([rest] if rest else []), *[1] * SINGLE_STEPS)
    return to_the_last_slot, (sizes.chunk_tokens, part)


def check_static(
    core: ov.Core,
    folder: Path,
    manifest: Manifest,
    graphs: Sequence[Sequence[Path]],
    sizes: NpuSizes,
    slots: NpuSlots,
    between_calls: Callable[[], None],
) -> StaticCheck:
    """Prefill by chunks, full and padded, and single steps, through the static and the dynamic stages.

    Args:
        core: OpenVINO.
        folder: the shard folder.
        manifest: its manifest.
        graphs: per stage the graph of a chunk and that of a step.
        sizes: what they were made for.
        slots: how the caches are filled.
        between_calls: may raise to end it.

    Raises:
        ModelError: a graph does not run.
    """
    generator = np.random.default_rng(SEED)
    ids = [
        [generator.integers(0, manifest.vocabulary_size, (1, count), dtype=np.int64) for count in counts]
        for counts in calls_of(sizes)
    ]
    static, dynamic = list[list[NDArray[Any]]](ids), list[list[NDArray[Any]]](ids)
    for stage, files in zip(manifest.stages, graphs, strict=True):
        try:
            runner = StaticStage(core, folder / stage.weights.name, files, sizes, slots)
            static = [_run_static(runner, sequence, between_calls) for sequence in static]
            del runner
            dynamic = _run_dynamic(core, folder, stage, dynamic, between_calls)
        except RuntimeError as error:
            raise ModelError(f"The static graphs of stage {stage.stage} do not run: {plain_reason(error)}.") from None
    pairs = list(zip(chain(*static), chain(*dynamic), strict=True))
    largest = max(float(np.abs(one - two).max()) for one, two in pairs)
    extent = max(float(np.ptp(logits)) for _, logits in pairs)
    same = [bool(one.argmax(-1) == two.argmax(-1)) for one, two in pairs]
    return StaticCheck(largest, extent, sum(same) / len(same))


def is_noise(check: StaticCheck) -> bool:
    """Whether the difference is no more than the order of sums explains."""
    return check.max_abs_diff <= TOLERANCE * check.logit_range


def _run_static(
    runner: StaticStage, calls: Sequence[NDArray[Any]], between_calls: Callable[[], None]
) -> list[NDArray[Any]]:
    runner.begin_sequence()
    outputs: list[NDArray[Any]] = []
    for entering in calls:
        between_calls()
        outputs.append(runner.run(entering))
    return outputs


def _run_dynamic(
    core: ov.Core,
    folder: Path,
    stage: Stage,
    sequences: Sequence[Sequence[NDArray[Any]]],
    between_calls: Callable[[], None],
) -> list[list[NDArray[Any]]]:
    model = core.read_model(folder / stage.graph.name, folder / stage.weights.name)
    request = core.compile_model(model, DEVICE, exact_properties(DEVICE, "f32")).create_infer_request()
    names = set(stage.inputs)
    outputs: list[list[NDArray[Any]]] = []
    for calls in sequences:
        request.reset_state()
        outputs.append([])
        past = 0
        for entering in calls:
            between_calls()
            count = entering.shape[1]
            positions = np.arange(past, past + count)
            request.infer(_feed(names, entering, np.ones((1, past + count), np.int64), positions, count))
            outputs[-1].append(np.array(request.get_output_tensor(0).data, dtype=np.float32))
            past += count
    return outputs


def _feed(
    names: set[str], entering: NDArray[Any], mask: NDArray[np.int64], positions: NDArray[np.int64], count: int
) -> dict[str, NDArray[Any]]:
    feed = {
        TOKEN_INPUT: entering,
        HIDDEN_INPUT: entering,
        MASK_INPUT: mask,
        POSITION_INPUT: positions.astype(np.int64)[None],
        SAMPLED_INPUT: np.array([count - 1]),
        BEAM_INPUT: np.zeros(1, np.int32),
    }
    return {name: value for name, value in feed.items() if name in names}
