"""How a tensor crosses a cut: as so many numbers per token, in a tensor [batch, sequence, width]."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import openvino as ov
from openvino import opset13

from shard_builder.graph import NOWHERE, Tensor
from shard_builder.layers import State
from shard_builder.opened_model import OpenedModel, cache_pattern
from shard_builder.shapes import BATCH, SEQUENCE, Dimension, ProbeSizes, choose_sizes, input_shape, recognise

_EXACT_TYPES = ("f32", "f16", "bf16", "boolean", "i8", "u8", "i16", "u16")
"""Element types of which every value is an f32 too."""
_INDEX_TYPES = ("i32", "i64", "u32", "u64")
_VALUE_KEEPING = ("Convert", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Slice", "StridedSlice", "Broadcast")


@dataclass(frozen=True)
class CrossingForm:
    """A tensor whose axes are, in some order, the batch, the sequence, and ``sizes``, its other axes in their order.

    ``sizes`` are static. It crosses as [batch, sequence, product of sizes] in f32.
    """

    tensor: Tensor
    name: str
    element_type: str
    batch_axis: int
    sequence_axis: int
    sizes: tuple[int, ...]

    @property
    def width(self) -> int:
        """Numbers per token."""
        return prod(self.sizes)

    @property
    def order(self) -> tuple[int, ...]:
        """The axes with the batch first, the sequence second, and the others behind."""
        rest = (axis for axis in range(2 + len(self.sizes)) if axis not in (self.batch_axis, self.sequence_axis))
        return (self.batch_axis, self.sequence_axis, *rest)

    @property
    def is_plain(self) -> bool:
        """Whether it has the form [batch, sequence, width] already."""
        return self.order == (0, 1, 2)

    def pack(self, output: ov.Output) -> ov.Output:
        """The tensor in the form in which it crosses."""
        if self.element_type != "f32":
            output = opset13.convert(output, "f32").output(0)
        if self.is_plain:
            return output
        if self.order != tuple(range(len(self.order))):
            output = opset13.transpose(output, opset13.constant(np.array(self.order))).output(0)
        pattern = opset13.constant(np.array([0, 0, self.width]))
        return opset13.reshape(output, pattern, special_zero=True).output(0)

    def unpack(self, output: ov.Output) -> ov.Output:
        """The tensor as the model has it, from the form in which it crosses."""
        if not self.is_plain:
            pattern = opset13.constant(np.array([0, 0, *self.sizes]))
            output = opset13.reshape(output, pattern, special_zero=True).output(0)
            if self.order != tuple(range(len(self.order))):
                back = opset13.constant(np.argsort(self.order))
                output = opset13.transpose(output, back).output(0)
        if self.element_type != "f32":
            output = opset13.convert(output, self.element_type).output(0)
        return output


class CrossingForms:
    """Finds the forms of a model's tensors by inferring all shapes twice, with two sets of primes as dimensions.

    Nothing is run, and no weights are read.
    """

    def __init__(self, opened: OpenedModel, twins: Sequence[OpenedModel], states: Sequence[State]) -> None:
        """``twins`` are the same model, read two more times; they are used up."""
        self._opened = opened
        static = {
            dimension.get_length()
            for operation in opened.operations
            for output in operation.outputs()
            if output.get_partial_shape().rank.is_static
            for dimension in output.get_partial_shape()
            if dimension.is_static
        }
        self._sizes = choose_sizes(static)
        self._twins = twins
        for twin, sizes in zip(twins, self._sizes, strict=True):
            _fix_shapes(twin, states, sizes)

    def width(self, tensor: Tensor) -> int | None:
        """Numbers per token of a tensor; None where it is of no form that can cross."""
        form = self.form(tensor)
        return form.width if form else None

    def form(self, tensor: Tensor) -> CrossingForm | None:
        """How a tensor crosses; None where it cannot."""
        output = self._opened.operations[tensor.node].output(tensor.port)
        element_type = output.get_element_type().get_type_name()
        if element_type not in _EXACT_TYPES and not (element_type in _INDEX_TYPES and self._holds_token_ids(tensor)):
            return None
        dimensions = self._dimensions(tensor)
        named = [axis for axis, dimension in enumerate(dimensions) if dimension is None or dimension.names]
        batch, sequence = Dimension(1, (BATCH,)), Dimension(1, (SEQUENCE,))
        if len(named) != 2 or batch not in dimensions or sequence not in dimensions:
            return None
        return CrossingForm(
            tensor=tensor,
            name=self._opened.graph.tensor_name(tensor),
            element_type=element_type,
            batch_axis=dimensions.index(batch),
            sequence_axis=dimensions.index(sequence),
            sizes=tuple(dimension.factor for dimension in dimensions if dimension and not dimension.names),
        )

    def _dimensions(self, tensor: Tensor) -> list[Dimension | None]:
        shapes = [twin.operations[tensor.node].get_output_partial_shape(tensor.port) for twin in self._twins]
        if any(shape.rank.is_dynamic for shape in shapes) or len(shapes[0]) != len(shapes[1]):
            return []
        return [
            recognise(first.get_length(), second.get_length(), self._sizes)
            if first.is_static and second.is_static
            else None
            for first, second in zip(*shapes, strict=True)
        ]

    def _holds_token_ids(self, tensor: Tensor) -> bool:
        """Whether an integer tensor holds nothing but token ids, which an f32 can hold."""
        return tensor.node in self._token_nodes

    @cached_property
    def _token_nodes(self) -> frozenset[int]:
        found = {self._opened.parameters().get("input_ids", NOWHERE)}
        for number, node in enumerate(self._opened.graph.nodes):
            if node.kind in _VALUE_KEEPING and node.inputs[0][0] in found:
                found.add(number)
        return frozenset(found)


def _fix_shapes(twin: OpenedModel, states: Sequence[State], sizes: ProbeSizes) -> None:
    """Gives a model's inputs and states static shapes, and lets every other shape follow."""
    for name, number in twin.parameters().items():
        operation = twin.operations[number]
        operation.set_partial_shape(ov.PartialShape(input_shape(name, operation, sizes)))
    stand_ins = []
    for state in states:
        operation = twin.operations[state.read]
        pattern = cache_pattern(twin, state)
        shape = [
            dimension.get_length()
            if dimension.is_static
            else sizes.past
            if pattern and axis == pattern.past_axis
            else sizes.batch
            for axis, dimension in enumerate(operation.get_output_partial_shape(0))
        ]
        stand_in = opset13.parameter(ov.PartialShape(shape), operation.get_output_element_type(0))
        for target in list(operation.output(0).get_target_inputs()):
            target.replace_source_output(stand_in.output(0))
        stand_ins.append(stand_in)
    twin.model.add_parameters(stand_ins)
    for operation in twin.model.get_ordered_ops():
        # What OpenVINO's GGUF reader writes for grouped attention is only valid where the plugin fuses it; what follows
        # from such a node keeps the shape that it had.
        with contextlib.suppress(RuntimeError):
            operation.validate_and_infer_types()
