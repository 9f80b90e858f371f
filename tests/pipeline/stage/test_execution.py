"""Steps on a shard small enough to check by hand, and on a device that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from numpy.typing import NDArray
from openvino import opset13

from fleet.errors import ModelError
from fleet.gateway_messages import Sampling
from fleet.manifest import FileEntry, KvPrecision, Manifest, Stage
from pipeline.messages import Entry
from pipeline.stage.compilation import Loaded
from pipeline.stage.execution import StepExecutor
from pipeline.stage.machine import Compute
from pipeline.stage.runtime import MAX_IDLE_REQUESTS, ShardRuntime
from pipeline.stage.shard import DeviceOptions, Shard, load_shard

HIDDEN = 4
VOCABULARY = 6
GREEDY = Sampling()


def parameter(name: str, shape: list[int], element_type: ov.Type) -> Any:
    found = opset13.parameter(ov.PartialShape(shape), element_type, name)
    found.output(0).get_tensor().set_names({name})
    return found


def result(node: Any, name: str) -> Any:
    found = opset13.result(node)
    found.output(0).get_tensor().set_names({name})
    return found


def running_sum(values: Any, variable: str) -> tuple[Any, Any]:
    """A state that, like a KV cache, grows by the step's rows; and the sum over all rows so far."""
    zero = opset13.constant(np.zeros((1, 0, HIDDEN), np.float32))
    past = opset13.read_value(zero, variable, ov.Type.f32, ov.PartialShape([1, -1, HIDDEN]))
    everything = opset13.concat([past, values], 1)
    return opset13.assign(everything, variable), opset13.reduce_sum(everything, np.array([1]), keep_dims=True)


def first_model() -> ov.Model:
    """Hidden state of a token t at position p: [t, p, mask length, sum of the cache]."""
    tokens = parameter("input_ids", [-1, -1], ov.Type.i64)
    positions = parameter("position_ids", [-1, -1], ov.Type.i64)
    mask = parameter("attention_mask", [-1, -1], ov.Type.i64)
    axis = opset13.constant(np.int64(2))
    token_column = opset13.unsqueeze(opset13.convert(tokens, "f32"), axis)
    position_column = opset13.unsqueeze(opset13.convert(positions, "f32"), axis)
    width = opset13.convert(opset13.reduce_sum(mask, np.array([1]), keep_dims=True), "f32")
    zeros = opset13.multiply(token_column, opset13.constant(np.float32(0)))
    width_column = opset13.add(zeros, width)
    rows = opset13.concat([token_column, position_column, width_column, zeros], 2)
    sink, total = running_sum(rows, "cache")
    last = opset13.add(zeros, opset13.gather(total, opset13.constant(np.array([0])), axis))
    hidden = opset13.concat([token_column, position_column, width_column, last], 2)
    return ov.Model([result(hidden, "hidden_states")], [sink], [tokens, mask, positions], "first")


def last_model() -> ov.Model:
    """The logits of a position favour the token that its hidden state begins with, plus one."""
    hidden = parameter("inputs_embeds", [-1, -1, HIDDEN], ov.Type.f32)
    sampled = parameter("sampled_positions", [-1], ov.Type.i64)
    sink, _ = running_sum(hidden, "cache")
    kept = opset13.gather(hidden, sampled, opset13.constant(np.int64(1)))
    favoured = opset13.gather(kept, opset13.constant(np.array([0])), opset13.constant(np.int64(2)))
    distance = opset13.subtract(opset13.constant(np.arange(VOCABULARY, dtype=np.float32) - 1), favoured)
    logits = opset13.multiply(opset13.absolute(distance), opset13.constant(np.float32(-1)))
    return ov.Model([result(logits, "logits")], [sink], [hidden, sampled], "last")


def shard(model: ov.Model, stage_number: int) -> Shard:
    entry = FileEntry("file", 0, "0" * 64)
    stages = tuple(Stage(number, number, number + 1, 0, entry, entry, (), ()) for number in range(2))
    manifest = Manifest(1, "id", "tiny", "tiny", HIDDEN, VOCABULARY, 0, "f32", (), (), stages, (), ())
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"})
    inputs = tuple(port.any_name for port in compiled.inputs)
    return Shard(manifest, stages[stage_number], compiled, inputs, Loaded(compiled, "for a test"))


@pytest.fixture(scope="module")
def first_shard() -> Shard:
    return shard(first_model(), 0)


@pytest.fixture(scope="module")
def last_shard() -> Shard:
    return shard(last_model(), 1)


def compute(*entries: Entry) -> Compute:
    ends = np.cumsum([0, *(len(entry.tokens) for entry in entries)]).tolist()
    return Compute(1, 1, entries, tuple(ends[:-1]))


def test_tokens_positions_and_masks_reach_the_graph(first_shard: Shard) -> None:
    executor = StepExecutor(first_shard, "CPU")
    executor.warm_up()
    hidden = executor.run(compute(Entry(1, 0, (5, 7, 9)), Entry(2, 0, (3,))), None).hidden
    assert hidden is not None
    np.testing.assert_array_equal(hidden, [[5, 0, 3, 21], [7, 1, 3, 21], [9, 2, 3, 21], [3, 0, 1, 3]])
    hidden = executor.run(compute(Entry(2, 1, (4,)), Entry(1, 3, (1, 2)), Entry(2, 2, (6,))), None).hidden
    assert hidden is not None
    np.testing.assert_array_equal(hidden, [[4, 1, 2, 7], [1, 3, 5, 24], [2, 4, 5, 24], [6, 2, 3, 13]])


def test_long_contexts_outgrow_the_first_masks(first_shard: Shard) -> None:
    executor = StepExecutor(first_shard, "CPU")
    executor.run(compute(Entry(1, 0, (0,) * 1500)), None)
    hidden = executor.run(compute(Entry(1, 1500, (1,))), None).hidden
    assert hidden is not None
    np.testing.assert_array_equal(hidden, [[1, 1500, 1501, 1]])


def test_a_freed_sequence_leaves_nothing_to_the_next(first_shard: Shard) -> None:
    runtime = ShardRuntime(first_shard)
    for sequence in range(MAX_IDLE_REQUESTS + 3):
        runtime.run_tokens(sequence, 0, (9, 9))
    assert runtime.sequences == MAX_IDLE_REQUESTS + 3
    runtime.free_all()
    assert runtime.sequences == 0
    for sequence in range(MAX_IDLE_REQUESTS + 3):
        assert runtime.run_tokens(sequence, 0, (1,))[0, 3] == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_last_stage_samples_the_positions_that_are_asked_for(last_shard: Shard, dtype: Any) -> None:
    executor = StepExecutor(last_shard, "CPU")
    executor.warm_up()
    tensor: NDArray[Any] = np.zeros((6, HIDDEN), dtype)
    tensor[:, 0] = [0, 1, 2, 3, 4, 1]
    tensor.flags.writeable = False
    outcome = executor.run(
        compute(
            Entry(1, 0, (0, 1, 2), 2, GREEDY),
            Entry(2, 0, (3,), 0, GREEDY),
            Entry(3, 0, (4, 1), 1, Sampling(top_logprobs=1)),
        ),
        tensor,
    )
    assert [(sampled.sequence, sampled.tokens) for sampled in outcome.sampled] == [(1, (2, 3)), (3, (2,))]
    [(logprob, top)] = outcome.sampled[1].logprobs
    assert top == ((2, logprob),)
    assert outcome.compute_ms > 0


def test_penalties_hear_each_token_before_the_position_after_it(last_shard: Shard) -> None:
    tensor = np.zeros((3, HIDDEN), np.float32)
    tensor[:, 0] = [1, 1, 1]
    for prompt_tokens, expected in ((1, (2, 1, 1)), (3, (2, 2, 2))):
        executor = StepExecutor(last_shard, "CPU")
        entry = Entry(1, 0, (0, 2, 5), 3, Sampling(presence_penalty=1.5), prompt_tokens)
        # Token 2 leads by 1; once it is part of the answer, the penalty takes 1.5 from it.
        assert executor.run(compute(entry), tensor).sampled[0].tokens == expected


def test_a_failing_device_fails_its_sequence_and_keeps_the_process(
    first_shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = StepExecutor(first_shard, "GPU")
    real = ShardRuntime.run_tokens

    def fail_for_two(self: ShardRuntime, sequence: int, *rest: Any) -> NDArray[np.float32]:
        if sequence == 2:
            raise RuntimeError("Exception from src/x.cpp:1:\n[GPU] CL_OUT_OF_RESOURCES\n")
        return real(self, sequence, *rest)

    monkeypatch.setattr(ShardRuntime, "run_tokens", fail_for_two)
    outcome = executor.run(compute(Entry(1, 0, (5,)), Entry(2, 0, (6,)), Entry(2, 1, (6,)), Entry(3, 0, (7,))), None)
    assert outcome.failed == {2: "the device GPU failed ([GPU] CL_OUT_OF_RESOURCES)"}
    assert outcome.device_failed
    assert outcome.hidden is not None
    np.testing.assert_array_equal(outcome.hidden[:, 0], [5, 7])
    monkeypatch.undo()
    assert not executor.run(compute(Entry(2, 0, (6,))), None).device_failed


def test_hidden_states_that_are_no_numbers_fail_their_sequence(last_shard: Shard) -> None:
    executor = StepExecutor(last_shard, "CPU")
    tensor = np.full((1, HIDDEN), np.nan, np.float32)
    outcome = executor.run(compute(Entry(1, 0, (0,), 1, GREEDY)), tensor)
    assert "not numbers" in outcome.failed[1]
    assert not outcome.device_failed
    assert outcome.sampled == []


def test_the_kv_precision_is_always_said() -> None:
    options = DeviceOptions("CPU", "f16", threads=2, inference_precision="f32", dynamic_quantization_group_size=0)
    assert options.properties() == {
        "PERFORMANCE_HINT": "LATENCY",
        "KV_CACHE_PRECISION": ov.Type.f16,
        "INFERENCE_NUM_THREADS": 2,
        "INFERENCE_PRECISION_HINT": "f32",
        "EXECUTION_MODE_HINT": "ACCURACY",
        "KEY_CACHE_PRECISION": ov.Type.f16,
        "VALUE_CACHE_PRECISION": ov.Type.f16,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    }
    assert set(DeviceOptions("GPU", "u8", threads=2).properties()) == {"PERFORMANCE_HINT", "KV_CACHE_PRECISION"}


LoadStage = Callable[[int, str], Shard]


@pytest.fixture
def load(smollm2_two_stages: Path) -> LoadStage:
    return lambda stage, device: load_shard(smollm2_two_stages, stage, DeviceOptions(device, "f32", threads=1))


def test_a_real_shard_is_compiled_with_the_precision_that_was_asked_for(load: LoadStage) -> None:
    shard = load(1, "CPU")
    assert shard.compiled.get_property("KV_CACHE_PRECISION") == ov.Type.f32
    assert set(shard.inputs) == {"inputs_embeds", "attention_mask", "position_ids", "beam_idx", "sampled_positions"}
    assert shard.is_last


@pytest.mark.parametrize("precision", ["f32", "f16", "u8"])
def test_exact_inference_leaves_the_kv_precision_alone(smollm2_two_stages: Path, precision: KvPrecision) -> None:
    """The CPU plugin's accuracy mode would store f32 and go on saying what it was asked for."""
    options = DeviceOptions("CPU", precision, 1, inference_precision="f32", dynamic_quantization_group_size=0)
    compiled = load_shard(smollm2_two_stages, 0, options).compiled
    expected = {"f32": ov.Type.f32, "f16": ov.Type.f16, "u8": ov.Type.u8}[precision]
    for name in ("KV_CACHE_PRECISION", "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION"):
        assert compiled.get_property(name) == expected


def test_a_stage_that_is_not_there_is_named(load: LoadStage) -> None:
    with pytest.raises(ModelError, match="there is no stage 5"):
        load(5, "CPU")


def test_a_device_that_is_not_there_is_named(load: LoadStage) -> None:
    with pytest.raises(ModelError, match=r"The device GPU\.7 does not take stage 0"):
        load(0, "GPU.7")


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a shard folder"):
        load_shard(tmp_path, 0, DeviceOptions("CPU", "f16"))
