"""Predicts what a process holds in memory of its own for a model's constants, once OpenVINO's CPU plugin compiled them.

Weights are mapped from their file, and the plugin reads most of them from there only once, to lay them out as its
matrix kernels want them. The rules below were measured with OpenVINO 2026.4 on f32, bf16 and AMX kernels, with weights
in f16, u8, i4 and u4, and follow its source (``intel_cpu/src/nodes/executors/dnnl/dnnl_utils.cpp`` and
``dnnl_postops_composer.cpp``):

- a matrix that a MatMul reads is kept once more, in its own type;
- its scales and zero points, however small their type, are kept in f32;
- of a table that a Gather reads only scales and zero points are kept, in f32; the table stays in the file;
- other constants in a short float type (norms, biases) are kept in f32; the rest stays in the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shard_builder.cut.graph import Graph
from shard_builder.weights import RunLayout

MATRIX_READERS = frozenset({"MatMul"})
TABLE_READERS = frozenset({"Gather"})
_DECOMPRESSION = frozenset({"Convert", "Subtract", "Multiply", "Reshape", "Transpose", "Unsqueeze", "Squeeze"})
_SHORT_FLOATS = frozenset({"f16", "bf16"})
_F32_BYTES = 4
_STEP_FACTOR = 1.6
"""Memory of a step against the results of one layer's matrix products; measured 1.5 to 1.6 on four widths."""


class AnonymousMemory:
    """Looks up what the constants of a whole model are for.

    ``operations`` are the model's nodes in graph order, ``readers`` the parts that read each of them.
    """

    def __init__(self, operations: Sequence[Any], graph: Graph, readers: Mapping[int, Collection[int]]) -> None:
        self._operations = operations
        self._readers = readers
        self._targets: dict[int, list[int]] = {}
        for number, node in enumerate(graph.nodes):
            for source, _ in node.inputs:
                self._targets.setdefault(source, []).append(number)

    def of_run(self, layout: RunLayout) -> tuple[int, ...]:
        """Bytes for each of the run's parts, in their order.

        Constants that lie at one place of the file (OpenVINO writes equal ones once) are each kept for themselves.
        """
        return tuple(
            sum(self._of_constant(number, part) for blob in layout.blobs for number in blob.constants)
            for part in layout.parts
        )

    def step_bytes_per_token(self) -> int:
        """What one token of a step takes while it runs, in the widest layer."""
        widths: dict[int, int] = {}
        for number, operation in enumerate(self._operations):
            if operation.get_type_name() in MATRIX_READERS:
                shape = operation.get_output_partial_shape(0)
                parts = self._readers.get(number, ())
                if len(parts) == 1 and shape.rank.is_static and shape[len(shape) - 1].is_static:
                    part = next(iter(parts))
                    widths[part] = widths.get(part, 0) + shape[len(shape) - 1].get_length()
        head = max(widths, default=0)
        layers = [width for part, width in widths.items() if part != head] or list(widths.values())
        return round(max(layers, default=0) * _F32_BYTES * _STEP_FACTOR)

    def _of_constant(self, number: int, part: int) -> int:
        if part not in self._readers.get(number, ()):
            return 0
        operation = self._operations[number]
        elements = _elements(operation)
        found = 0
        seen = set()
        waiting = [(number, False)]
        while waiting:
            current, is_parameter = waiting.pop()
            for target in self._targets.get(current, ()):
                if (target, is_parameter) in seen or part not in self._readers.get(target, ()):
                    continue
                seen.add((target, is_parameter))
                kind = self._operations[target].get_type_name()
                if kind in _DECOMPRESSION and self._is_constant(target):
                    waiting.append((target, is_parameter or _elements(self._operations[target]) > elements))
                elif kind in MATRIX_READERS:
                    found = max(found, elements * _F32_BYTES if is_parameter else operation.get_byte_size())
                elif kind in TABLE_READERS:
                    found = max(found, elements * _F32_BYTES if is_parameter else 0)
                elif operation.get_output_element_type(0).get_type_name() in _SHORT_FLOATS:
                    found = max(found, elements * _F32_BYTES)
        return found

    def _is_constant(self, number: int) -> bool:
        """Whether a node's value has a size that is known before any token is, as that of a weight has."""
        return bool(self._operations[number].get_output_partial_shape(0).is_static)


def _elements(operation: Any) -> int:
    shape = operation.get_output_partial_shape(0)
    if shape.is_dynamic:
        return 0
    count = 1
    for dimension in shape:
        count *= dimension.get_length()
    return count
