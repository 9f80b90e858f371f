"""Says what a model's weights will take in another format, before it is made.

NNCF compresses what is multiplied by (linear layers, and the experts of a mixture) and what is looked up (embeddings).
With ``int4`` embeddings and the last linear layer, the head, are kept in ``int8``, and so are layers whose width no
group size of at least 32 divides. Everything else stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import openvino as ov

from fleet.build_messages import WeightChoice

SMALLEST_GROUP = 32
"""NNCF adjusts a group size that does not divide a layer's width down to this, and then gives up on 4 bits."""
_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_PASSED = ("Convert", "FakeQuantize", "FakeConvert", "Reshape")
_EMBEDDING_NAME = re.compile(
    r"(embed_tokens|embed_positions|tok_embeddings|word_embeddings|embeddings?|wte|wpe|embed_in)\."
)
_HEAD_NAME = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")

Role = Literal["linear", "head", "embedding", "other"]


@dataclass(frozen=True)
class Weight:
    """A constant: its numbers, its bytes as they are (of a checkpoint, in f16), and how many numbers a scale spans."""

    role: Role
    elements: int
    bytes: int
    width: int = 1
    is_floating: bool = True


def forecast_bytes(weights: Iterable[Weight], choice: WeightChoice | None) -> int:
    """Bytes of all weights in a format; None: as they are."""
    return sum(weight.bytes if choice is None else _forecast(weight, choice) for weight in weights)


def _forecast(weight: Weight, choice: WeightChoice) -> int:
    if not weight.is_floating:
        return weight.bytes
    if choice.format == "fp16":
        return min(weight.bytes, 2 * weight.elements)
    if weight.role == "other":
        return weight.bytes
    channels = weight.elements // weight.width
    group = group_size(weight.width, choice.group_size) if weight.role == "linear" and choice.format == "int4" else 0
    if group == 0:
        return weight.elements + 3 * channels  # u8, with a scale in f16 and a zero point in u8 for each channel
    groups = weight.elements // group
    zero_points = 0 if choice.symmetric else -(-groups // 2)
    return -(-weight.elements // 2) + 2 * groups + zero_points


def group_size(width: int, wanted: int) -> int:
    """The group size that NNCF takes for a layer: the wanted one, or the largest power of two that divides the width.

    0 where that is too small, so that the layer is kept in 8 bits.
    """
    if wanted == -1:
        return width
    if width % wanted == 0:
        return wanted
    largest = width & -width
    return largest if largest >= SMALLEST_GROUP else 0


def graph_weights(model: ov.Model) -> list[Weight]:
    """The constants of an IR."""
    found: dict[str, Weight] = {}
    last = ""
    operations = model.get_ordered_ops()
    for operation in operations:
        for constant, role, width in _read_weights(operation):
            name = constant.get_name()
            last = name if name not in found else ""
            found.setdefault(name, _weight(constant, role, width))
    if last and found[last].role == "linear":
        weight = found[last]
        found[last] = Weight("head", weight.elements, weight.bytes, weight.width)
    for operation in operations:
        if operation.get_type_name() == "Constant" and operation.get_name() not in found:
            found[operation.get_name()] = _weight(operation, "other", 1)
    return list(found.values())


def _weight(constant: Any, role: Role, width: int) -> Weight:
    kind = constant.get_output_element_type(0).get_type_name()
    return Weight(role, prod(constant.get_output_shape(0)), constant.get_byte_size(), width, kind in _BYTES)


def _read_weights(operation: Any) -> list[tuple[Any, Role, int]]:
    """The constants that an operation multiplies by or looks up, and the length of the axis that a scale spans."""
    kind = operation.get_type_name()
    if kind == "Gather":
        constant = _constant_before(operation.input_value(0))
        if constant is None or not constant.get_output_element_type(0).is_real():
            return []
        return [(constant, "embedding", prod(constant.get_output_shape(0)[1:]))]
    if kind != "MatMul":
        return []
    found: list[tuple[Any, Role, int]] = []
    attributes = operation.get_attributes()
    for port, last_axis in ((0, not attributes["transpose_a"]), (1, bool(attributes["transpose_b"]))):
        constant = _constant_before(operation.input_value(port))
        if constant is None or not constant.get_output_element_type(0).is_real():
            continue
        shape = constant.get_output_shape(0)
        if len(shape) > 1:
            found.append((constant, "linear", shape[-1] if last_axis else shape[-2]))
    return found


def _constant_before(output: Any) -> Any | None:
    node = output.get_node()
    while node.get_type_name() in _PASSED:
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" else None


def checkpoint_weights(shapes: Mapping[str, tuple[int, ...]]) -> list[Weight]:
    """The tensors of a checkpoint as they will be after the export, in f16.

    Which is an embedding or the head is told by the names that transformers' models use.
    """
    weights = []
    for name, shape in shapes.items():
        elements = prod(shape)
        role: Role = "other"
        if len(shape) > 1:
            role = "head" if _HEAD_NAME.search(name) else "embedding" if _EMBEDDING_NAME.search(name) else "linear"
        weights.append(Weight(role, elements, 2 * elements, shape[-1] if len(shape) > 1 else 1))
    return weights


def is_compressed(model: ov.Model) -> bool:
    """Whether an IR's weights are in 8 bits or fewer already: whole numbers that are converted and scaled."""
    for operation in model.get_ops():
        if operation.get_type_name() != "Constant":
            continue
        kind = operation.get_output_element_type(0)
        if kind.bitwidth > 8 or kind == ov.Type.boolean:
            continue
        for convert in (target.get_node() for target in operation.output(0).get_target_inputs()):
            if convert.get_type_name() != "Convert":
                continue
            readers = {target.get_node().get_type_name() for target in convert.output(0).get_target_inputs()}
            if readers & {"Multiply", "Subtract"}:
                return True
    return False
