"""Finds how far back a model's layers look, from the masks of their attention.

Only the nodes that make a mask are run: for one new token behind a long past, with one slot masked to see what a hidden
slot looks like. The shapes that they read are inferred, so that no layer runs and no weights are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13

from shard_builder.cut.graph import SHAPE_OF, upstream
from shard_builder.cut.layers import State
from shard_builder.cut.opened_model import OpenedModel, open_model
from shard_builder.cut.shapes import ProbeSizes, input_shape, input_values, state_shape

_ATTENTION = "ScaledDotProductAttention"
_MASK_INPUT = 3
_PAST_TOKENS = 8192
_MASKED_DISTANCE = 1
"""The slot that is masked: the one before the new token's, which every window shows."""


def find_sliding_window(
    core: ov.Core, graph_file: Path, states: Sequence[State], context_tokens: int, described: int
) -> int:
    """Tokens, its own included, that a token sees in the widest window of a layer; 0 where every layer sees all.

    Args:
        core: runs the masks.
        graph_file: the whole model.
        states: all of its variables.
        context_tokens: what the model was trained for; 0 where it does not say. Windows are looked for below it.
        described: the window that the model's configuration speaks of, which is taken where the graph has no masks that
            can be read; 0: none.

    Raises:
        ModelError: the graph cannot be read any more.
    """
    past = max(_PAST_TOKENS, described + 2)
    if context_tokens:
        past = min(past, context_tokens - 1)
    if past < 2:
        return described
    twin = open_model(core, graph_file)
    sizes = ProbeSizes(batch=1, sequence=1, past=past)
    _fix_shapes(twin, states, sizes)
    masks = _masks(twin)
    if masks is None:
        return described
    try:
        rows = _run(core, twin, masks, sizes)
    except RuntimeError:
        # What OpenVINO cannot run by itself: the configuration has to do.
        return described
    windows = [visible for row in rows if (visible := _visible(row)) < past + 1]
    return max(windows, default=0)


def _fix_shapes(twin: OpenedModel, states: Sequence[State], sizes: ProbeSizes) -> None:
    """Gives the model's inputs and states static shapes and lets every other shape follow."""
    for name, number in twin.parameters().items():
        operation = twin.operations[number]
        operation.set_partial_shape(ov.PartialShape(input_shape(name, operation, sizes)))
    for state in states:
        output = twin.operations[state.read].output(0)
        shape = ov.PartialShape(state_shape(twin, state, sizes))
        stand_in = opset13.parameter(shape, output.get_element_type()).output(0)
        for target in list(output.get_target_inputs()):
            target.replace_source_output(stand_in)
    for operation in twin.operations:
        # What OpenVINO's GGUF reader writes for grouped attention only holds once a plugin has fused it; such a node
        # and what follows from it keep the shapes that they had.
        with contextlib.suppress(RuntimeError):
            operation.validate_and_infer_types()


def _masks(twin: OpenedModel) -> list[int] | None:
    """The nodes whose first output is the mask of an attention; None where an attention has none or is not told.

    A model whose attention is causal without a mask has no window there.
    """
    attentions = [operation for operation in twin.operations if operation.get_type_name() == _ATTENTION]
    numbers = {operation.get_name(): number for number, operation in enumerate(twin.operations)}
    found = set()
    for operation in attentions:
        if operation.get_input_size() > _MASK_INPUT:
            found.add(numbers[operation.input_value(_MASK_INPUT).get_node().get_name()])
    return sorted(found) if found else None


def _run(core: ov.Core, twin: OpenedModel, masks: Sequence[int], sizes: ProbeSizes) -> list[NDArray[Any]]:
    """The last row of every mask, for one new token."""
    known = {
        number: operation.input_value(0).get_partial_shape().to_shape()
        for number, operation in enumerate(twin.operations)
        if operation.get_type_name() == SHAPE_OF and operation.input_value(0).get_partial_shape().is_static
    }
    needed = upstream(twin.graph, masks, opaque={twin.graph.nodes[number].inputs[0][0] for number in known})
    for number in needed & set(known):
        operation = twin.operations[number]
        constant = opset13.constant(np.array(known[number], operation.get_output_element_type(0).to_dtype()))
        for target in list(operation.output(0).get_target_inputs()):
            target.replace_source_output(constant.output(0))
    results = [opset13.result(twin.operations[mask].output(0)) for mask in masks]
    names = {number: name for name, number in twin.parameters().items() if number in needed}
    model = ov.Model(results, [twin.operations[number] for number in names], "masks")
    feed = {}
    for position, (number, name) in enumerate(names.items()):
        feed[position] = input_values(name, twin.operations[number], sizes)
        if name == "attention_mask":
            feed[position][:, sizes.past - _MASKED_DISTANCE] = 0
    outputs = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"})(feed)
    return [np.array(outputs[position]).reshape(-1, sizes.past + 1)[-1] for position in range(len(masks))]


def _visible(row: NDArray[Any]) -> int:
    """Slots that a row of a mask shows, the masked one counted as it would be otherwise.

    A mask of numbers is added to the scores: a hidden slot has a large negative number there, others may have a
    smaller one, by their distance.
    """
    masked = len(row) - 1 - _MASKED_DISTANCE
    hidden = ~row if row.dtype == bool else row <= min(float(row[masked]) / 2, -1e3)
    shown = ~hidden
    shown[masked] = True
    # A window is a run of slots that ends at the token's own; what lies before its first hidden slot is not of it.
    before = np.flatnonzero(~shown)
    return int(len(row) - 1 - before[-1]) if len(before) else len(row)
