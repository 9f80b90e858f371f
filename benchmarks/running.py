"""Runs models and chains of shards within one process, for comparisons that must share everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from fleet.manifest import load_manifest
from shard_builder.sources.ways_in import MODEL_GRAPH

PROPERTIES: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "KV_CACHE_PRECISION": "f16"}
"""Those of a stage process."""


def whole_model_of(folder: Path) -> ov.Model:
    """The model of an IR folder."""
    return ov.Core().read_model(folder / MODEL_GRAPH)


def chain_model(shard_folder: Path, stage: int) -> ov.Model:
    """One shard of a folder."""
    return ov.Core().read_model(shard_folder / load_manifest(shard_folder).stages[stage].graph.name)


def without_gather(model: ov.Model) -> ov.Model:
    """Takes the Gather by beam_idx out of every cache of a model, in place."""
    for operation in model.get_ordered_ops():
        if operation.get_type_name() != "Gather":
            continue
        indices = operation.input_value(1).get_node()
        if indices.get_type_name() != "Parameter" or "beam_idx" not in indices.output(0).get_names():
            continue
        for target in list(operation.output(0).get_target_inputs()):
            target.replace_source_output(operation.input_value(0))
    for parameter in model.get_parameters():
        if "beam_idx" in parameter.output(0).get_names():
            model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    return model


class Runner:
    """A chain of compiled models, fed with one sequence of random tokens (batch 1)."""

    def __init__(self, models: list[ov.Model], threads: int, inference_precision: str = "") -> None:
        """``threads`` 0 and an empty ``inference_precision`` leave the choice to the device."""
        properties = dict(PROPERTIES)
        if inference_precision:
            properties["INFERENCE_PRECISION_HINT"] = inference_precision
        if threads:
            properties["INFERENCE_NUM_THREADS"] = threads
        core = ov.Core()
        self._requests = []
        self._inputs = []
        for model in models:
            self._inputs.append({name for port in model.inputs for name in port.get_names()})
            self._requests.append(core.compile_model(model, "CPU", properties).create_infer_request())
        self._widths = [
            next(
                (port.get_partial_shape()[2].get_length() for port in model.inputs if "inputs_embeds" in port.names), 0
            )
            for model in models
        ]
        self._past = 0
        self._generator = np.random.default_rng(1)

    def restart(self) -> None:
        """Begins a new sequence."""
        for request in self._requests:
            request.reset_state()
        self._past = 0

    def step(self, tokens: int) -> NDArray[Any]:
        """Runs so many new tokens; a chain's later models take what the one before gave."""
        feed: dict[str, NDArray[Any]] = {
            "input_ids": self._generator.integers(0, 1000, (1, tokens)),
            "inputs_embeds": self._generator.random((1, tokens, self._widths[0]), dtype=np.float32),
            "attention_mask": np.ones((1, self._past + tokens), np.int64),
            "position_ids": np.arange(self._past, self._past + tokens)[None],
            "beam_idx": np.zeros(1, np.int32),
            "sampled_positions": np.array([tokens - 1]),
        }
        for request, inputs in zip(self._requests, self._inputs, strict=True):
            for name in inputs:
                request.set_tensor(name, ov.Tensor(feed[name], shared_memory=True))
            request.infer(share_outputs=True)
            flowing: NDArray[Any] = request.get_output_tensor(0).data
            feed["inputs_embeds"] = flowing
        self._past += tokens
        return flowing
