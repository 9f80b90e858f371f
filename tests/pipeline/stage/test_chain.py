"""Two real stages over real CURVE sockets, driven by a small gateway that lives in this file."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import psutil
import pytest
import zmq

from fleet.codec import MAX_TENSOR_BYTES, PROTOCOL_VERSION, Decoder, TensorHeader, encode
from fleet.errors import ModelError
from fleet.gateway_messages import Sampling
from fleet.identity import Identity
from fleet.node import PeerAddress
from fleet.socket_monitor import SocketMonitor
from fleet.sockets import curve_client_socket, pick_address
from pipeline.local import LocalPipeline
from pipeline.messages import (
    Attach,
    Attached,
    Entry,
    Fault,
    GatewayBoundMessage,
    Ping,
    Pong,
    Release,
    Sampled,
    Step,
    StepResult,
)
from shard_builder import build
from tests.shard_builder.conftest import TinyDecoder

DEADLINE_S = 60.0
NEW_TOKENS = 16
PROMPTS = {1: (1, 504, 3575, 282, 4649, 314), 2: (1, 4093, 5345, 30, 378, 2, 198, 1, 520)}
GREEDY = Sampling()
Generate = Callable[[Sequence[int], int], list[int]]
MutatedMessages = Callable[[Sequence[bytes], int], Sequence[list[bytes]]]


class SmallGateway:
    """Speaks to the stages as a gateway does: one DEALER each, one epoch at a time."""

    epochs = itertools.count(1)

    def __init__(self, stages: Sequence[PeerAddress], identity: Identity) -> None:
        self.stages = stages
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets = []
        self._poller = zmq.Poller()
        self._decoder: Decoder[GatewayBoundMessage] = Decoder(GatewayBoundMessage)
        self._steps = itertools.count()
        self.epoch = 0
        for stage in stages:
            socket = curve_client_socket(
                self._context, zmq.DEALER, identity, stage.public_key, max_message_bytes=MAX_TENSOR_BYTES
            )
            socket.connect(pick_address(stage))
            self.sockets.append(socket)
            self._poller.register(socket, zmq.POLLIN)

    def close(self) -> None:
        self._context.destroy(0)

    def send(self, stage: int, message: Any) -> None:
        self.sockets[stage].send(encode(message))

    def receive(self, timeout_s: float = DEADLINE_S) -> tuple[int, GatewayBoundMessage]:
        """The next message of any stage."""
        ready = self._poller.poll(timeout_s * 1e3)
        assert ready, f"no stage said anything for {timeout_s} s"
        socket = ready[0][0]
        return self.sockets.index(socket), self._decoder.decode(socket.recv())

    def attach(self) -> list[GatewayBoundMessage]:
        """A new epoch on all stages; what they answered."""
        self.epoch = next(self.epochs)
        for number in range(len(self.stages)):
            following = self.stages[number + 1] if number + 1 < len(self.stages) else None
            self.send(number, Attach(PROTOCOL_VERSION, self.epoch, number, following))
        return [self.receive()[1] for _ in self.stages]

    def step(self, *entries: Entry) -> int:
        number = next(self._steps)
        self.send(0, Step(self.epoch, number, entries))
        return number

    def result(self) -> StepResult:
        _, message = self.receive()
        assert isinstance(message, StepResult), message
        return message

    def run(self, *entries: Entry) -> tuple[Sampled, ...]:
        number = self.step(*entries)
        result = self.result()
        assert (result.epoch, result.step) == (self.epoch, number)
        assert [timing.stage for timing in result.timings] == list(range(len(self.stages)))
        return result.sampled

    def generate(self, prompt: Sequence[int], count: int, sequence: int = 1, sampling: Sampling = GREEDY) -> list[int]:
        tokens: list[int] = []
        start, new = 0, tuple(prompt)
        while len(tokens) < count:
            [sampled] = self.run(Entry(sequence, start, new, 1, None if start else sampling))
            start += len(new)
            new = sampled.tokens
            tokens += new
        self.send(0, Release(self.epoch, (sequence,)))
        return tokens

    def held(self, stage: int) -> int:
        """Sequences that hold KV cache in a stage. The answer comes behind all that was sent to it before."""
        self.send(stage, Ping(99))
        _, pong = self.receive()
        assert isinstance(pong, Pong), pong
        return pong.sequences


@pytest.fixture(scope="module")
def pipeline(smollm2_two_stages: Path) -> Iterator[LocalPipeline]:
    with LocalPipeline(smollm2_two_stages, kv_precision="f32", exact=True, threads=1) as running:
        yield running


@pytest.fixture
def gateway(pipeline: LocalPipeline) -> Iterator[SmallGateway]:
    small = SmallGateway(pipeline.stage_addresses, pipeline.identity)
    for message in small.attach():
        assert isinstance(message, Attached), message
    yield small
    small.close()


@pytest.fixture(scope="module")
def whole(smollm2_ir: Path) -> Generate:
    return whole_model(smollm2_ir)


def whole_model(folder: Path) -> Generate:
    """Greedy text of a whole model, as plain OpenVINO gives it."""
    exact = {
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_PRECISION_HINT": "f32",
        "EXECUTION_MODE_HINT": "ACCURACY",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "INFERENCE_NUM_THREADS": 1,
    }
    compiled = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", exact)

    def generate(prompt: Sequence[int], count: int) -> list[int]:
        request = compiled.create_infer_request()
        tokens: list[int] = []
        start, new = 0, list(prompt)
        while len(tokens) < count:
            end = start + len(new)
            logits = request.infer(
                {
                    "input_ids": np.array([new]),
                    "attention_mask": np.ones((1, end), np.int64),
                    "position_ids": np.arange(start, end)[None],
                    "beam_idx": np.zeros(1, np.int32),
                }
            )["logits"]
            start, new = end, [int(logits[0, -1].argmax())]
            tokens += new
        return tokens

    return generate


def test_greedy_text_is_that_of_the_whole_model(gateway: SmallGateway, whole: Generate) -> None:
    for prompt in PROMPTS.values():
        assert gateway.generate(prompt, NEW_TOKENS) == whole(prompt, NEW_TOKENS)


def test_cuts_that_several_tensors_cross_are_served(tmp_path: Path) -> None:
    model = TinyDecoder(layers=4, per_layer_inputs=True, shared_cache=True).write(tmp_path / "model")
    manifest = build(model, tmp_path / "shards", cuts=[1, 3], kv_precision="f32", check="none")
    assert all(len(stage.cut_tensors) > 1 for stage in manifest.stages[1:])
    generate = whole_model(model)
    with LocalPipeline(tmp_path / "shards", kv_precision="f32", exact=True, threads=1) as running:
        small = SmallGateway(running.stage_addresses, running.identity)
        try:
            assert all(isinstance(message, Attached) for message in small.attach())
            for prompt in ((5, 60, 17), (1, 2, 3, 4, 5, 6, 7)):
                assert small.generate(prompt, NEW_TOKENS) == generate(prompt, NEW_TOKENS)
        finally:
            small.close()


def test_a_prompt_in_chunks_gives_the_same_text(gateway: SmallGateway, whole: Generate) -> None:
    prompt = PROMPTS[2]
    # Both chunks are under way at once.
    gateway.step(Entry(1, 0, prompt[:4], 0, GREEDY))
    gateway.step(Entry(1, 4, prompt[4:], 1))
    assert gateway.result().sampled == ()
    [sampled] = gateway.result().sampled
    assert list(sampled.tokens) == whole(prompt, 1)


def test_interleaved_sequences_give_what_each_gives_alone(gateway: SmallGateway) -> None:
    alone = {number: gateway.generate(prompt, NEW_TOKENS) for number, prompt in PROMPTS.items()}
    tokens: dict[int, list[int]] = {number: [] for number in PROMPTS}
    start = dict.fromkeys(PROMPTS, 0)
    new = dict(PROMPTS)
    for turn in range(NEW_TOKENS):
        entries = [
            Entry(number, start[number], new[number], 1, None if start[number] else GREEDY) for number in PROMPTS
        ]
        if turn % 2:
            # Two steps in flight, one sequence each, in place of one step of two.
            for entry in entries:
                gateway.step(entry)
            sampled = [gateway.result().sampled[0] for _ in entries]
        else:
            sampled = list(gateway.run(*entries))
        for one in sampled:
            start[one.sequence] += len(new[one.sequence])
            new[one.sequence] = one.tokens
            tokens[one.sequence] += one.tokens
    assert tokens == alone


def test_several_positions_are_sampled_in_one_step(gateway: SmallGateway) -> None:
    answer = gateway.generate(PROMPTS[1], 5)
    prompt = (*PROMPTS[1], *answer[:4])
    [sampled] = gateway.run(Entry(3, 0, prompt, 5, GREEDY))
    assert list(sampled.tokens) == answer


def test_a_seed_gives_the_same_text_again_and_log_probabilities_come_when_asked(gateway: SmallGateway) -> None:
    sampling = Sampling(temperature=1.5, top_p=0.95, seed=11, top_logprobs=3)
    texts = [gateway.generate(PROMPTS[1], 8, sequence, sampling) for sequence in (5, 6)]
    assert texts[0] == texts[1]
    assert texts[0] != gateway.generate(PROMPTS[1], 8, 7)
    [sampled] = gateway.run(Entry(8, 0, PROMPTS[1], 1, Sampling(top_logprobs=3)))
    [(chosen, top)] = sampled.logprobs
    assert top[0] == (sampled.tokens[0], chosen)
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
    assert len(top) == 3


def test_release_frees_in_every_stage(gateway: SmallGateway) -> None:
    gateway.run(*(Entry(number, 0, (1, 2), 1, GREEDY) for number in range(10)))
    assert [gateway.held(stage) for stage in (0, 1)] == [10, 10]
    gateway.send(0, Release(gateway.epoch, tuple(range(9))))
    gateway.run(Entry(9, 2, (3,), 1))
    assert [gateway.held(stage) for stage in (0, 1)] == [1, 1]


def test_a_new_epoch_forgets_the_old_one(gateway: SmallGateway) -> None:
    gateway.run(Entry(1, 0, (1, 2), 1, GREEDY))
    old = gateway.epoch
    assert all(isinstance(message, Attached) for message in gateway.attach())
    assert [gateway.held(stage) for stage in (0, 1)] == [0, 0]
    gateway.send(0, Step(old, 77, (Entry(1, 2, (3,), 1),)))
    # Nothing but the answer to the next step comes.
    gateway.run(Entry(1, 0, (1, 2), 1, GREEDY))


def test_a_second_gateway_needs_a_higher_epoch_and_then_takes_over(
    pipeline: LocalPipeline, gateway: SmallGateway
) -> None:
    second = SmallGateway(pipeline.stage_addresses, pipeline.identity)
    try:
        second.send(1, Attach(PROTOCOL_VERSION, gateway.epoch, 1, None))
        _, fault = second.receive()
        assert isinstance(fault, Fault)
        assert fault.epoch == gateway.epoch
        second.attach()
        for _ in gateway.stages:
            _, fault = gateway.receive()
            assert isinstance(fault, Fault)
            assert fault.epoch_over
        assert len(second.generate(PROMPTS[1], 2)) == 2
    finally:
        second.close()


def test_a_wrong_entry_fails_alone(gateway: SmallGateway) -> None:
    gateway.step(Entry(1, 0, (1, 2), 1, GREEDY), Entry(2, 5, (1,), 1), Entry(3, 0, (10**6,), 1, GREEDY))
    messages = [gateway.receive()[1] for _ in range(3)]
    faults = [message for message in messages if isinstance(message, Fault)]
    [result] = [message for message in messages if isinstance(message, StepResult)]
    assert sorted(fault.sequences for fault in faults) == [(2,), (3,)]
    assert [sampled.sequence for sampled in result.sampled] == [1]


def test_ten_thousand_mutated_messages_change_nothing(
    pipeline: LocalPipeline, gateway: SmallGateway, mutated_messages: MutatedMessages
) -> None:
    good = [
        encode(Step(gateway.epoch, 1, (Entry(1, 0, (1, 2), 1, GREEDY),))),
        encode(Step(gateway.epoch, 2, (Entry(1, 0, (1, 2)),), TensorHeader("f32", (2, 576)))),
        encode(Release(gateway.epoch, (1, 2))),
        encode(Ping(1)),
        # Of an old epoch, so that hardly any that is still whole takes the stage over.
        encode(Attach(PROTOCOL_VERSION, 0, 0, pipeline.stage_addresses[1])),
    ]
    hidden = bytes(2 * 576 * 4)
    processes = [psutil.Process(child.pid) for child in pipeline.stage_processes]
    before = [process.memory_info().rss for process in processes]
    other = SmallGateway(pipeline.stage_addresses, pipeline.identity)
    try:
        for number, frames in enumerate(mutated_messages(good, 6)):
            for socket in other.sockets:
                socket.send_multipart([*frames, hidden] if number % 3 == 0 else frames)
        for stage in (0, 1):
            other.send(stage, Ping(2**40))
        heard = 0
        while heard < 2:
            message = other.receive()[1]
            heard += isinstance(message, Pong) and message.number == 2**40
    finally:
        other.close()
    # Some of it was a step that stage 1 could read, and was answered with a Fault; some may have begun an epoch.
    SmallGateway.epochs = itertools.count(2**61)
    answers = gateway.attach()
    while sum(isinstance(message, Attached) for message in answers) < len(gateway.stages):
        answers.append(gateway.receive()[1])
    assert len(gateway.generate(PROMPTS[1], 2)) == 2
    for process, size in zip(processes, before, strict=True):
        assert process.memory_info().rss < size + (64 << 20)


def test_a_stranger_gets_nothing(pipeline: LocalPipeline, gateway: SmallGateway) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stage = pipeline.stage_addresses[0]
    stranger = curve_client_socket(context, zmq.DEALER, Identity.generate(), stage.public_key)
    monitor = SocketMonitor(stranger)
    try:
        stranger.connect(pick_address(stage))
        deadline = time.monotonic() + DEADLINE_S
        kinds = set()
        while "refused" not in kinds:
            assert time.monotonic() < deadline
            if monitor.socket.poll(100) and (event := monitor.read()) is not None:
                kinds.add(event.kind)
        assert "ready" not in kinds
        with pytest.raises(zmq.Again):
            stranger.send(encode(Ping(1)), zmq.NOBLOCK)
    finally:
        monitor.close()
        context.destroy(0)
    # One that speaks no CURVE at all.
    context = zmq.Context()
    try:
        plain = context.socket(zmq.DEALER)
        plain.connect(pick_address(stage))
        plain.send(encode(Ping(1)))
        assert not plain.poll(500)
    finally:
        context.destroy(0)
    assert len(gateway.generate(PROMPTS[1], 2)) == 2


def test_an_unreachable_next_stage_is_named(pipeline: LocalPipeline, gateway: SmallGateway) -> None:
    nobody = PeerAddress(node_name="PC-9", addresses=("127.0.0.1",), port=1, public_key=Identity.generate().public_key)
    impostor = PeerAddress(
        node_name="PC-8",
        addresses=("127.0.0.1",),
        port=pipeline.stage_addresses[1].port,
        public_key=Identity.generate().public_key,
    )
    for peer in (nobody, impostor):
        gateway.send(0, Attach(PROTOCOL_VERSION, next(SmallGateway.epochs), 0, peer))
        _, fault = gateway.receive()
        assert isinstance(fault, Fault)
        assert fault.epoch_over
        assert peer.node_name in fault.message
    assert all(isinstance(message, Attached) for message in gateway.attach())


@pytest.mark.parametrize("key", [" " * 40, "#" * 40])
def test_a_next_stage_with_a_key_that_is_none_ends_the_epoch_and_not_the_stage(
    pipeline: LocalPipeline, gateway: SmallGateway, key: str
) -> None:
    following = pipeline.stage_addresses[1]
    nobody = PeerAddress(following.node_name, following.addresses, following.port, key)
    gateway.send(0, Attach(PROTOCOL_VERSION, next(gateway.epochs), 0, nobody))
    _, fault = gateway.receive()
    assert isinstance(fault, Fault)
    assert fault.epoch_over
    assert "not a CURVE key" in fault.message
    gateway.attach()
    assert len(gateway.generate(PROMPTS[1], 2)) == 2


def test_a_killed_last_stage_is_reported_and_the_first_survives(smollm2_two_stages: Path) -> None:
    with LocalPipeline(smollm2_two_stages, exact=True, threads=1) as pipeline:
        gateway = SmallGateway(pipeline.stage_addresses, pipeline.identity)
        try:
            gateway.attach()
            gateway.run(Entry(1, 0, (1, 2), 1, GREEDY))
            gateway.step(Entry(2, 0, (5,) * 600, 1, GREEDY))
            pipeline.stage_processes[1].kill()
            stage, fault = gateway.receive()
            assert stage == 0
            assert isinstance(fault, Fault)
            assert fault.epoch_over
            assert set(fault.sequences) <= {1, 2}
            assert "stage-1" in fault.message
            gateway.step(Entry(3, 0, (1, 2), 1, GREEDY))
            while not (isinstance(fault, Fault) and 3 in fault.sequences):
                _, fault = gateway.receive()
            assert gateway.held(0) == 0
        finally:
            gateway.close()


def test_a_shard_that_is_not_whole_is_refused_in_words(smollm2_two_stages: Path, tmp_path: Path) -> None:
    for file in smollm2_two_stages.iterdir():
        if file.is_file() and file.name != "stage-1.bin":
            (tmp_path / file.name).hardlink_to(file)
    (tmp_path / "stage-1.bin").write_bytes(b"short")
    with pytest.raises(ModelError, match=r"Stage 1 cannot start: .*stage-1\.bin has 5 bytes instead of"):
        LocalPipeline(tmp_path).start()
