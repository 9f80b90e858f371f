"""Forecasts of what weights take in another format, and the format suggested for a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openvino as ov
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.build_messages import WeightChoice
from shard_builder.sources.formats import list_formats
from shard_builder.sources.ways_in import open_source
from shard_builder.sources.weight_compression import suggest
from shard_builder.sources.weight_forecast import (
    SMALLEST_GROUP,
    Weight,
    checkpoint_weights,
    forecast_bytes,
    graph_weights,
    group_size,
)

LINEAR = Weight("linear", 256 * 512, 2 * 256 * 512, 512)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, 262_144),
        (WeightChoice("fp16"), 262_144),
        (WeightChoice("int8"), 131_072 + 256 * 3),
        (WeightChoice("int4", group_size=128), 65_536 + 1024 * 2 + 512),
        (WeightChoice("int4", group_size=128, symmetric=True), 65_536 + 1024 * 2),
        (WeightChoice("int4", group_size=-1, symmetric=True), 65_536 + 256 * 2),
    ],
)
def test_a_linear_layer_in_every_format(choice: WeightChoice | None, expected: int) -> None:
    assert forecast_bytes([LINEAR], choice) == expected


def test_embeddings_and_head_stay_in_8_bits_and_the_rest_as_it_is() -> None:
    others = [Weight("embedding", 1000, 2000, 10), Weight("head", 1000, 2000, 10), Weight("other", 10, 20)]
    assert forecast_bytes(others, WeightChoice("int4")) == 2 * (1000 + 300) + 20
    odd = Weight("linear", 30 * 30, 1800, 30)
    assert forecast_bytes([odd], WeightChoice("int4")) == 900 + 3 * 30


@given(st.integers(1, 4096), st.sampled_from([32, 64, 128]))
def test_a_group_divides_the_width_or_there_is_none(width: int, wanted: int) -> None:
    group = group_size(width, wanted)
    assert group == 0 or (width % group == 0 and group >= SMALLEST_GROUP)
    assert group_size(width, -1) == width


def test_roles_in_a_checkpoint_are_told_by_name() -> None:
    shapes = {
        "model.embed_tokens.weight": (100, 8),
        "model.layers.0.mlp.up_proj.weight": (16, 8),
        "model.layers.0.mlp.experts.gate_up_proj": (4, 8, 32),
        "model.norm.weight": (8,),
        "transformer.wpe.weight": (64, 8),
        "lm_head.weight": (100, 8),
    }
    roles = [weight.role for weight in checkpoint_weights(shapes)]
    assert roles == ["embedding", "linear", "linear", "other", "embedding", "head"]


@pytest.mark.parametrize(("tied", "embeddings", "heads"), [(True, 3, 0), (False, 3, 1)])
def test_roles_in_a_graph_are_told_by_what_reads_it(
    tiny_model: Callable[..., Path], tied: bool, embeddings: int, heads: int
) -> None:
    folder = tiny_model(tied=tied, per_layer_inputs=True)
    weights = graph_weights(ov.Core().read_model(folder / "openvino_model.xml"))
    roles = [weight.role for weight in weights]
    assert (roles.count("embedding"), roles.count("head")) == (embeddings, heads)
    assert roles.count("linear") == 3 * 6
    assert forecast_bytes(weights, None) == sum(weight.bytes for weight in weights)


def test_f16_takes_what_was_forecast(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model()
    choice = WeightChoice("fp16")
    weights = graph_weights(ov.Core().read_model(folder / "openvino_model.xml"))
    made = open_source(folder, tmp_path, weights=choice).folder / "openvino_model.bin"
    # In so small a model it counts that equal small constants share their bytes in the file.
    assert made.stat().st_size == pytest.approx(forecast_bytes(weights, choice), rel=0.06)


def test_what_is_suggested_for_a_device() -> None:
    small, large = 135_000_000, 8_000_000_000
    assert suggest("CPU", small) == suggest("GPU", small) == WeightChoice("int8")
    assert suggest("CPU", large) == suggest("GPU", large) == WeightChoice("int4", group_size=128)
    assert suggest("NPU", small) == WeightChoice("int4", group_size=128, symmetric=True)
    assert suggest("NPU", large) == WeightChoice("int4", group_size=-1, symmetric=True)


def test_the_formats_of_a_model(tiny_model: Callable[..., Path], smollm2_gguf: Path) -> None:
    found = list_formats(tiny_model())
    sizes = [cost.bytes for cost in found.formats]
    assert sizes == sorted(sizes, reverse=True)
    assert {device for cost in found.formats for device in cost.suggested_for} == {"CPU", "GPU", "NPU"}
    (own,) = list_formats(smollm2_gguf).formats
    assert own.bytes == smollm2_gguf.stat().st_size
