"""Finds from which position on a model computes a whole step otherwise.

LongRoPE (Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024), as exporters write it,
takes other rotary frequencies for all tokens of a step once the largest position in it reaches the length that the
model was first trained for. The keys of one prompt only agree with each other where all its steps lie on one side.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13

from shard_builder.cut.graph import READ_VALUE, Graph, downstream, upstream
from shard_builder.cut.opened_model import OpenedModel, open_model

_REDUCTIONS = frozenset({"ReduceMax", "TopK"})
_COMPARISONS = frozenset({"Greater", "GreaterEqual", "Less", "LessEqual"})
_UNKNOWN = frozenset({"Parameter", READ_VALUE})
_LARGEST_POSITION = 1 << 24
"""Beyond the context of any model, and exact in f32."""
POSITIONS = "position_ids"


def find_step_switch(core: ov.Core, opened: OpenedModel, graph_file: Path) -> int:
    """The smallest position whose presence makes the model compute a step otherwise; 0 where there is none.

    Args:
        core: runs what the model makes of positions alone.
        opened: the whole model.
        graph_file: its file.

    Raises:
        ModelError: the file cannot be read any more.
    """
    positions = opened.parameters().get(POSITIONS)
    if positions is None:
        return 0
    comparisons = _comparisons(opened.graph, positions)
    if not comparisons:
        return 0
    # Nodes that get results of their own are not to stay in the model that is cut.
    twin = open_model(core, graph_file)
    results = [opset13.result(twin.operations[number].output(0)) for number in comparisons]
    model = ov.Model(results, [twin.operations[positions]], "what positions decide")
    request = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1}).create_infer_request()
    sizes = [
        1 if size.is_dynamic else size.get_length() for size in twin.operations[positions].get_output_partial_shape(0)
    ]

    def decided(position: int) -> tuple[bytes, ...]:
        found = request.infer([np.full(sizes, position, np.int64)])
        return tuple(found[port].tobytes() for port in range(len(results)))

    first, same, other = decided(0), 0, _LARGEST_POSITION
    if decided(other) == first:
        return 0
    while other - same > 1:
        middle = (same + other) // 2
        if decided(middle) == first:
            same = middle
        else:
            other = middle
    return other


def _comparisons(graph: Graph, positions: int) -> list[int]:
    """Nodes that compare the largest position of a step with something that no token and no state decides."""
    reductions = [number for number in downstream(graph, [positions]) if graph.nodes[number].kind in _REDUCTIONS]
    return sorted(
        number
        for number in downstream(graph, reductions)
        if graph.nodes[number].kind in _COMPARISONS
        and not any(
            graph.nodes[source].kind in _UNKNOWN and source != positions for source in upstream(graph, [number])
        )
    )
