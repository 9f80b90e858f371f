"""Learns what the dimensions of a tensor mean, so that a stage can rebuild them from its own inputs.

Sub-graphs for masks and positions read the shapes of tensors that another stage holds. Which dimension is the batch,
the new tokens or the past is learnt by running just what those shapes need, twice, with two sets of primes that no
static dimension there has: what changes with a number is that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13

from fleet.errors import ModelError
from shard_builder.cut.graph import Tensor, upstream
from shard_builder.cut.layers import State
from shard_builder.cut.opened_model import OpenedModel, cache_pattern, open_model, plain_reason

BATCH, SEQUENCE, PAST, TOTAL = "batch", "sequence", "past", "total"
_PRODUCTS: tuple[tuple[str, ...], ...] = (
    (BATCH,),
    (SEQUENCE,),
    (PAST,),
    (TOTAL,),
    (BATCH, SEQUENCE),
    (BATCH, TOTAL),
    (SEQUENCE, TOTAL),
)
_PRIMES = tuple(number for number in range(5, 200) if all(number % divisor for divisor in range(2, number)))


@dataclass(frozen=True)
class Dimension:
    """``factor`` times the product of the named quantities; a static dimension has no names."""

    factor: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeSizes:
    """One set of numbers to run with. ``total`` is the width of the attention mask."""

    batch: int
    sequence: int
    past: int

    @property
    def values(self) -> dict[str, int]:
        """The quantities by name."""
        return {BATCH: self.batch, SEQUENCE: self.sequence, PAST: self.past, TOTAL: self.past + self.sequence}


def recognise(first: int, second: int, sizes: tuple[ProbeSizes, ProbeSizes]) -> Dimension | None:
    """What a dimension is that was ``first`` and ``second`` in the two runs; None where it is nothing known."""
    if first == second:
        return Dimension(first)
    for names in _PRODUCTS:
        one, two = (prod(size.values[name] for name in names) for size in sizes)
        if first % one == 0 and second % two == 0 and first // one == second // two:
            return Dimension(first // one, names)
    return None


def choose_sizes(static: set[int]) -> tuple[ProbeSizes, ProbeSizes]:
    """Two sets of distinct primes, none of them (nor past + sequence) in ``static``."""
    primes = [prime for prime in _PRIMES if prime not in static]
    chosen: list[ProbeSizes] = []
    while len(chosen) < 2:
        sizes = ProbeSizes(*primes[:3])
        primes = primes[1:] if sizes.values[TOTAL] in static else primes[3:]
        if sizes.values[TOTAL] not in static:
            chosen.append(sizes)
    return chosen[0], chosen[1]


def probe(
    core: ov.Core, graph_file: Path, states: Sequence[State], tensors: Sequence[Tensor]
) -> dict[Tensor, tuple[Dimension, ...]]:
    """What every dimension of the tensors means.

    Raises:
        ModelError: a dimension follows from something else than batch, new tokens and past, or the part of the model
            that the tensors need does not run by itself.
    """
    if not tensors:
        return {}
    opened = open_model(core, graph_file)
    needed = upstream(opened.graph, [tensor.node for tensor in tensors])
    static = {
        dimension.get_length()
        for number in needed
        for output in opened.operations[number].outputs()
        if output.get_partial_shape().rank.is_static
        for dimension in output.get_partial_shape()
        if dimension.is_static
    }
    sizes = choose_sizes(static)
    shapes = _run(core, opened, states, tensors, needed, sizes)
    found = {}
    for tensor, first, second in zip(tensors, *shapes, strict=True):
        dimensions = []
        for axis, (one, two) in enumerate(zip(first, second, strict=True)):
            dimension = recognise(int(one), int(two), sizes)
            if dimension is None:
                name = opened.operations[tensor.node].get_friendly_name()
                raise ModelError(
                    f"A later stage needs dimension {axis} of '{name}', which follows neither from the batch nor from "
                    "the number of tokens; this model cannot be cut."
                )
            dimensions.append(dimension)
        found[tensor] = tuple(dimensions)
    return found


def _run(
    core: ov.Core,
    opened: OpenedModel,
    states: Sequence[State],
    tensors: Sequence[Tensor],
    needed: set[int],
    sizes: tuple[ProbeSizes, ProbeSizes],
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """The shapes of the tensors at both sizes; every state is replaced by an input of its shape."""
    names = {number: name for name, number in opened.parameters().items()}
    parameters = [opened.operations[number] for number in sorted(needed & set(names))]
    feeds: list[dict[str, NDArray[Any]]] = [{}, {}]
    for number in sorted(needed & set(names)):
        for feed, size in zip(feeds, sizes, strict=True):
            feed[names[number]] = input_values(names[number], opened.operations[number], size)
    stand_ins = {tensor.node: opened.operations[tensor.node] for tensor in tensors}
    for position, state in enumerate(states):
        if state.read not in needed:
            continue
        operation = opened.operations[state.read]
        shape = operation.get_output_partial_shape(0)
        parameter = opset13.parameter(shape, operation.get_output_element_type(0), f"state{position}")
        parameter.output(0).get_tensor().set_names({f"state{position}"})
        for target in list(operation.output(0).get_target_inputs()):
            target.replace_source_output(parameter.output(0))
        parameters.append(parameter)
        stand_ins[state.read] = parameter
        for feed, size in zip(feeds, sizes, strict=True):
            feed[f"state{position}"] = np.zeros(
                state_shape(opened, state, size), dtype=operation.get_output_element_type(0).to_dtype()
            )
    results = []
    for tensor in tensors:
        shape_of = opset13.shape_of(stand_ins[tensor.node].output(tensor.port), "i64")
        results.append(opset13.result(shape_of))
    try:
        compiled = core.compile_model(ov.Model(results, parameters, "probe"), "CPU", {"INFERENCE_NUM_THREADS": 1})
        runs = []
        for feed in feeds:
            outputs = compiled(feed)
            runs.append([np.array(outputs[index]) for index in range(len(results))])
    except RuntimeError as error:
        raise ModelError(f"The part of the model that fixes its shapes does not run: {plain_reason(error)}.") from None
    return runs[0], runs[1]


def state_shape(opened: OpenedModel, state: State, size: ProbeSizes) -> list[int]:
    """The shape of a state that holds the past."""
    pattern = cache_pattern(opened, state)
    past_axis = pattern.past_axis if pattern else None
    return [
        dimension.get_length() if dimension.is_static else size.past if axis == past_axis else size.batch
        for axis, dimension in enumerate(opened.operations[state.read].get_output_partial_shape(0))
    ]


def input_shape(name: str, parameter: Any, size: ProbeSizes) -> list[int]:
    """The shape of one of the model's inputs."""
    if name == "beam_idx":
        return [size.batch]
    if name == "attention_mask":
        return [size.batch, size.past + size.sequence]
    lead = (3,) * (len(parameter.get_output_partial_shape(0)) - 2) if name == "position_ids" else ()
    return [*lead, size.batch, size.sequence]


def input_values(name: str, parameter: Any, size: ProbeSizes) -> NDArray[Any]:
    """Plain values for one of the model's inputs."""
    dtype = parameter.get_output_element_type(0).to_dtype()
    shape = input_shape(name, parameter, size)
    if name == "beam_idx":
        return np.arange(size.batch, dtype=dtype)
    if name == "attention_mask":
        return np.ones(shape, dtype=dtype)
    if name == "position_ids":
        positions = np.arange(size.past, size.past + size.sequence, dtype=dtype)
        return np.ascontiguousarray(np.broadcast_to(positions, shape))
    return np.zeros(shape, dtype=dtype)
