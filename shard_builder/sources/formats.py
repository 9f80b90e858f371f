"""What a model's weights take in each format, without making any of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import openvino as ov

from fleet.build_messages import TargetDevice, WeightChoice
from fleet.errors import ModelError
from shard_builder.sources.checkpoint_source import read_checkpoint
from shard_builder.sources.gguf import is_gguf, read_head
from shard_builder.sources.model_files import CONFIGURATION, MODEL_GRAPH, list_files
from shard_builder.sources.ways_in import LOCAL_FORMS
from shard_builder.sources.weight_compression import count_parameters, describe_choice, suggest
from shard_builder.sources.weight_forecast import (
    Weight,
    checkpoint_weights,
    forecast_bytes,
    graph_weights,
    is_compressed,
)

DEVICES: tuple[TargetDevice, ...] = ("CPU", "GPU", "NPU")


class FormatCost(msgspec.Struct, frozen=True):
    """Bytes of all weights in one format; ``choice`` is None for the model's own."""

    choice: WeightChoice | None
    words: str
    bytes: int
    suggested_for: tuple[TargetDevice, ...]


class Formats(msgspec.Struct, frozen=True):
    """What there is to choose for a model. One that is compressed already has its own format alone."""

    name: str
    parameters: int
    is_compressed: bool
    formats: tuple[FormatCost, ...]


def list_formats(model: Path) -> Formats:
    """The formats that a model on this PC can be brought into, and what its weights take in each.

    Args:
        model: an OpenVINO IR folder, a Hugging Face checkpoint folder, or a GGUF file.

    Raises:
        ModelError: it is none of these, or damaged.
    """
    try:
        is_file, is_folder = model.is_file(), model.is_dir()
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error.strerror}.") from None
    if is_file and is_gguf(model):
        head = read_head(model)
        own = FormatCost(None, "as it is in the file", head.needed_bytes, DEVICES)
        return Formats(model.stem, head.elements, head.is_quantised, (own,))
    if not is_folder:
        raise ModelError(f"There is no model at {model} on this PC: give {LOCAL_FORMS}.")
    names = list_files(model)
    name = model.resolve().name
    if MODEL_GRAPH in names:
        return _of_graph(model, name)
    if CONFIGURATION not in names:
        raise ModelError(f"{model} is not a model: it has no {MODEL_GRAPH} and no {CONFIGURATION}; give {LOCAL_FORMS}.")
    checkpoint = read_checkpoint(model, names)
    if not checkpoint.tensors:
        raise ModelError(f"{model} keeps its weights in pytorch_model.bin, which says nothing of them unless loaded.")
    return _choices(name, checkpoint_weights(checkpoint.tensors), own="fp16")


def _of_graph(folder: Path, name: str) -> Formats:
    try:
        model = ov.Core().read_model(folder / MODEL_GRAPH)
    except RuntimeError as error:
        raise ModelError(f"OpenVINO cannot read {folder / MODEL_GRAPH}: {error}.") from None
    weights = graph_weights(model)
    if is_compressed(model):
        own = FormatCost(None, "as it is", forecast_bytes(weights, None), DEVICES)
        return Formats(name, sum(weight.elements for weight in weights), True, (own,))
    return _choices(name, weights, own="as it is")


def _choices(name: str, weights: list[Weight], own: str) -> Formats:
    parameters = count_parameters(weights)
    suggested = {device: suggest(device, parameters) for device in DEVICES}
    offered = [
        WeightChoice("fp16"),
        WeightChoice("int8"),
        WeightChoice("int4", group_size=128),
        WeightChoice("int4", group_size=128, symmetric=True),
        WeightChoice("int4", group_size=-1, symmetric=True),
    ]
    costs = [FormatCost(None, own, forecast_bytes(weights, None), ())]
    for choice in offered:
        size = forecast_bytes(weights, choice)
        if choice.format == "fp16" and size == costs[0].bytes:
            continue
        devices = tuple(device for device in DEVICES if suggested[device] == choice)
        costs.append(FormatCost(choice, describe_choice(choice), size, devices))
    return Formats(name, parameters, False, tuple(costs))
