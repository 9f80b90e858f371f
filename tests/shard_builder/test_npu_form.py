"""Graphs of static shape: what they are, that they give the shards' logits, and what cannot be made static."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from openvino import opset13
from typer.testing import CliRunner

from fleet.errors import CancelledError, ModelError
from fleet.manifest import FileEntry, Manifest, NpuSlots, Stage, load_manifest
from paceline.__main__ import app
from shard_builder import build, prepare_npu, verify
from shard_builder.check.reference import exact_properties
from shard_builder.forms.npu import SMALLEST_CONTEXT_TOKENS
from shard_builder.forms.npu_check import StaticStage, calls_of
from shard_builder.forms.npu_form import NpuSizes, write_static_graph

Writer = Callable[..., Path]
SIZES = NpuSizes(context_tokens=40, chunk_tokens=6)


@pytest.fixture
def shards(tiny_model: Writer, tmp_path: Path) -> Path:
    build(tiny_model(), tmp_path / "shards", stages=2, check="none")
    return tmp_path / "shards"


def prepare(folder: Path) -> Manifest:
    return prepare_npu(folder, context_tokens=SIZES.context_tokens, chunk_tokens=SIZES.chunk_tokens)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_graphs_are_static_and_read_the_weights_of_their_stage(shards: Path) -> None:
    before = content(shards)
    manifest = prepare(shards)
    assert load_manifest(shards) == manifest
    assert manifest.npu is not None
    assert manifest.npu.max_abs_diff < 1e-5 < manifest.npu.logit_range
    assert manifest.npu.greedy_match == 1.0
    after = content(shards)
    assert {name for name in after if name.endswith(".bin")} == {name for name in before if name.endswith(".bin")}
    core = ov.Core()
    for stage in manifest.stages:
        assert stage.npu is not None
        for entry, tokens in ((stage.npu.chunk, 6), (stage.npu.step, 1)):
            model = core.read_model(shards / entry.name, shards / stage.weights.name)
            kinds = {operation.get_type_name() for operation in model.get_ops()}
            assert kinds.isdisjoint({"ReadValue", "Assign"})
            assert not any(
                output.get_partial_shape().is_dynamic for node in model.get_ops() for output in node.outputs()
            )
            shapes = {port.any_name: list(port.shape) for port in (*model.inputs, *model.outputs)}
            caches = 2 * (stage.end_layer - stage.first_layer)
            expected = {"attention_mask": [1, 40 + tokens]}
            expected |= {f"past.{number}": [1, 2, 40, 8] for number in range(caches)}
            expected |= {f"present.{number}": [1, 2, tokens, 8] for number in range(caches)}
            expected |= (
                {"inputs_embeds": [1, tokens, 16], "sampled_positions": [1], "logits": [1, 1, 61]}
                if stage.stage
                else {"input_ids": [1, tokens], "position_ids": [1, tokens], "hidden_states": [1, tokens, 16]}
            )
            assert shapes == expected


@dataclass(frozen=True)
class Pair:
    """The last stage as static graphs and as the shard that it was made of."""

    folder: Path
    manifest: Manifest
    dynamic: ov.CompiledModel

    def static(self, slots: NpuSlots) -> StaticStage:
        stage = self.manifest.stages[1]
        assert stage.npu is not None
        graphs = [self.folder / stage.npu.chunk.name, self.folder / stage.npu.step.name]
        return StaticStage(ov.Core(), self.folder / stage.weights.name, graphs, SIZES, slots)

    def run_dynamic(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits of the last position of one call."""
        count = hidden.shape[1]
        feed = {
            "inputs_embeds": hidden,
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
            "sampled_positions": np.array([count - 1]),
        }
        request = self.dynamic.create_infer_request()
        request.infer({name: value for name, value in feed.items() if name in self.manifest.stages[1].inputs})
        return np.array(request.get_output_tensor(0).data)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_writer: Writer) -> Pair:
    folder = tmp_path_factory.mktemp("npu")
    build(tiny_writer(folder / "model"), folder / "shards", stages=2, check="none")
    manifest = prepare(folder / "shards")
    model = ov.Core().read_model(folder / "shards" / manifest.stages[1].graph.name)
    return Pair(folder / "shards", manifest, ov.Core().compile_model(model, "CPU", exact_properties("CPU", "f32")))


@settings(max_examples=8)
@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=8).filter(lambda counts: sum(counts) <= 40),
    slots=st.sampled_from(["any", "adjacent"]),
)
def test_chunks_of_any_length_give_what_one_call_gives(pair: Pair, counts: list[int], slots: NpuSlots) -> None:
    static = pair.static(slots)
    hidden = np.random.default_rng(len(counts)).standard_normal((1, sum(counts), 16)).astype(np.float32)
    done = 0
    for count in counts:
        logits = static.run(hidden[:, done : done + count])
        done += count
    np.testing.assert_allclose(logits, pair.run_dynamic(hidden), rtol=0, atol=2e-6)


def test_the_small_model_has_a_form_for_an_npu(smollm2_two_stages: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(smollm2_two_stages, tmp_path / "shards", copy_function=os.link))
    result = CliRunner().invoke(app, ["shard", "npu", str(folder), "--context", "64", "--chunk", "16", "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["context_tokens"], found["chunk_tokens"], found["greedy_match"]) == (64, 16, 1.0)
    assert found["max_abs_diff"] < 1e-5 * found["logit_range"]
    assert [set(stage["graphs"]) for stage in found["stages"]] == [{"chunk", "step"}, {"chunk", "step"}]


def test_another_size_takes_the_place_of_the_first(shards: Path) -> None:
    first = prepare(shards)
    second = prepare_npu(shards, context_tokens=32)
    assert second.npu is not None
    assert (second.npu.context_tokens, second.npu.chunk_tokens) == (32, 16)
    assert {path.name for path in shards.glob("*.npu-*")} == {
        entry.name for entry in second.files if ".npu-" in entry.name
    }
    assert first.stages[0].npu != second.stages[0].npu


def test_verify_finds_a_damaged_graph(shards: Path) -> None:
    stage = prepare(shards).stages[1]
    assert stage.npu is not None
    path = shards / stage.npu.step.name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"{stage.npu.step.name} is damaged"):
        verify(shards)


def test_a_sliding_window_needs_adjacent_slots(tiny_model: Writer, tmp_path: Path) -> None:
    build(tiny_model(sliding_window=8), tmp_path / "shards", stages=2, check="none")
    form = prepare(tmp_path / "shards").npu
    assert form is not None
    assert (form.slots, form.greedy_match) == ("adjacent", 1.0)


# With 40 slots and chunks of 6 a query is at most 45 slots from the first: a window of 45 tokens is the longest that
# hides a slot, and only from the last query of a full chunk.
@pytest.mark.parametrize(("window", "slots"), [(43, "adjacent"), (45, "adjacent"), (46, "any")])
def test_a_window_about_as_long_as_the_context_is_tried_by_a_full_later_chunk(
    tiny_model: Writer, tmp_path: Path, window: int, slots: NpuSlots
) -> None:
    build(tiny_model(sliding_window=window), tmp_path / "shards", stages=2, check="none")
    form = prepare(tmp_path / "shards").npu
    assert form is not None
    assert (form.slots, form.greedy_match) == (slots, 1.0)
    assert form.max_abs_diff < 1e-4 * form.logit_range


@given(chunk=st.integers(2, 300), spare=st.integers(0, 700))
def test_the_check_goes_to_the_last_slot_and_has_a_full_and_a_partial_later_chunk(chunk: int, spare: int) -> None:
    sizes = NpuSizes(max(2 * chunk, SMALLEST_CONTEXT_TOKENS) + spare, chunk)
    first, second = calls_of(sizes)
    assert sum(first) == sizes.context_tokens
    assert first[-1] == 1
    assert all(1 <= count <= chunk for count in (*first, *second))
    assert chunk in first[1:]
    assert second[0] == chunk
    assert sum(second) <= sizes.context_tokens


def count_positions_by_the_cache(folder: Path) -> None:
    """Lets a model take the positions of tokens from the length of its first cache instead of an input."""
    model = ov.Core().read_model(folder / "openvino_model.xml")
    zero, one = opset13.constant(np.int64(0)), opset13.constant(np.int64(1))
    reader = next(node for node in model.get_ordered_ops() if node.get_type_name() == "ReadValue")
    past = opset13.gather(opset13.shape_of(reader), opset13.constant(np.int64(2)), zero)
    new = opset13.gather(opset13.shape_of(model.input("input_ids")), one, zero)
    counted = opset13.unsqueeze(opset13.range(past, opset13.add(past, new), one, "i64"), zero)
    positions = model.input("position_ids")
    for target in list(positions.get_target_inputs()):
        target.replace_source_output(counted.output(0))
    model.remove_parameter(positions.get_node())
    ov.serialize(model, folder / "changed.xml", folder / "changed.bin")
    for suffix in ("xml", "bin"):
        (folder / f"changed.{suffix}").replace(folder / f"openvino_model.{suffix}")


def test_a_model_that_counts_its_cache_is_refused_and_nothing_is_left(tiny_model: Writer, tmp_path: Path) -> None:
    count_positions_by_the_cache(tiny_model())
    build(tmp_path / "model", tmp_path / "shards", stages=2, check="none")
    before = content(tmp_path / "shards")
    with pytest.raises(ModelError, match=r"has no form for an NPU: .* takes the number of past tokens from the length"):
        prepare(tmp_path / "shards")
    assert content(tmp_path / "shards") == before


def test_a_cancelled_preparation_leaves_nothing(shards: Path) -> None:
    before = content(shards)
    calls = iter([False] * 9 + [True] * 9)
    with pytest.raises(CancelledError):
        prepare_npu(shards, cancelled=lambda: next(calls))
    assert content(shards) == before


@pytest.mark.parametrize(
    ("context", "chunk", "sentence"),
    [
        (16, None, "A context of 16 tokens does not do; it takes at least 32 and at most the 256"),
        (300, None, "A context of 300 tokens does not do"),
        (64, 33, "A chunk of 33 tokens does not do; it takes 2 to half of the context of 64"),
        (64, 1, "A chunk of 1 tokens does not do"),
    ],
)
def test_sizes_that_do_not_fit_are_told(shards: Path, context: int, chunk: int | None, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        prepare_npu(shards, context_tokens=context, chunk_tokens=chunk)


def write_stage(folder: Path, store: Callable[[Any, Any], Any], mask: bool = True) -> Stage:
    """A stage that stores ``store(past, hidden)``, and gives the sum of both."""

    def parameter(name: str, shape: list[int], element_type: ov.Type) -> Any:
        found = opset13.parameter(ov.PartialShape(shape), element_type, name)
        found.output(0).get_tensor().set_names({name})
        return found

    hidden = parameter("inputs_embeds", [-1, -1, 4], ov.Type.f32)
    attention_mask = parameter("attention_mask", [-1, -1], ov.Type.i64)
    start = opset13.constant(np.zeros((1, 1, 4), np.float32))
    past = opset13.read_value(start, "memory", ov.Type.f32, ov.PartialShape([-1, -1, 4]))
    kept = store(past, hidden)
    total = opset13.add(hidden, opset13.reduce_sum(kept, np.array([1]), keep_dims=True))
    seen = opset13.add(total, opset13.convert(opset13.reduce_sum(attention_mask, np.array([0, 1])), "f32"))
    result = opset13.result(seen if mask else total)
    parameters = [hidden, attention_mask] if mask else [hidden]
    folder.mkdir()
    model = ov.Model([result], [opset13.assign(kept, "memory")], parameters, "stage")
    ov.serialize(model, folder / "stage-0.xml", folder / "stage-0.bin")
    size = (folder / "stage-0.bin").stat().st_size
    files = FileEntry("stage-0.xml", 0, "0" * 64), FileEntry("stage-0.bin", size, "0" * 64)
    return Stage(0, 0, 1, size, *files, (), tuple(port.any_name for port in model.inputs))


def recurrent(past: Any, hidden: Any) -> Any:
    return opset13.add(past, opset13.reduce_sum(hidden, np.array([1]), keep_dims=True))


def only_large_tokens(past: Any, hidden: Any) -> Any:
    places = opset13.non_zero(opset13.greater(hidden, opset13.constant(np.float32(0))))
    chosen = opset13.gather_nd(hidden, opset13.transpose(places, opset13.constant([1, 0])))
    rows = opset13.reshape(chosen, opset13.constant([1, -1, 4]), special_zero=False)
    return opset13.concat([past, rows], 1)


def growing(past: Any, hidden: Any) -> Any:
    return opset13.concat([past, hidden], 1)


@pytest.mark.parametrize(
    ("store", "mask", "sentence"),
    [
        (recurrent, True, "its state 'memory' is not a cache that grows by a slot per token"),
        (only_large_tokens, True, r"the shape of '\w+' \(NonZero\) depends on the values"),
        (growing, False, "it has no attention_mask, which would hide the free slots"),
    ],
    ids=["recurrent state", "shape from values", "no mask"],
)
def test_what_cannot_be_static_is_named(
    tmp_path: Path, store: Callable[[Any, Any], Any], mask: bool, sentence: str
) -> None:
    folder = tmp_path / "stage"
    stage = write_stage(folder, store, mask)
    with pytest.raises(ModelError, match=f"Stage 0 cannot be made static: {sentence}"):
        write_static_graph(ov.Core(), folder, stage, 32, 8, tmp_path / "static.xml", tmp_path)


def test_a_plain_stage_can_be_static(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    stage = write_stage(folder, growing)
    write_static_graph(ov.Core(), folder, stage, 32, 8, folder / "static.xml", tmp_path)
    model = ov.Core().read_model(folder / "static.xml", folder / "stage-0.bin")
    assert {port.any_name: list(port.shape) for port in model.inputs}["past.0"] == [1, 32, 4]
