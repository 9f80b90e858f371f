"""Makes the static graphs of a stage that an NPU can take: one for a chunk of tokens, one for a single token.

An NPU's plugin compiles static shapes only, and a variable that grows cannot be static. So every cache becomes an input
``past.N`` ``[1, heads, context, size]`` (as the model lays it out), and its new tokens alone an output ``present.N``.
The host keeps the caches: it feeds them whole, marks the slots that hold a token in ``attention_mask``
``[1, context + tokens]``, the new tokens last, and then copies the new keys and values into the caches. Both graphs
read the same caches and point into the stage's own weight file. Nothing of this was run on an NPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import openvino as ov
from openvino import opset13

from fleet.errors import ModelError
from fleet.manifest import Stage
from shard_builder.cut.layers import find_states
from shard_builder.cut.opened_model import CachePattern, OpenedModel, cache_pattern, open_model, plain_reason
from shard_builder.cut.surgery import BEAM_INPUT, SAMPLED_INPUT
from shard_builder.shard_files import name_constants, write_graph
from shard_builder.weights import WeightFileLayout, constant_bytes

MASK_INPUT = "attention_mask"
SAMPLED_POSITIONS = 1
"""The last stage gives the logits of one position per call."""


@dataclass(frozen=True)
class NpuSizes:
    """``context_tokens`` slots in every cache, and the tokens of a chunk."""

    context_tokens: int
    chunk_tokens: int


def past_name(number: int) -> str:
    """The input that a cache enters by; caches are counted as the shard's graph stores them."""
    return f"past.{number}"


def present_name(number: int) -> str:
    """The output that holds the new tokens' part of a cache."""
    return f"present.{number}"


def write_static_graph(
    core: ov.Core, folder: Path, stage: Stage, context_tokens: int, tokens: int, graph_file: Path, scratch: Path
) -> None:
    """Writes the graph of a stage for so many tokens at a time.

    Args:
        core: OpenVINO.
        folder: the shard folder, with the stage's dynamic graph and its weights.
        stage: which stage.
        context_tokens: slots of every cache.
        tokens: new tokens per call.
        graph_file: what to write.
        scratch: a folder for drafts.

    Raises:
        ModelError: the stage cannot be made static; the text names what stands in the way.
        OSError: the disk is full, or cannot be written.
    """
    opened = open_model(core, folder / stage.graph.name)
    places = _constant_places(opened, folder / stage.graph.name, stage)
    try:
        model = _make_static(opened, stage, context_tokens, tokens)
        numbers = {operation.get_name(): index for index, operation in enumerate(opened.operations)}
        layout = WeightFileLayout((), stage.weights.bytes, places)
        further = write_graph(model, name_constants(model, numbers), layout, graph_file, scratch)
    except RuntimeError as error:
        raise ModelError(f"Stage {stage.stage} cannot be made static: {plain_reason(error)}.") from None
    if further:
        raise ModelError(f"Stage {stage.stage} cannot be made static: it has constants within a loop or a condition.")


def _constant_places(opened: OpenedModel, graph_file: Path, stage: Stage) -> dict[int, tuple[int, int]]:
    """Offset and bytes in the weight file of every constant, by its node."""
    offsets: dict[str, list[int]] = {}
    for layer in ElementTree.parse(graph_file).iter("layer"):
        data = layer.find("data")
        if layer.get("type") == "Const" and data is not None:
            offsets.setdefault(layer.get("name", ""), []).append(int(data.get("offset", "0")))
    places = {}
    for number, operation in enumerate(opened.operations):
        if operation.get_type_name() != "Constant":
            continue
        found = offsets.get(operation.get_friendly_name(), [])
        size = constant_bytes(operation).nbytes
        if len(found) != 1 or found[0] + size > stage.weights.bytes:
            raise ModelError(
                f"The constant '{operation.get_friendly_name()}' of {graph_file} cannot be found in "
                f"{stage.weights.name}; build the shards again."
            )
        places[number] = (found[0], size)
    return places


def _make_static(opened: OpenedModel, stage: Stage, context_tokens: int, tokens: int) -> ov.Model:
    if MASK_INPUT not in opened.parameters():
        raise ModelError(
            f"Stage {stage.stage} cannot be made static: it has no {MASK_INPUT}, which would hide the free slots of "
            "its caches."
        )
    caches = _caches(opened, stage)
    _mend_broadcasts(opened)
    operations = opened.operations
    results = [operation for operation in operations if operation.get_type_name() == "Result"]
    parameters = {name: operations[number] for name, number in opened.parameters().items() if name != BEAM_INPUT}
    shapes = {name: _input_shape(name, parameter, context_tokens, tokens) for name, parameter in parameters.items()}
    for number, cache in enumerate(caches):
        parameter = _cache_input(opened, cache, context_tokens, past_name(number))
        parameters[past_name(number)] = parameter
        shapes[past_name(number)] = parameter.get_output_partial_shape(0)
        result = opset13.result(operations[cache.concat].input_value(1))
        result.output(0).get_tensor().add_names({present_name(number)})
        results.append(result)
    # Not Model.reshape: it also runs passes, which bring in constants that the weight file does not have.
    for name, shape in shapes.items():
        parameters[name].set_partial_shape(ov.PartialShape(shape))
    model = ov.Model(results, [], list(parameters.values()), f"{opened.model.get_friendly_name()}, {tokens} tokens")
    for key, value in opened.model.get_rt_info().items():
        model.set_rt_info(value, key)
    model.validate_nodes_and_infer_types()
    _check_static(model, stage)
    return model


def _caches(opened: OpenedModel, stage: Stage) -> list[CachePattern]:
    found = []
    for state in find_states(opened.graph):
        cache = cache_pattern(opened, state)
        if cache is None:
            raise ModelError(
                f"Stage {stage.stage} cannot be made static: its state '{state.variable}' is not a cache that grows by "
                "a slot per token."
            )
        found.append(cache)
    return found


def _input_shape(name: str, parameter: Any, context_tokens: int, tokens: int) -> list[int]:
    """A batch of one; the last dynamic dimension is that of the tokens."""
    shape = parameter.get_output_partial_shape(0)
    length = {MASK_INPUT: context_tokens + tokens, SAMPLED_INPUT: SAMPLED_POSITIONS}.get(name, tokens)
    dynamic = [axis for axis, dimension in enumerate(shape) if dimension.is_dynamic]
    return [
        dimension.get_length() if dimension.is_static else length if axis == dynamic[-1] else 1
        for axis, dimension in enumerate(shape)
    ]


def _cache_input(opened: OpenedModel, cache: CachePattern, context_tokens: int, name: str) -> Any:
    """An input in the place of a cache's ReadValue and Gather."""
    read = opened.operations[cache.state.read]
    shape = [
        context_tokens if axis == cache.past_axis else 1 if axis == cache.batch_axis else dimension.get_length()
        for axis, dimension in enumerate(read.get_output_partial_shape(0))
    ]
    parameter = opset13.parameter(shape, read.get_output_element_type(0), name)
    parameter.output(0).get_tensor().set_names({name})
    holders = [cache.state.read] if cache.gather is None else [cache.gather, cache.state.read]
    for holder in holders:
        for target in list(opened.operations[holder].output(0).get_target_inputs()):
            target.replace_source_output(parameter.output(0))
    return parameter


def _mend_broadcasts(opened: OpenedModel) -> None:
    """Lets a Broadcast that asks for a length of 0 ask for 1.

    OpenVINO GenAI's reader of GGUF files repeats grouped heads so. The plugins fuse it away and never run it, but as a
    static shape it is wrong. The 1 is a constant that the graph has already, since a new one has no place in the file.
    """
    constants = [operation for operation in opened.operations if operation.get_type_name() == "Constant"]
    small = [constant for constant in constants if constant.get_byte_size() <= 8 and list(constant.shape) == [1]]
    ones = {constant.get_element_type(): constant for constant in small if constant.data[0] == 1}
    for operation in opened.operations:
        if operation.get_type_name() != "Broadcast" or operation.get_attributes()["mode"] != "bidirectional":
            continue
        target = operation.input_value(1).get_node()
        if target.get_type_name() != "Concat":
            continue
        for part in target.inputs():
            source = part.get_source_output().get_node()
            one = ones.get(source.get_output_element_type(0))
            zero = source.get_type_name() == "Constant" and source.get_byte_size() <= 8 and not source.data.any()
            if zero and one is not None:
                part.replace_source_output(one.output(0))


def _check_static(model: ov.Model, stage: Stage) -> None:
    for operation in model.get_ordered_ops():
        for output in operation.outputs():
            if output.get_partial_shape().is_dynamic:
                raise ModelError(
                    f"Stage {stage.stage} cannot be made static: the shape of '{operation.get_friendly_name()}' "
                    f"({operation.get_type_name()}) depends on the values that it is given."
                )
    if model.get_sinks():
        raise ModelError(f"Stage {stage.stage} cannot be made static: it keeps states besides its caches.")
