"""How a tensor crosses a cut: as so many numbers per token, in a tensor [batch, sequence, width]."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13

from fleet.errors import ModelError
from shard_builder.cut.graph import NOWHERE, Tensor
from shard_builder.cut.layers import State
from shard_builder.cut.opened_model import OpenedModel, plain_reason
from shard_builder.cut.shapes import (
    BATCH,
    SEQUENCE,
    Dimension,
    ProbeSizes,
    choose_sizes,
    input_shape,
    recognise,
    state_shape,
)

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

    def __init__(
        self, opened: OpenedModel, read: Callable[[], OpenedModel], states: Sequence[State], caches: Collection[int]
    ) -> None:
        """``read`` opens the same model anew; ``states`` and ``caches`` as in its layer map.

        Raises:
            ModelError: OpenVINO cannot infer the shapes.
        """
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
        try:
            self._twins = [_with_shapes(read(), sizes, states) for sizes in self._sizes]
        except RuntimeError:
            # Some graphs repeat a cache's heads in a way that only holds once a plugin has fused it with the attention.
            try:
                self._twins = [_with_shapes(read(), sizes, (), caches) for sizes in self._sizes]
            except RuntimeError as error:
                raise ModelError(
                    f"The shapes in the model do not follow from those of its inputs, so it cannot be cut: "
                    f"{plain_reason(error)}."
                ) from None

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


def _with_shapes(
    twin: OpenedModel, sizes: ProbeSizes, states: Sequence[State], unknown: Collection[int] = ()
) -> OpenedModel:
    """The model with static shapes for its inputs and states, from which every other shape follows.

    What is read of the nodes ``unknown`` gets no fixed shape.
    """
    for name, number in twin.parameters().items():
        operation = twin.operations[number]
        operation.set_partial_shape(ov.PartialShape(input_shape(name, operation, sizes)))
    stand_ins = [
        _stand_in(twin.operations[state.read].output(0), state_shape(twin, state, sizes), set()) for state in states
    ]
    names = {twin.operations[number].get_name() for number in unknown}
    for number in unknown:
        for output in twin.operations[number].outputs():
            shape = output.get_partial_shape()
            if shape.rank.is_static:
                lengths = [-1 if dimension.is_dynamic else dimension.get_length() or -1 for dimension in shape]
                stand_ins.append(_stand_in(output, lengths, names))
    twin.model.add_parameters(stand_ins)
    twin.model.validate_nodes_and_infer_types()
    return twin


def _stand_in(output: ov.Output, shape: Sequence[int], keep: Collection[str]) -> Any:
    """An input of that shape, for all readers of a tensor but the nodes of ``keep``."""
    stand_in = opset13.parameter(ov.PartialShape(list(shape)), output.get_element_type())
    for target in list(output.get_target_inputs()):
        if target.get_node().get_name() not in keep:
            target.replace_source_output(stand_in.output(0))
    return stand_in
