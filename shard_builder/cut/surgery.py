"""Makes the model of one stage: its layers with inputs, states and shapes of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13

from fleet.errors import ModelError
from shard_builder.cut.crossing_form import CrossingForm
from shard_builder.cut.graph import SHAPE_OF, Tensor, downstream, upstream
from shard_builder.cut.layers import LayerMap
from shard_builder.cut.opened_model import CachePattern, OpenedModel, cache_pattern
from shard_builder.cut.shapes import BATCH, PAST, SEQUENCE, TOTAL, Dimension
from shard_builder.cut.source_form import KNOWN_INPUTS, TOKEN_INPUT
from shard_builder.cut.stage_plan import StagePlan

HIDDEN_INPUT = "inputs_embeds"
HIDDEN_OUTPUT = "hidden_states"
SAMPLED_INPUT = "sampled_positions"
BEAM_INPUT = "beam_idx"


@dataclass(frozen=True)
class StageModel:
    """A stage's model, the names of its inputs, and how many caches it got a beam Gather for."""

    model: ov.Model
    inputs: tuple[str, ...]
    injected_gathers: int


def head_entry(opened: OpenedModel, layers: LayerMap, hidden_size: int) -> int:
    """The node whose output the head reads: the last dominator of the logits that is as wide as the hidden state."""
    for number in reversed(layers.chain[:-1]):
        shape = opened.operations[number].get_output_partial_shape(0)
        if shape.rank.is_static and len(shape) == 3 and shape[2].is_static and shape[2].get_length() == hidden_size:
            return number
    return layers.entries[-1].node


class StageSurgeon:
    """Changes a freshly read model into that of one stage. The read model is used up."""

    def __init__(
        self,
        opened: OpenedModel,
        layers: LayerMap,
        plan: StagePlan,
        dimensions: Mapping[Tensor, tuple[Dimension, ...]],
        forms: Mapping[Tensor, CrossingForm],
        hidden_size: int,
    ) -> None:
        """``dimensions`` of what ``plan.foreign_shapes`` read, ``forms`` of what crosses a cut."""
        self._opened = opened
        self._layers = layers
        self._plan = plan
        self._dimensions = dimensions
        self._forms = forms
        self._hidden_size = hidden_size
        self._parameters = {
            name: opened.operations[number] for name, number in opened.parameters().items() if number in plan.nodes
        }
        self._carried: dict[Tensor, ov.Output] = {}
        """What enters, in the form in which it crosses."""
        self._quantities: dict[str, Any] = {}
        self._caches = [pattern for state in plan.states if (pattern := cache_pattern(opened, state)) is not None]
        self._injected = 0

    def operate(self, name: str) -> StageModel:
        """The stage's model."""
        self._take_hidden_states()
        self._gather_by_beam()
        self._rebuild_shapes()
        self._initialise_states()
        result = self._last_result() if self._plan.end == len(self._layers.entries) else self._hidden_result()
        sinks = [self._opened.operations[state.assign] for state in self._plan.states]
        order = [TOKEN_INPUT, HIDDEN_INPUT, *KNOWN_INPUTS[1:], SAMPLED_INPUT]
        inputs = tuple(input_name for input_name in order if input_name in self._parameters)
        for input_name in inputs:
            # One name alone: a tensor may have others too, and OpenVINO's transformations go by that of the node.
            self._parameters[input_name].output(0).get_tensor().set_names({input_name})
            self._parameters[input_name].set_friendly_name(input_name)
        model = ov.Model([result], sinks, [self._parameters[input_name] for input_name in inputs], name)
        for key, value in self._opened.model.get_rt_info().items():
            model.set_rt_info(value, key)
        return StageModel(model, inputs, self._injected)

    def _take_hidden_states(self) -> None:
        """Lets everything that read a tensor at the cut read its part of the stage's input."""
        if not self._plan.sources:
            return
        forms = [self._forms[tensor] for tensor in self._plan.sources]
        widths = [form.width for form in forms]
        parameter = self._add_parameter(HIDDEN_INPUT, [-1, -1, sum(widths)], ov.Type.f32)
        parts = [parameter.output(0)]
        if len(forms) > 1:
            axis = opset13.constant(np.int64(2))
            parts = opset13.variadic_split(parameter, axis, opset13.constant(np.array(widths))).outputs()
        for form, part in zip(forms, parts, strict=True):
            output = self._opened.operations[form.tensor.node].output(form.tensor.port)
            self._carried[form.tensor] = part
            targets = output.get_target_inputs()
            _redirect(targets, form.unpack(part))

    def _add_parameter(self, name: str, shape: list[int], element_type: ov.Type) -> Any:
        parameter = opset13.parameter(ov.PartialShape(shape), element_type, name)
        parameter.output(0).get_tensor().set_names({name})
        self._parameters[name] = parameter
        return parameter

    def _gather_by_beam(self) -> None:
        """Puts a Gather by beam_idx behind every cache that lacks it; both plugins need it to fuse the attention."""
        for cache in self._caches:
            if cache.gather is not None:
                continue
            if BEAM_INPUT not in self._parameters:
                existing = self._opened.parameters().get(BEAM_INPUT)
                if existing is None:
                    self._add_parameter(BEAM_INPUT, [-1], ov.Type.i32)
                else:
                    self._parameters[BEAM_INPUT] = self._opened.operations[existing]
            read = self._opened.operations[cache.state.read].output(0)
            targets = [target for target in read.get_target_inputs() if target.get_node().get_type_name() != SHAPE_OF]
            axis = opset13.constant(np.int64(cache.batch_axis))
            _redirect(targets, opset13.gather(read, self._parameters[BEAM_INPUT], axis).output(0))
            self._injected += 1

    def _rebuild_shapes(self) -> None:
        """Replaces every ShapeOf that reads another stage's tensor by the same numbers from the stage's own inputs."""
        nodes = self._opened.graph.nodes
        for number in self._plan.foreign_shapes:
            operation = self._opened.operations[number]
            dimensions = self._dimensions[Tensor(*nodes[number].inputs[0])]
            parts = [self._dimension(dimension) for dimension in dimensions]
            shape = opset13.concat(parts, 0)
            if operation.get_output_element_type(0) != ov.Type.i64:
                shape = opset13.convert(shape, operation.get_output_element_type(0).get_type_name())
            _redirect(operation.output(0).get_target_inputs(), shape.output(0))

    def _dimension(self, dimension: Dimension) -> Any:
        """An i64 tensor [1] that holds the dimension."""
        if not dimension.names:
            return opset13.constant(np.array([dimension.factor], dtype=np.int64))
        value = self._quantity(dimension.names[0])
        for name in dimension.names[1:]:
            value = opset13.multiply(value, self._quantity(name))
        if dimension.factor != 1:
            value = opset13.multiply(value, opset13.constant(np.array([dimension.factor], dtype=np.int64)))
        return value

    def _quantity(self, name: str) -> Any:
        """An i64 tensor [1] with the batch, the new tokens, the past tokens or the sum of the last two.

        The past comes from the stage's first cache, through one ShapeOf for the whole stage: a second one on the same
        cache would keep the CPU plugin from fusing its attention.
        """
        if name in self._quantities:
            return self._quantities[name]
        if name in (BATCH, SEQUENCE):
            entering = self._parameters[TOKEN_INPUT if HIDDEN_INPUT not in self._parameters else HIDDEN_INPUT]
            if "entering" not in self._quantities:
                self._quantities["entering"] = opset13.shape_of(entering, "i64")
            value = _pick(self._quantities["entering"], 0 if name == BATCH else 1)
        elif name == PAST and self._caches:
            value = _pick(self._cache_shape(self._caches[0]), self._caches[0].past_axis)
        elif name == TOTAL and self._caches:
            value = opset13.add(self._quantity(PAST), self._quantity(SEQUENCE))
        else:
            mask = self._mask()
            value = _pick(opset13.shape_of(mask, "i64"), 1)
            if name == PAST:
                value = opset13.subtract(value, self._quantity(SEQUENCE))
        self._quantities[name] = value
        return value

    def _mask(self) -> Any:
        if "attention_mask" not in self._parameters:
            number = self._opened.parameters().get("attention_mask")
            if number is None:
                raise ModelError(
                    f"Layers {self._plan.first} to {self._plan.end - 1} need the number of past tokens, and neither a "
                    "cache of theirs nor an attention mask tells it; this model cannot be cut there."
                )
            self._parameters["attention_mask"] = self._opened.operations[number]
        return self._parameters["attention_mask"]

    def _cache_shape(self, cache: CachePattern) -> Any:
        """The ShapeOf that already reads the cache, else a new one."""
        read = self._opened.operations[cache.state.read]
        holders = [read.output(0)]
        for target in read.output(0).get_target_inputs():
            if target.get_node().get_type_name() == "Gather":
                holders.insert(0, target.get_node().output(0))
        for holder in holders:
            for target in holder.get_target_inputs():
                node = target.get_node()
                if node.get_type_name() == SHAPE_OF and node.get_output_element_type(0) == ov.Type.i64:
                    return node
        return opset13.shape_of(holders[0], "i64")

    def _initialise_states(self) -> None:
        """Gives a state that starts undefined an empty or zero one of the right batch.

        The CPU plugin cannot infer without.
        """
        past_axes = {cache.state: cache.past_axis for cache in self._caches}
        for state in self._plan.states:
            read = self._opened.operations[state.read]
            if read.get_input_size():
                continue
            parts = []
            for axis, dimension in enumerate(read.get_output_partial_shape(0)):
                if axis == past_axes.get(state):
                    parts.append(opset13.constant(np.array([0], dtype=np.int64)))
                elif dimension.is_dynamic:
                    parts.append(self._quantity(BATCH))
                else:
                    parts.append(opset13.constant(np.array([dimension.get_length()], dtype=np.int64)))
            zero = opset13.constant(0, read.get_output_element_type(0).to_dtype())
            read.set_arguments([opset13.broadcast(zero, opset13.concat(parts, 0)).output(0)])

    def _hidden_result(self) -> Any:
        parts = []
        for tensor in self._plan.results:
            if tensor in self._carried:
                parts.append(self._carried[tensor])
            else:
                output = self._opened.operations[tensor.node].output(tensor.port)
                parts.append(self._forms[tensor].pack(output))
        output = parts[0] if len(parts) == 1 else opset13.concat(parts, 2).output(0)
        result = opset13.result(output)
        result.output(0).get_tensor().set_names({HIDDEN_OUTPUT})
        return result

    def _last_result(self) -> Any:
        """Logits at the sampled positions alone: the hidden states of the others are dropped in front of the head."""
        positions = self._add_parameter(SAMPLED_INPUT, [-1], ov.Type.i64)
        axis = opset13.constant(np.int64(1))
        logits = self._plan.results[0]
        number = head_entry(self._opened, self._layers, self._hidden_size)
        output = self._opened.operations[logits.node].output(logits.port)
        if self._head_reads_only(number):
            hidden = self._opened.operations[number].output(0)
            targets = list(hidden.get_target_inputs())
            _redirect(targets, opset13.gather(hidden, positions, axis).output(0))
        else:
            output = opset13.gather(output, positions, axis).output(0)
        if output.get_element_type() != ov.Type.f32:
            output = opset13.convert(output, "f32").output(0)
        result = opset13.result(output)
        result.output(0).get_tensor().set_names({"logits"})
        return result

    def _head_reads_only(self, number: int) -> bool:
        """Whether nothing behind the head's entry reads a shape from before it, which would keep all positions."""
        graph = self._layers.graph
        entering = {Tensor(number, port) for _, port in graph.consumers[number]}
        behind = upstream(graph, [self._plan.results[0].node], entering)
        before = self._layers.data_nodes - downstream(graph, [number])
        return not any(
            graph.nodes[node].kind == SHAPE_OF and graph.nodes[node].inputs[0][0] in before for node in behind
        )


def _redirect(targets: Iterable[Any], output: Any) -> None:
    for target in list(targets):
        target.replace_source_output(output)


def _pick(shape: Any, axis: int) -> Any:
    """Element ``axis`` of a 1-D i64 tensor, as a tensor [1]."""
    indices = opset13.constant(np.array([axis], dtype=np.int64))
    return opset13.gather(shape, indices, opset13.constant(np.int64(0)))
