"""Chooses the format of a model's weights, and brings an IR into it."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import openvino as ov

from fleet.build_messages import TargetDevice, WeightChoice
from fleet.errors import ModelError
from shard_builder.reporting import Reporter
from shard_builder.sources.child_work import run_child_work
from shard_builder.sources.export_extra import COMPRESSION_PACKAGES, LIBRARIES_BYTES, require_export_extra
from shard_builder.sources.kept_models import announce_needs, conversion_key, keep
from shard_builder.sources.model_files import MODEL_GRAPH, MODEL_WEIGHTS, TOKENIZER_FILES, companions
from shard_builder.sources.weight_forecast import Weight, forecast_bytes, graph_weights, is_compressed

BILLION = 1_000_000_000
COMPRESSION_MEMORY_FACTOR = 2.0
"""Of the weights' bytes as they are: those that are mapped, and the compressed ones; on the safe side."""


def suggest(device: TargetDevice, parameters: int) -> WeightChoice:
    """The format for a device.

    A token reads every weight once, so that on all three the smallest format is the fastest. The NPU takes 4 bits
    without zero points alone, in groups of 128, and beyond 10^9 parameters by channel (OpenVINO GenAI's guide for NPU).
    Below 10^9 parameters 4 bits cost a model too much of what it knows; there CPU and GPU get 8 bits.
    """
    if device == "NPU":
        return WeightChoice("int4", group_size=-1 if parameters > BILLION else 128, symmetric=True)
    return WeightChoice("int8") if parameters < BILLION else WeightChoice("int4", group_size=128)


def count_parameters(weights: list[Weight]) -> int:
    """The floating-point numbers in a model's constants."""
    return sum(weight.elements for weight in weights if weight.is_floating)


def describe_choice(choice: WeightChoice) -> str:
    """A format in words, such as ``int4, symmetric, groups of 128``."""
    if choice.format != "int4":
        return choice.format
    groups = "one group per channel" if choice.group_size == -1 else f"groups of {choice.group_size}"
    return f"int4, {'symmetric, ' if choice.symmetric else ''}{groups}"


def compress_ir(
    folder: Path,
    name: str,
    weights: WeightChoice | None,
    device: TargetDevice | None,
    work_folder: Path,
    reporter: Reporter,
) -> tuple[Path, WeightChoice | None]:
    """The folder of the IR in the chosen format, and the choice that was made; the same folder where that is its own.

    A model that is compressed already is left as it is for a device, and refused where a format was asked for.

    Raises:
        ModelError: it is compressed already, or cannot be compressed here; the text says why.
        CancelledError: the caller wants the build to end.
    """
    if weights is None and device is None:
        return folder, None
    model = ov.Core().read_model(folder / MODEL_GRAPH)
    if is_compressed(model):
        if weights is not None:
            raise ModelError(
                f"The weights of {name} are compressed already, and compressing them again would lose more than it "
                "saves: leave the weight format out, or give the model in f16."
            )
        return folder, None
    found = graph_weights(model)
    del model
    choice = weights or suggest(device or "CPU", count_parameters(found))
    needed = forecast_bytes(found, choice)
    now = forecast_bytes(found, None)
    if choice.format == "fp16" and needed == now:
        return folder, choice
    if choice.format != "fp16":
        require_export_extra(("nncf",), f"Compressing {name} to {choice.format}")
    what = f"Compressing {name} to {describe_choice(choice)}"
    files = [folder / MODEL_GRAPH, folder / MODEL_WEIGHTS, *companions(folder)]
    key = conversion_key(f"{name}-{choice.format}", files, COMPRESSION_PACKAGES, msgspec.json.encode(choice).decode())
    destination = work_folder / key
    if destination.is_dir():
        return destination, choice
    announce_needs(reporter, what, round(now * COMPRESSION_MEMORY_FACTOR) + LIBRARIES_BYTES, needed)

    def make(scratch: Path) -> None:
        run_child_work(
            "shard_builder.sources.compress_weights",
            (str(folder / MODEL_GRAPH), str(scratch), msgspec.json.encode(choice).decode()),
            complaint=f"{name} cannot be compressed to {describe_choice(choice)}",
            on_progress=reporter.work("compress"),
            cancelled=reporter.cancelled,
        )
        for path in (*(folder / file for file in TOKENIZER_FILES), *companions(folder)):
            if path.is_file():
                shutil.copyfile(path, scratch / path.name)

    return keep(destination, needed, what, make), choice
