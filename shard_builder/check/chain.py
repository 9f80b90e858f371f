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
from fleet.manifest import KvPrecision, RollbackKind, Stage
from shard_builder.check.array_files import save_array
from shard_builder.check.cases import Sequence
from shard_builder.check.comparison import Comparison
from shard_builder.check.reference import Reference, exact_properties, input_ports, run_sequence
from shard_builder.check.rollback import UntrimmableError, past_axes, state_trimmer
from shard_builder.check.step_values import StepValues, step_values
from shard_builder.cut.opened_model import open_model, plain_reason
from shard_builder.cut.surgery import HIDDEN_INPUT

FUSED_LAYER_TYPE = "ScaledDotProductAttention"


@dataclass(frozen=True)
class ChainResult:
    """What running the shards showed."""

    comparison: Comparison
    fused_attention: tuple[int, ...]
    """Attention nodes per stage that own their KV cache."""
    impossible: dict[RollbackKind, str]
    """Why a way of taking tokens back could not be run."""


def run_chain(
    core: ov.Core,
    folder: Path,
    stages: tuple[Stage, ...],
    reference: Reference,
    device: str,
    kv_precision: KvPrecision,
    scratch: Path,
    tick: Callable[[], None],
) -> ChainResult:
    """Feeds the reference's sequences through the shards of a folder.

    Args:
        core: reads and compiles the shards.
        folder: the shard folder.
        stages: its stages.
        reference: the whole model's logits and what was run for them.
        device: the OpenVINO device that runs the shards.
        kv_precision: of the KV cache.
        scratch: a folder for the hidden states between two stages.
        tick: called once per stage and step; may raise to stop.

    Raises:
        ModelError: a shard cannot be read or does not run, its logits are not numbers, or the disk is full.
    """
    chain = _Chain(core, folder, reference, device, kv_precision, scratch, tick)
    for stage in stages:
        try:
            chain.run_stage(stage, is_last=stage.stage == len(stages) - 1)
        except RuntimeError as error:
            raise ModelError(
                f"Stage {stage.stage} of {folder} does not run on {device}: {plain_reason(error)}."
            ) from None
        except OSError as error:
            raise ModelError(
                f"The hidden states between two stages cannot be written to {scratch}: {error.strerror}."
            ) from None
    return ChainResult(chain.comparison, tuple(chain.fused), chain.impossible)


class _Chain:
    def __init__(
        self,
        core: ov.Core,
        folder: Path,
        reference: Reference,
        device: str,
        kv_precision: KvPrecision,
        scratch: Path,
        tick: Callable[[], None],
    ) -> None:
        self._core = core
        self._folder = folder
        self._all_sequences = reference.head.sequences
        self._vocabulary_size = reference.head.vocabulary_size
        self._device = device
        self._properties = exact_properties(device, kv_precision)
        self._scratch = scratch
        self._tick = tick
        self._sequences = list(reference.sequences)
        self.comparison = Comparison(reference)
        self.fused: list[int] = []
        self.impossible: dict[RollbackKind, str] = {}

    def run_stage(self, stage: Stage, *, is_last: bool) -> None:
        """Runs all sequences through one stage; what flows on is in the scratch folder."""
        opened = open_model(self._core, self._folder / stage.graph.name)
        ports = input_ports(opened.model)
        try:
            axes = past_axes(opened)
        except UntrimmableError as error:
            self._leave_out_trimming(str(error))
            axes = {}
        compiled = self._core.compile_model(opened.model, self._device, self._properties)
        del opened
        self.fused.append(count_fused_attention(compiled))
        for sequence in list(self._sequences):
            try:
                self._run_sequence(compiled, ports, axes, sequence, stage, is_last=is_last)
            except RuntimeError as error:
                if sequence.taken_back_by != "trim":
                    raise
                self._leave_out_trimming(plain_reason(error))

    def _leave_out_trimming(self, reason: str) -> None:
        self._sequences = [sequence for sequence in self._sequences if sequence.taken_back_by != "trim"]
        self.impossible["trim"] = reason

    def _run_sequence(
        self,
        compiled: ov.CompiledModel,
        ports: dict[str, Any],
        axes: dict[str, int],
        sequence: Sequence,
        stage: Stage,
        *,
        is_last: bool,
    ) -> None:
        request = compiled.create_infer_request()
        number = self._all_sequences.index(sequence)

        def entering(step: int, _: StepValues) -> dict[str, NDArray[Any]]:
            return {HIDDEN_INPUT: np.load(self._hidden_file(number, step))} if stage.stage else {}

        found = []
        steps = step_values(sequence, self._vocabulary_size)
        outputs = run_sequence(request, ports, steps, entering, state_trimmer(request, axes))
        for step, (values, output) in enumerate(outputs):
            if is_last:
                found.append(np.array(output[values.compared], dtype=np.float32))
            else:
                save_array(self._hidden_file(number, step), output)
            self._tick()
        if not is_last:
            return
        if not all(np.isfinite(logits).all() for logits in found):
            raise ModelError(f"The shards in {self._folder} give logits that are not numbers on {self._device}.")
        self.comparison.add(sequence, found)

    def _hidden_file(self, sequence: int, step: int) -> Path:
        return self._scratch / f"hidden-{sequence}-{step}.npy"


def hidden_bytes(sequences: tuple[Sequence, ...], width: int) -> int:
    """How much disk the hidden states between two stages take, at ``width`` numbers per token."""
    return 4 * width * sum(sequence.rows * step.tokens for sequence in sequences for step in sequence.steps)


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
