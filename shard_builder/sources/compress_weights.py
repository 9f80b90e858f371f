"""Compresses an IR's weights: ``python -m shard_builder.sources.compress_weights GRAPH DESTINATION CHOICE``.

CHOICE is a ``WeightChoice`` in JSON. ``int8`` and ``int4`` go through NNCF, without data, which needs the ``export``
extra.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import openvino as ov

from fleet.build_messages import WeightChoice
from shard_builder.sources.child_work import Tell, do_child_work


def compress_weights(arguments: Sequence[str], tell: Tell) -> str:
    """The work of this process; it comes to nothing but the IR in DESTINATION."""
    graph, destination = Path(arguments[0]), Path(arguments[1])
    choice = msgspec.json.decode(arguments[2], type=WeightChoice)
    model = ov.Core().read_model(graph)
    if choice.format != "fp16":
        model = _compress(model, choice)
    ov.save_model(model, destination / graph.name, compress_to_fp16=choice.format == "fp16")
    return ""


def _compress(model: ov.Model, choice: WeightChoice) -> ov.Model:
    import nncf
    from nncf.quantization.advanced_parameters import AdvancedCompressionParameters, GroupSizeFallbackMode

    if choice.format == "int8":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    return nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_SYM if choice.symmetric else nncf.CompressWeightsMode.INT4_ASYM,
        ratio=1.0,
        group_size=choice.group_size,
        advanced_parameters=AdvancedCompressionParameters(group_size_fallback_mode=GroupSizeFallbackMode.ADJUST),
    )


if __name__ == "__main__":
    sys.exit(do_child_work(compress_weights))
