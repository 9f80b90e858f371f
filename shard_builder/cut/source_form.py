"""Brings a freshly read model into the one form that is cut: stateful, with no inputs but those that a pipeline feeds.

Models that were exported without states take every cache as an input and give it back as an output; OpenVINO's own
transformation makes variables of them. An input that has one plain value for text becomes a constant, the others have
one type each, and the logits are the first output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import openvino as ov
from openvino import opset13
from openvino._offline_transformations import apply_make_stateful_transformation

TOKEN_INPUT = "input_ids"
KNOWN_INPUTS = (TOKEN_INPUT, "attention_mask", "position_ids", "beam_idx")
"""The inputs that a stage may be fed with, in the order in which a shard lists them."""
INPUT_TYPES = {name: "i32" if name == "beam_idx" else "i64" for name in KNOWN_INPUTS}
LOGITS_OUTPUT = "logits"
ZERO_INPUTS = ("token_type_ids",)
"""Inputs [batch, sequence] that are 0 for every token of a text that is not made of parts."""
_PAST_AND_PRESENT = ((r"past_key_values", "present"), (r"past", "present"), (r"past_key_values", "present_key_values"))


def port_name(output: Any) -> str:
    """The name that callers use for an input or output."""
    names = output.get_names()
    for name in KNOWN_INPUTS:
        if name in names:
            return name
    return min(names) if names else str(output.get_node().get_friendly_name())


def bring_into_form(model: ov.Model) -> tuple[str, ...]:
    """Changes the model; sentences on what was changed. Inputs that nothing is known of stay as they are."""
    notes = []
    pairs = _find_pairs(model)
    if pairs:
        model.validate_nodes_and_infer_types()
        apply_make_stateful_transformation(model, pairs)
        notes.append(f"The model's {len(pairs)} cache inputs and outputs were made states.")
    parameters = {port_name(parameter.output(0)): parameter for parameter in model.get_parameters()}
    for name in ZERO_INPUTS:
        if name in parameters and TOKEN_INPUT in parameters:
            _make_zero(model, parameters[name], parameters[TOKEN_INPUT])
            notes.append(f"The model's input '{name}' is fixed to 0, its value for plain text.")
    for name, element_type in INPUT_TYPES.items():
        given = parameters[name].get_output_element_type(0) if name in parameters else None
        if given is not None and given.is_integral_number() and given.get_type_name() != element_type:
            _retype(model, parameters[name], element_type)
            notes.append(f"The model's input '{name}' takes {element_type} numbers instead of {given.get_type_name()}.")
    results = model.get_results()
    logits = [result for result in results if LOGITS_OUTPUT in output_names(result)]
    if len(logits) == 1 and logits[0].get_name() != results[0].get_name():
        # The first output is the one that is read.
        for result in results:
            if result.get_name() != logits[0].get_name():
                model.remove_result(result)
                notes.append(f"The model's output '{port_name(result.output(0))}' is left out.")
    return tuple(notes)


def output_names(result: Any) -> set[str]:
    """The names of one of the model's outputs."""
    names: set[str] = result.output(0).get_names() | result.input_value(0).get_names()
    return names


def _retype(model: ov.Model, parameter: Any, element_type: str) -> None:
    """Replaces an input by one of another integer type.

    A Gather takes indices of either type, and the plugins only fuse a cache's with nothing in between.
    """
    given = parameter.get_output_element_type(0)
    renewed = opset13.parameter(parameter.get_output_partial_shape(0), getattr(ov.Type, element_type))
    names, friendly_name = parameter.output(0).get_names(), parameter.get_friendly_name()
    converted = opset13.convert(renewed, given.get_type_name())
    for target in list(parameter.output(0).get_target_inputs()):
        is_index = target.get_node().get_type_name() == "Gather" and target.get_index() == 1
        target.replace_source_output((renewed if is_index else converted).output(0))
    model.remove_parameter(parameter)
    renewed.set_friendly_name(friendly_name)
    renewed.output(0).get_tensor().set_names(names)
    model.add_parameters([renewed])


def _find_pairs(model: ov.Model) -> dict[str, str]:
    """Names of the inputs that hold a past, each with that of the output that gives what it becomes.

    They are told by the graph, where the output is the past with something appended, else by their names.
    """
    unknown = {
        name: parameter
        for parameter in model.get_parameters()
        if (name := port_name(parameter.output(0))) not in (*KNOWN_INPUTS, *ZERO_INPUTS)
    }
    results = {port_name(result.input(0).get_source_output()): result for result in model.get_results()}
    pairs = {}
    for output_name, result in results.items():
        input_name = _appended_to(result)
        if input_name in unknown:
            pairs[input_name] = output_name
    taken = set(pairs.values())
    for input_name in sorted(set(unknown) - set(pairs)):
        for past, present in _PAST_AND_PRESENT:
            output_name = re.sub(past, present, input_name)
            if output_name != input_name and output_name in results and output_name not in taken:
                pairs[input_name] = output_name
                taken.add(output_name)
                break
    return {name: pairs[name] for name in sorted(pairs, key=_natural)}


def _natural(name: str) -> list[Any]:
    """Orders names by their numbers' values."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _appended_to(result: Any) -> str:
    """The input to which a result appends something; empty where it is none."""
    node = _before(result.input_value(0), ("Convert",))
    if node.get_type_name() != "Concat" or node.get_input_size() != 2:
        return ""
    past = _before(node.input_value(0), ("Convert", "Gather"))
    return port_name(past.output(0)) if past.get_type_name() == "Parameter" else ""


def _before(output: Any, kinds: Sequence[str]) -> Any:
    node = output.get_node()
    while node.get_type_name() in kinds:
        node = node.input_value(0).get_node()
    return node


def _make_zero(model: ov.Model, parameter: Any, tokens: Any) -> None:
    """Replaces an input by zeros of the shape of the token ids."""
    shape = opset13.shape_of(tokens, "i64")
    zero = opset13.constant(0, parameter.get_output_element_type(0).to_dtype())
    zeros = opset13.broadcast(zero, shape)
    for target in list(parameter.output(0).get_target_inputs()):
        target.replace_source_output(zeros.output(0))
    model.remove_parameter(parameter)
