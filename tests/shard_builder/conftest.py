"""A decoder small enough to build, cut and check in a second, with the traits of exported ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from fleet.data_dir import HOME_VARIABLE
from tests.shard_builder.desk import Desk

VOCABULARY, HEADS, HEAD_SIZE = 61, 2, 8
HIDDEN = HEADS * HEAD_SIZE
POSITIONS = 256


@dataclass(frozen=True)
class TinyDecoder:
    """What to make. ``shared_cache``: the last layer attends to the first one's cache as well.

    ``sliding_window``: how many slots back a layer looks, counted in the cache as exporters do; 0: all.
    """

    layers: int = 3
    gather: bool = True
    initialised: bool = True
    tied: bool = True
    shared_cache: bool = False
    per_layer_inputs: bool = False
    states: bool = True
    hidden_type: str = "f32"
    last_position_only: bool = False
    input_name: str = "input_ids"
    extra_input: str = ""
    sliding_window: int = 0
    attention_mask: bool = True
    static_batch: bool = False
    extra_input_is_read: bool = False
    step_switch: int = 0
    """Positions count otherwise in a step that reaches this one."""
    explicit_ports: bool = False
    """Caches are inputs and outputs instead of states."""

    def write(self, folder: Path) -> Path:
        """Puts the IR and stand-ins for the tokenizer's files into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        ov.serialize(_Weaver(self).weave(), folder / "openvino_model.xml", folder / "openvino_model.bin")
        for name in ("openvino_tokenizer", "openvino_detokenizer"):
            text = '<net name="tokenizer"><rt_info><eos_token_id value="2"/></rt_info></net>'
            (folder / f"{name}.xml").write_text(text)
            (folder / f"{name}.bin").write_bytes(b"\0" * 8)
        config: dict[str, Any] = {"model_type": "tiny", "max_position_embeddings": POSITIONS}
        if self.sliding_window:
            config["sliding_window"] = self.sliding_window
        (folder / "config.json").write_text(json.dumps(config))
        return folder


class _Weaver:
    def __init__(self, what: TinyDecoder) -> None:
        self.what = what
        self.random = np.random.default_rng(7)
        self.sinks: list[Any] = []
        self.parameters: list[Any] = []
        self.results: list[Any] = []
        self.caches: list[tuple[Any, Any]] = []

    def weight(self, *shape: int) -> Any:
        return ops.constant(self.random.standard_normal(shape).astype(np.float32) * 0.3)

    def parameter(self, name: str, shape: list[int], element_type: str) -> Any:
        parameter = ops.parameter(shape, getattr(ov.Type, element_type), name)
        parameter.output(0).get_tensor().set_names({name})
        return parameter

    def weave(self) -> ov.Model:
        what = self.what
        batch = 1 if what.static_batch else -1
        self.ids = self.parameter(what.input_name, [batch, -1], "i64")
        self.attention_mask = self.parameter("attention_mask", [batch, -1], "i64")
        position_ids = self.parameter("position_ids", [batch, -1], "i64")
        self.beam_idx = self.parameter("beam_idx", [-1], "i32")
        embedding = self.weight(VOCABULARY, HIDDEN)
        zero = ops.constant(np.int64(0))
        hidden = ops.gather(embedding, self.ids, zero)
        positions = ops.gather(self.weight(POSITIONS, HIDDEN), position_ids, zero)
        if what.step_switch:
            tokens = ops.add(ops.reduce_max(position_ids, ops.constant(np.array([0, 1]))), ops.constant(np.int64(1)))
            beyond = ops.greater(tokens, ops.constant(np.int64(what.step_switch)))
            factor = ops.select(beyond, ops.constant(np.float32(1.5)), ops.constant(np.float32(1)))
            positions = ops.multiply(positions, factor)
        hidden = ops.add(hidden, positions)
        if what.extra_input:
            self.parameters.append(self.parameter(what.extra_input, [-1, -1], "i64"))
        if what.extra_input_is_read:
            hidden = ops.add(hidden, ops.gather(self.weight(2, HIDDEN), self.parameters[-1], zero))
        if what.hidden_type != "f32":
            hidden = ops.convert(hidden, what.hidden_type)
        self.mask: Any = None
        extras = ops.gather(self.weight(VOCABULARY, HIDDEN), self.ids, zero)
        for layer in range(what.layers):
            hidden = self.layer(layer, hidden, extras)
        if what.hidden_type != "f32":
            hidden = ops.convert(hidden, "f32")
        if what.last_position_only:
            hidden = ops.gather(hidden, ops.constant(np.array([-1])), ops.constant(np.int64(1)))
        head = embedding if what.tied else self.weight(VOCABULARY, HIDDEN)
        result = ops.result(ops.matmul(self.norm(hidden), head, False, True))
        result.output(0).get_tensor().set_names({"logits"})
        parameters = [self.ids, position_ids]
        if what.attention_mask:
            parameters.insert(1, self.attention_mask)
        if what.gather and what.states:
            parameters.append(self.beam_idx)
        parameters += self.parameters
        model = ov.Model([result, *self.results], self.sinks, parameters, "tiny")
        model.set_rt_info("8.0", ["runtime_options", "ACTIVATIONS_SCALE_FACTOR"])
        return model

    def norm(self, hidden: Any) -> Any:
        square = ops.reduce_mean(ops.multiply(hidden, hidden), ops.constant(np.array([2])), True)
        scaled = ops.divide(hidden, ops.sqrt(ops.add(square, ops.constant(np.float32(1e-5)))))
        return ops.multiply(scaled, self.weight(1, 1, HIDDEN))

    def layer(self, layer: int, hidden: Any, extras: Any) -> Any:
        wide = ops.convert(hidden, "f32") if self.what.hidden_type != "f32" else hidden
        normal = self.norm(wide)
        query, key, value = (self.heads(normal) for _ in range(3))
        if self.what.states:
            key, value = (self.cache(f"{kind}{layer}", new) for kind, new in (("k", key), ("v", value)))
        if self.what.shared_cache and layer == self.what.layers - 1:
            key, value = self.caches[0]
        self.caches.append((key, value))
        if self.mask is None:
            self.mask = self.causal_mask(normal, key)
        attended = ops.scaled_dot_product_attention(query, key, value, self.mask)
        attended = ops.reshape(ops.transpose(attended, ops.constant([0, 2, 1, 3])), ops.constant([0, 0, HIDDEN]), True)
        added = ops.matmul(attended, self.weight(HIDDEN, HIDDEN), False, True)
        if self.what.per_layer_inputs:
            added = ops.add(added, ops.multiply(extras, self.weight(1, 1, HIDDEN)))
        middle = ops.add(wide, added)
        up = ops.swish(ops.matmul(self.norm(middle), self.weight(2 * HIDDEN, HIDDEN), False, True))
        out = ops.add(middle, ops.matmul(up, self.weight(HIDDEN, 2 * HIDDEN), False, True))
        return ops.convert(out, self.what.hidden_type) if self.what.hidden_type != "f32" else out

    def heads(self, hidden: Any) -> Any:
        flat = ops.matmul(hidden, self.weight(HIDDEN, HIDDEN), False, True)
        split = ops.reshape(flat, ops.constant([0, 0, HEADS, HEAD_SIZE]), True)
        return ops.transpose(split, ops.constant([0, 2, 1, 3]))

    def cache(self, variable: str, new: Any) -> Any:
        axis = ops.constant(np.int64(0))
        if self.what.explicit_ports:
            name = f"{variable[1:]}.{'key' if variable[0] == 'k' else 'value'}"
            past = self.parameter(f"past_key_values.{name}", [-1, HEADS, -1, HEAD_SIZE], "f32")
            self.parameters.append(past)
            whole = ops.concat([ops.gather(past, self.beam_idx, axis) if self.what.gather else past, new], -2)
            self.results.append(ops.result(whole))
            self.results[-1].output(0).get_tensor().set_names({f"present.{name}"})
            return whole
        batch = ops.gather(ops.shape_of(self.ids), ops.constant([0]), axis)
        shape = ops.concat([batch, ops.constant([HEADS]), ops.constant([0]), ops.constant([HEAD_SIZE])], 0)
        start = ops.broadcast(ops.constant(np.float32(0)), shape)
        past = ops.read_value(start, variable, np.float32, [-1, HEADS, -1, HEAD_SIZE])
        if not self.what.initialised:
            past.set_arguments([])
        if self.what.gather:
            past = ops.gather(past, self.beam_idx, axis)
        whole = ops.concat([past, new], -2)
        self.sinks.append(ops.assign(whole, variable))
        return whole

    def causal_mask(self, entering: Any, key: Any) -> Any:
        """0 where a token may look, a large negative number elsewhere; from shapes of layer 0, as exporters do it."""

        def length(tensor: Any, axis: int) -> Any:
            return ops.gather(ops.shape_of(tensor), ops.constant(np.int64(axis)), ops.constant(np.int64(0)))

        zero, one = ops.constant(np.int64(0)), ops.constant(np.int64(1))
        new, total = length(entering, 1), length(key, 2)
        places = ops.range(zero, total, one, "i64")
        queries = ops.add(ops.range(zero, new, one, "i64"), ops.subtract(total, new))
        causal = ops.less_equal(ops.unsqueeze(places, ops.constant([0])), ops.unsqueeze(queries, ops.constant([1])))
        if self.what.sliding_window:
            edge = ops.subtract(queries, ops.constant(np.int64(self.what.sliding_window)))
            near = ops.greater(ops.unsqueeze(places, ops.constant([0])), ops.unsqueeze(edge, ops.constant([1])))
            causal = ops.logical_and(causal, near)
        seen = ops.unsqueeze(causal, ops.constant([0, 1]))
        if self.what.attention_mask:
            padding = ops.unsqueeze(ops.convert(self.attention_mask, "boolean"), ops.constant([1, 2]))
            seen = ops.logical_and(seen, padding)
        return ops.select(seen, ops.constant(np.float32(0)), ops.constant(np.float32(-60000)))


@pytest.fixture(scope="session")
def tiny_writer() -> Callable[..., Path]:
    """Writes a tiny decoder with the given traits into a folder, for fixtures that several tests share."""

    def write(folder: Path, **traits: Any) -> Path:
        return TinyDecoder(**traits).write(folder)

    return write


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny decoder with the given traits and returns its folder."""

    def write(**traits: Any) -> Path:
        return TinyDecoder(**traits).write(tmp_path / "model")

    return write


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A desk with a tiny model on it; the data folder is not there yet."""
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return Desk(tmp_path, TinyDecoder().write(tmp_path / "model"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 50 MB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only the superuser of Linux can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "none", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this system mounts no small disk: {mounted.stderr.strip()}")
    yield disk
    # Lazily, because a model that nothing refers to any more may still be mapped from it.
    subprocess.run(["umount", "--lazy", disk], check=True)
