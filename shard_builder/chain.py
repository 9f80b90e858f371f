"""Runs the shards one after the other, one loaded at a time, and compares them with the whole model's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from fleet.errors import ModelError
from fleet.manifest import KvPrecision, Stage
from shard_builder.opened_model import plain_reason
from shard_builder.reference import Reference, exact_properties, run_calls, token_ids
from shard_builder.surgery import HIDDEN_INPUT, SAMPLED_INPUT

FUSED_LAYER_TYPE = "ScaledDotProductAttention"


@dataclass(frozen=True)
class ChainResult:
    """Largest absolute difference of any logit, share of equal greedy tokens, fused attention nodes per stage."""

    max_abs_diff: float
    greedy_match: float
    fused_attention: tuple[int, ...]


def run_chain(
    core: ov.Core,
    folder: Path,
    stages: tuple[Stage, ...],
    reference: Reference,
    device: str,
    kv_precision: KvPrecision,
    tick: Callable[[], None],
) -> ChainResult:
    """Feeds the reference's tokens through the shards of a folder.

    ``tick`` is called once per stage and call and may raise to stop.

    Raises:
        ModelError: a shard cannot be read or does not run.
    """
    calls = reference.head.calls
    ids = token_ids(calls, reference.head.vocabulary_size)
    flowing: list[NDArray[Any]] = list(ids)
    fused = []
    largest = 0.0
    same = total = 0
    for stage in stages:
        entry = HIDDEN_INPUT if stage.stage else "input_ids"
        last = stage.stage == len(stages) - 1
        arriving = flowing
        flowing = []

        def entering(call: int, arriving: list[NDArray[Any]] = arriving, entry: str = entry) -> dict[str, Any]:
            positions = np.arange(calls[call].tokens, dtype=np.int64)
            return {entry: arriving[call], SAMPLED_INPUT: positions}

        try:
            compiled = core.compile_model(
                core.read_model(folder / stage.graph.name), device, exact_properties(device, kv_precision)
            )
            fused.append(count_fused_attention(compiled))
            outputs = run_calls(compiled.create_infer_request(), set(stage.inputs), calls, entering)
            for number, output in enumerate(outputs):
                if last:
                    expected = reference.logits(number)
                    if not np.isfinite(output).all():
                        raise ModelError(f"The shards in {folder} give logits that are not numbers on {device}.")
                    largest = max(largest, float(np.max(np.abs(output[0] - expected))))
                    same += int(np.count_nonzero(output[0].argmax(-1) == expected.argmax(-1)))
                    total += len(expected)
                else:
                    flowing.append(output)
                tick()
        except RuntimeError as error:
            raise ModelError(
                f"Stage {stage.stage} of {folder} does not run on {device}: {plain_reason(error)}."
            ) from None
    return ChainResult(largest, same / total if total else 0.0, tuple(fused))


def count_fused_attention(compiled: ov.CompiledModel) -> int:
    """Attention nodes that own their KV cache in a model that the CPU plugin compiled.

    A fused node reads the memory nodes themselves; without the fusion the attention falls apart into MatMul and
    Softmax, or reads a concatenation.
    """
    fused = 0
    for operation in compiled.get_runtime_model().get_ops():
        if _layer_type(operation) == FUSED_LAYER_TYPE:
            sources = [_layer_type(port.get_source_output().get_node()) for port in operation.inputs()]
            fused += "MemoryInput" in sources
    return fused


def _layer_type(operation: Any) -> str:
    return str(operation.get_rt_info()["layerType"].astype(str))
