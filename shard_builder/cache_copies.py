"""Gives a whole model the copies of caches that its stages hold, so that both compute attention in the same order.

A cache that layers of two stages read is kept twice. In one piece it is read by all of them, which keeps the CPU plugin
from fusing it with their attention: the sums are formed in another order, and nothing could be compared to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino as ov
from openvino import opset13

from shard_builder.graph import ASSIGN, SHAPE_OF
from shard_builder.layers import State, grown_by
from shard_builder.opened_model import OpenedModel
from shard_builder.stage_plan import StagePlan


def copy_caches(model: ov.Model, opened: OpenedModel, stages: Sequence[StagePlan]) -> ov.Model:
    """The model, which is made of the opened one's operations, with a copy of every cache that a stage borrows."""
    sinks = list(model.get_sinks())
    for number, plan in enumerate(stages):
        for state in plan.copied:
            concat = grown_by(opened.graph, state)
            if concat is None:
                continue
            owners = [stage for stage in stages if state in stage.states and state not in stage.copied]
            theirs = frozenset().union(*(stage.nodes for stage in owners))
            readers = {
                opened.operations[consumer].get_name()
                for consumer, _ in opened.graph.consumers[concat]
                if consumer in plan.nodes - theirs and opened.graph.nodes[consumer].kind not in (ASSIGN, SHAPE_OF)
            }
            copy = _copy(opened, state, opened.operations[concat], readers, f"{state.variable}/stage{number}")
            sinks += [copy] if copy is not None else []
    copied = ov.Model(model.get_results(), sinks, model.get_parameters(), model.get_friendly_name())
    for key, value in model.get_rt_info().items():
        copied.set_rt_info(value, key)
    return copied


def _copy(opened: OpenedModel, state: State, concat: Any, readers: set[str], variable: str) -> Any | None:
    """The Assign of the copy; None for a cache that is kept in another type than it is read in."""
    read = opened.operations[state.read]
    past = concat.input_value(0)
    element_type = read.get_output_element_type(0)
    if past.get_element_type() != element_type or concat.get_output_element_type(0) != element_type:
        return None
    copy = opset13.read_value(read.input_value(0), variable, element_type, read.get_output_partial_shape(0))
    held = copy.output(0)
    gather = past.get_node()
    if gather.get_type_name() == "Gather":
        held = opset13.gather(held, gather.input_value(1), gather.input_value(2)).output(0)
    grown = opset13.concat([held, concat.input_value(1)], int(concat.get_attributes()["axis"]))
    for target in list(concat.output(0).get_target_inputs()):
        if target.get_node().get_name() in readers:
            target.replace_source_output(grown.output(0))
    return opset13.assign(grown, variable)
