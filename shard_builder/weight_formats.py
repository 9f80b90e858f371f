"""Tells in which element types a model's constants are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fleet.manifest import WeightFormat
from shard_builder.weights import RunLayout


def weight_formats(runs: Iterable[RunLayout], operations: Sequence[Any]) -> tuple[WeightFormat, ...]:
    """The bytes of the runs' constants by element type, the most first. ``operations`` are the whole model's nodes.

    Bytes that several constants are made of count once. The scales and zero points of quantised weights are constants
    too, so that a model in ``u4`` has some ``f16`` as well.
    """
    sizes: dict[str, int] = {}
    for run in runs:
        for blob in run.blobs:
            element_type = operations[blob.constants[0]].get_output_element_type(0).get_type_name()
            sizes[element_type] = sizes.get(element_type, 0) + blob.bytes
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return tuple(WeightFormat(element_type=name, bytes=size) for name, size in ordered if size)
