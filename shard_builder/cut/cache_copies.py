"""Gives a whole model the copies of caches that its stages hold, so that both compute attention in the same order.

A cache that layers of two stages read is kept twice. In one piece it is read by all of them, which keeps the CPU plugin
from fusing it with their attention: the sums are formed in another order, and nothing could be compared to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import openvino as ov
from openvino import opset13

from shard_builder.cut.graph import ASSIGN, SHAPE_OF, Tensor
from shard_builder.cut.layers import LayerMap, State, grown_by
from shard_builder.cut.opened_model import OpenedModel, cache_pattern
from shard_builder.cut.stage_plan import StagePlan


def copy_caches(
    model: ov.Model, opened: OpenedModel, layers: LayerMap, copies: Sequence[tuple[StagePlan, OpenedModel]]
) -> ov.Model:
    """The model with copies of the caches that its stages borrow.

    Args:
        model: made of ``opened.operations``.
        opened: the model as it was read.
        layers: its layers.
        copies: every stage that borrows caches, each with the same model read anew, of which the copies are made.
    """
    sinks = list(model.get_sinks())
    for number, (plan, twin) in enumerate(copies):
        members = _members(layers, plan.copied)
        for member in members:
            for index, (source, port) in enumerate(opened.graph.nodes[member].inputs):
                if source not in members:
                    twin.operations[member].input(index).replace_source_output(opened.operations[source].output(port))
        sinks += [_copy_state(opened, twin, state, f"{state.variable}/{number}") for state in plan.copied]
        for member in members:
            for reader, port in set(opened.graph.consumers[member]):
                if reader in members or opened.graph.nodes[reader].kind in (ASSIGN, SHAPE_OF):
                    continue
                if reader in plan.nodes:
                    _read_copy(opened, twin, reader, Tensor(member, port))
    copied = ov.Model(model.get_results(), sinks, model.get_parameters(), model.get_friendly_name())
    for key, value in model.get_rt_info().items():
        copied.set_rt_info(value, key)
    return copied


def _members(layers: LayerMap, states: Sequence[State]) -> frozenset[int]:
    """What is made of the states' caches alone, without what reads and stores them."""
    outside = {state.read for group in layers.states for state in group} - {state.read for state in states}
    found = {state.read for state in states}
    for number in sorted(layers.caches):
        sources = {source for source, _ in layers.graph.nodes[number].inputs}
        if number not in outside and sources & found:
            found.add(number)
    return frozenset(found - {node for state in states for node in (state.read, state.assign)})


def _copy_state(opened: OpenedModel, twin: OpenedModel, state: State, variable: str) -> ov.Node:
    """Lets the copied nodes read a variable of their own; the Assign that stores it."""
    read = opened.operations[state.read]
    start = read.input_value(0)
    copy = opset13.read_value(start, variable, read.get_output_element_type(0), read.get_output_partial_shape(0))
    held = copy.output(0)
    concat = grown_by(opened.graph, state)
    pattern = cache_pattern(opened, state)
    if concat is not None and pattern is not None and pattern.gather is None:
        gather = opened.operations[concat].input_value(0).get_node()
        held = opset13.gather(held, gather.input_value(1), gather.input_value(2)).output(0)
    for reader, port in opened.graph.consumers[state.read]:
        if opened.graph.nodes[reader].kind != SHAPE_OF:
            _redirect(twin, reader, opened, Tensor(state.read, port), held)
    stored, _ = opened.graph.nodes[state.assign].inputs[0]
    return opset13.assign(twin.operations[stored], variable)


def _read_copy(opened: OpenedModel, twin: OpenedModel, reader: int, tensor: Tensor) -> None:
    _redirect(opened, reader, opened, tensor, twin.operations[tensor.node].output(tensor.port))


def _redirect(of: OpenedModel, reader: int, opened: OpenedModel, tensor: Tensor, output: ov.Output) -> None:
    """Lets a node of one model read ``output`` wherever the graph has it read a tensor."""
    for index, source in enumerate(opened.graph.nodes[reader].inputs):
        if source == tensor:
            of.operations[reader].input(index).replace_source_output(output)
