"""Loading a shard: the manifest's promises are checked, the graph is compiled for its device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov

from fleet.compiled_shards import COMPILED_FOLDER
from fleet.errors import ModelError
from fleet.manifest import FileEntry, KvPrecision, Manifest, Stage, load_manifest
from pipeline.stage import compilation

_log = logging.getLogger(__name__)

TOKEN_INPUT = "input_ids"
HIDDEN_INPUT = "inputs_embeds"
MASK_INPUT = "attention_mask"
POSITION_INPUT = "position_ids"
BEAM_INPUT = "beam_idx"
SAMPLED_INPUT = "sampled_positions"
KNOWN_INPUTS = frozenset({TOKEN_INPUT, HIDDEN_INPUT, MASK_INPUT, POSITION_INPUT, BEAM_INPUT, SAMPLED_INPUT})

_KV_TYPES: dict[KvPrecision, ov.Type] = {
    "f32": ov.Type.f32,
    "f16": ov.Type.f16,
    "bf16": ov.Type.bf16,
    "u8": ov.Type.u8,
}


@dataclass(frozen=True)
class DeviceOptions:
    """How a shard is compiled. The KV precision is never left to a plugin: defaults differ, u8 changes answers."""

    device: str
    kv_precision: KvPrecision
    threads: int = 0
    """Of inference on a CPU; 0: the plugin's choice."""
    inference_precision: str = ""
    """``f32``, or empty for the plugin's choice (bf16 or f16 where the device has it)."""
    dynamic_quantization_group_size: int | None = None
    """None: the plugin's choice; 0: off."""

    def properties(self) -> dict[str, Any]:
        """OpenVINO's names for them."""
        found: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "KV_CACHE_PRECISION": _KV_TYPES[self.kv_precision]}
        if self.threads and self.device == "CPU":
            found["INFERENCE_NUM_THREADS"] = self.threads
        if self.inference_precision:
            found["INFERENCE_PRECISION_HINT"] = self.inference_precision
            found["EXECUTION_MODE_HINT"] = "ACCURACY"
            if self.device == "CPU":
                # Without these the CPU plugin takes f32 in this mode, and KV_CACHE_PRECISION still reads as it was set.
                found["KEY_CACHE_PRECISION"] = found["VALUE_CACHE_PRECISION"] = _KV_TYPES[self.kv_precision]
        if self.dynamic_quantization_group_size is not None:
            found["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = str(self.dynamic_quantization_group_size)
        return found


@dataclass(frozen=True)
class Shard:
    """A compiled stage of a model."""

    manifest: Manifest
    stage: Stage
    compiled: ov.CompiledModel
    inputs: tuple[str, ...]
    """Names of the compiled model's inputs, in its order."""
    loaded: compilation.Loaded
    """Whether it was imported or compiled here, and then why."""

    @property
    def is_last(self) -> bool:
        return self.stage.stage == len(self.manifest.stages) - 1


def load_shard(
    folder: Path,
    stage_number: int,
    options: DeviceOptions,
    *,
    compiled_folders: Sequence[Path] = (),
    keep_compiled: bool = False,
) -> Shard:
    """Check one stage of a shard folder, and import or compile it.

    The sizes of its files are compared with the manifest; their hashes were when they arrived.

    Args:
        folder: the shard folder, which may hold compiled shards.
        stage_number: which stage of it.
        options: how to compile it.
        compiled_folders: further folders that may hold compiled shards.
        keep_compiled: whether a shard compiled here is kept in the shard folder for the next time.

    Raises:
        ModelError: the folder lacks the stage or a file of it, the graph is not one of a stage, or the device does not
            take it.
    """
    manifest, stage = stage_of(folder, stage_number)
    is_last = stage_number == len(manifest.stages) - 1
    core = ov.Core()

    def read_model() -> ov.Model:
        try:
            model = core.read_model(folder / stage.graph.name, folder / stage.weights.name)
        except RuntimeError as error:
            raise ModelError(
                f"OpenVINO cannot read {folder / stage.graph.name}: {first_line(error)}. Build the shards again."
            ) from None
        _check_graph(model, stage, is_last=is_last)
        return model

    properties = options.properties()
    own = folder / COMPILED_FOLDER
    try:
        loaded = compilation.load(
            core,
            read_model,
            compilation.made_from(stage, options.device, properties),
            properties,
            (own, *compiled_folders),
            own if keep_compiled else None,
            stage,
            lambda model: _check_graph(model, stage, is_last=is_last),
        )
    except RuntimeError as error:
        raise ModelError(
            f"The device {options.device} does not take stage {stage_number} of {manifest.name}: {first_line(error)}. "
            "Choose another device for it."
        ) from None
    _check_kv_precision(loaded.model, options)
    inputs = tuple(port.any_name for port in loaded.model.inputs)
    return Shard(manifest, stage, loaded.model, inputs, loaded)


def stage_of(folder: Path, stage_number: int) -> tuple[Manifest, Stage]:
    """The manifest of a shard folder and one stage of it, whose files have the sizes that it says.

    Raises:
        ModelError: the folder lacks the stage or a file of it.
    """
    manifest = load_manifest(folder)
    if stage_number >= len(manifest.stages):
        raise ModelError(f"{folder} holds {len(manifest.stages)} stages; there is no stage {stage_number}.")
    stage = manifest.stages[stage_number]
    for entry in (stage.graph, stage.weights):
        _check_size(folder, entry)
    return manifest, stage


def first_line(error: Exception) -> str:
    """What OpenVINO says went wrong, without the file and line of its source in front of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    plain = [line for line in lines if not line.startswith(("Exception from", "Check '"))]
    return (plain or lines or [type(error).__name__])[0].rstrip(".")


def _check_size(folder: Path, entry: FileEntry) -> None:
    path = folder / entry.name
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. Deploy the model again.") from None
    if size != entry.bytes:
        raise ModelError(f"{path} has {size} bytes instead of {entry.bytes}. Deploy the model again.")


def _check_graph(model: ov.Model | ov.CompiledModel, stage: Stage, *, is_last: bool) -> None:
    names = {port.any_name for port in model.inputs}
    data_input = TOKEN_INPUT if stage.stage == 0 else HIDDEN_INPUT
    needed = {data_input, SAMPLED_INPUT} if is_last else {data_input}
    other = {TOKEN_INPUT, HIDDEN_INPUT} - {data_input}
    missing = needed - names
    unknown = (names - KNOWN_INPUTS) | (names & other)
    if missing or unknown:
        what = f"lacks the input {sorted(missing)[0]}" if missing else f"wants the input {sorted(unknown)[0]}"
        raise ModelError(
            f"The graph {stage.graph.name} {what}, so it is not a stage that can be served; build it again."
        )
    if len(model.outputs) != 1:
        raise ModelError(
            f"The graph {stage.graph.name} has {len(model.outputs)} outputs instead of one; build it again."
        )


def _check_kv_precision(compiled: ov.CompiledModel, options: DeviceOptions) -> None:
    """A plugin may ignore what it was told; an answer would then differ for no visible reason."""
    try:
        actual = compiled.get_property("KV_CACHE_PRECISION")
    except RuntimeError:
        _log.warning("%s does not say which precision its KV cache has", options.device)
        return
    if actual != _KV_TYPES[options.kv_precision]:
        raise ModelError(
            f"The device {options.device} keeps its KV cache in {actual.get_type_name()}, not in "
            f"{options.kv_precision}; choose another device or KV precision."
        )
