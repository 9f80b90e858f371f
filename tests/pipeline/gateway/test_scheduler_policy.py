"""What the scheduler sends when, step by step."""

from __future__ import annotations

import pytest

from fleet.gateway_messages import Delta, Failed, Finished, Sampling
from pipeline.gateway.clients import MAX_CLIENTS, Clients
from pipeline.gateway.instructions import (
    BeginEpoch,
    ChainClosed,
    ChainOpened,
    Instruction,
    SendRelease,
    SendStep,
    ToClient,
)
from pipeline.gateway.scheduler import LAST_RETRY_S, Scheduler, SchedulerLimits
from pipeline.gateway.sequence import LogprobsOfTokens, Request, RequestKey
from pipeline.gateway.step_costs import LARGEST_SHARE, MIN_CHUNK_TOKENS, StepCosts
from pipeline.messages import Fault, Sampled, StageTiming, Step, StepResult

STOP_ID = 2
TOKEN = 7


class SilentText:
    """Answer text without text."""

    stopped = False

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def describe(self, tokens: object, logprobs: LogprobsOfTokens) -> tuple[()]:
        return ()


class Bench:
    """A scheduler with an open chain, and the steps that it has sent."""

    def __init__(
        self, stages: int = 2, *, chunk: int = 16, max_sequences: int = 32, capacity: int | None = None, switch: int = 0
    ) -> None:
        limits = SchedulerLimits(
            stages, 1000, max_sequences, chunk, kv_capacity_tokens=capacity, step_switch_tokens=switch
        )
        self.scheduler = Scheduler(limits, frozenset([STOP_ID]), first_epoch=1)
        self.steps: list[Step] = []
        self.released: list[int] = []
        self.told: list[object] = []
        self.numbers = 0
        self.take(self.scheduler.stages_connected(0.0))
        self.take(self.scheduler.all_attached(1, 0.0))
        self.answer()

    def take(self, instructions: list[Instruction]) -> list[Instruction]:
        for instruction in instructions:
            match instruction:
                case SendStep(step):
                    self.steps.append(step)
                case SendRelease(release):
                    self.released += release.sequences
                case ToClient(_, message):
                    self.told.append(message)
        return instructions

    def submit(self, prompt: int = 4, max_tokens: int | None = None) -> RequestKey:
        self.numbers += 1
        key = RequestKey(b"client", self.numbers)
        request = Request(key, (TOKEN,) * prompt, Sampling(), max_tokens, SilentText(), 0.0)
        self.take(self.scheduler.submit(request, 0.0))
        return key

    def answer(self, token: int = TOKEN, ms: float = 1.0) -> Step:
        """The oldest step comes through: ``ms`` for each token of it, on every stage."""
        step = self.steps.pop(0)
        sampled = tuple(Sampled(entry.sequence, (token,)) for entry in step.entries if entry.sampled_positions)
        tokens = sum(len(entry.tokens) for entry in step.entries)
        timings = tuple(StageTiming(stage, tokens * ms) for stage in range(self.scheduler.limits.stages))
        self.take(self.scheduler.result(StepResult(step.epoch, step.step, sampled, timings), 1.0))
        return step


def test_as_many_steps_as_stages_for_as_many_sequences() -> None:
    bench = Bench(stages=3)
    for sequences in (1, 2, 3):
        bench.submit()
        for _ in range(10):
            assert len(bench.steps) == sequences
            assert all(len(step.entries) == 1 for step in bench.steps)
            bench.answer()


def test_one_step_more_for_more_sequences_and_all_are_spread_over_them() -> None:
    bench = Bench(stages=2)
    for _ in range(8):
        bench.submit()
    for _ in range(30):
        bench.answer()
        assert len(bench.steps) == 3
    sizes = sorted(len(step.entries) for step in bench.steps)
    assert sum(sizes) == 8
    assert sizes == [2, 3, 3]


def test_a_long_prompt_fills_the_stages_by_itself_with_chunks_behind_each_other() -> None:
    bench = Bench(stages=2)
    bench.submit(prompt=60)
    assert [(step.entries[0].start, len(step.entries[0].tokens)) for step in bench.steps] == [(0, 16), (16, 16)]
    bench.answer()
    bench.answer()
    assert [step.entries[0].sampled_positions for step in bench.steps] == [0, 1]
    bench.answer()
    bench.answer()
    assert [(step.entries[0].start, step.entries[0].tokens) for step in bench.steps] == [(60, (TOKEN,))]


@pytest.mark.parametrize("readers", [0, 1, 3])
@pytest.mark.parametrize("prompt", [63, 64, 65, 66, 200])
def test_no_prompt_lies_on_both_sides_of_a_switch_of_the_rotary_frequencies(prompt: int, readers: int) -> None:
    bench = Bench(stages=2, switch=64)
    for _ in range(readers):
        bench.submit()
    for _ in range(10 if readers else 0):
        bench.answer()
    bench.submit(prompt=prompt)
    bench.submit(prompt=prompt)
    steps: dict[int, list[tuple[int, int]]] = {}
    for _ in range(200):
        for entry in bench.answer().entries:
            if entry.start < prompt:
                steps.setdefault(entry.sequence, []).append((entry.start, entry.start + len(entry.tokens)))
    longer = [spans for spans in steps.values() if spans[0][0] == 0]
    assert len(longer) == 2
    for spans in longer:
        sides = {end > 64 for _, end in spans}
        assert sides == {prompt > 64}


def test_chunks_and_decode_steps_take_turns() -> None:
    bench = Bench(stages=2)
    bench.submit()
    for _ in range(3):
        bench.answer()
    bench.submit(prompt=200)
    kinds = []
    for _ in range(12):
        step = bench.answer()
        kinds.append("decode" if step.entries[0].sampled_positions else "chunk")
        assert len(bench.steps) == 2
    assert kinds.count("decode") == kinds.count("chunk") == 6


def test_prompts_take_turns_with_each_other() -> None:
    bench = Bench(stages=1)
    bench.submit(prompt=160)
    bench.submit(prompt=20)
    order = [bench.answer().entries[0].sequence for _ in range(6)]
    long, short = min(order), max(order)
    assert long != short
    # The short prompt is through after two chunks, though the long one came first.
    assert order[:5].count(short) == 2


def test_a_sequence_that_waits_for_a_slot_is_cancelled_for_good() -> None:
    bench = Bench(stages=1)
    bench.submit()
    key = bench.submit()
    bench.answer()
    bench.submit(prompt=100)
    waiting = bench.answer().entries[0].sequence
    assert all(entry.sequence != waiting for step in bench.steps for entry in step.entries)
    bench.take(bench.scheduler.cancel(key, 1.0))
    assert bench.released[-1] == waiting
    for _ in range(12):
        assert all(entry.sequence != waiting for entry in bench.answer().entries)


def test_a_stop_id_ends_an_answer_and_is_not_part_of_it() -> None:
    bench = Bench()
    bench.submit()
    bench.answer()
    bench.answer(token=STOP_ID)
    finished = bench.told[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.completion_tokens) == ("stop", 1)
    assert [message.tokens for message in bench.told if isinstance(message, Delta)] == [(TOKEN,)]
    assert bench.steps == []
    assert bench.scheduler.running == 0


def test_requests_beyond_the_places_or_the_memory_wait_in_their_order() -> None:
    bench = Bench(max_sequences=2)
    for _ in range(3):
        bench.submit(max_tokens=1)
    assert (bench.scheduler.running, bench.scheduler.waiting) == (2, 1)
    bench.answer()
    assert (bench.scheduler.running, bench.scheduler.waiting) == (2, 0)
    bench = Bench(capacity=100)
    bench.submit(prompt=40, max_tokens=30)
    bench.submit(prompt=40, max_tokens=30)
    bench.submit(prompt=1, max_tokens=1)
    assert (bench.scheduler.running, bench.scheduler.waiting) == (1, 2)
    bench.submit(prompt=90, max_tokens=30)
    refused = bench.told[-1]
    assert isinstance(refused, Failed)
    assert refused.code == "context_full"
    assert "120/100" in refused.message


def test_a_stage_that_refuses_an_epoch_is_asked_again_with_a_higher_one() -> None:
    scheduler = Scheduler(SchedulerLimits(2, 100, 4, 16), frozenset(), first_epoch=10)
    assert scheduler.stages_connected(0.0) == [BeginEpoch(10)]
    fault = Fault(500, 1, "bob", (), "Stage 1 on bob serves epoch 500 already.", epoch_over=True)
    assert scheduler.fault(fault, 0.0) == [ChainClosed("bob", fault.message)]
    assert scheduler.tick(0.0) == []
    assert scheduler.tick(1.0) == [BeginEpoch(501)]
    assert scheduler.all_attached(10, 1.0) == []
    (probe,) = scheduler.all_attached(501, 1.0)
    assert isinstance(probe, SendStep)
    sequence = probe.step.entries[0].sequence
    opened = scheduler.result(StepResult(501, probe.step.step, (Sampled(sequence, (1,)),), ()), 1.0)
    assert opened[0] == ChainOpened()
    assert scheduler.state == "open"


def test_retries_grow_rarer_while_the_chain_does_not_open() -> None:
    scheduler = Scheduler(SchedulerLimits(1, 100, 4, 16), frozenset(), first_epoch=1)
    scheduler.stages_connected(0.0)
    waits_s, now_s, lost_s = [], 0.0, 0.0
    for _ in range(8):
        lost_s = now_s
        scheduler.stage_lost("bob", "no", now_s, connected=True)
        while not scheduler.tick(now_s):
            now_s += 0.05
        waits_s.append(now_s - lost_s)
    assert waits_s == sorted(waits_s)
    assert waits_s[0] < 1
    assert LAST_RETRY_S <= waits_s[-1] < LAST_RETRY_S + 0.2


def test_stages_that_fall_silent_with_a_step_are_given_up() -> None:
    bench = Bench()
    bench.submit()
    deadline_s = bench.scheduler.limits.step_deadline_s
    bench.take(bench.scheduler.tick(deadline_s))
    assert bench.scheduler.running == 1
    bench.take(bench.scheduler.tick(deadline_s + 3))
    failed = bench.told[-1]
    assert isinstance(failed, Failed)
    assert failed.code == "stage_lost"


def test_chunks_are_as_long_as_readers_can_bear() -> None:
    costs = StepCosts(stages=2)
    assert costs.chunk_tokens(256, decoding=0, prefilling=1) == 256
    assert MIN_CHUNK_TOKENS <= costs.chunk_tokens(256, decoding=1, prefilling=1) < 256
    for _ in range(50):
        costs.record((1,), [StageTiming(0, 9.0), StageTiming(1, 10.0)])
        costs.record((101,), [StageTiming(0, 9.0 + 100 * 1.0), StageTiming(1, 10.0 + 100 * 1.0)])
    assert costs.decode_ms[1] == 10.0
    # 27 ms, of which one step's 10 ms are for the first token and 1 ms for each of the others.
    assert costs.chunk_tokens(256, decoding=1, prefilling=1) == 18
    assert costs.chunk_tokens(256, decoding=1, prefilling=4) > 2 * 18
    assert costs.chunk_tokens(256, decoding=1, prefilling=50) == costs.chunk_tokens(256, 1, LARGEST_SHARE)
    assert costs.chunk_tokens(12, decoding=1, prefilling=50) == 12


def test_clients_greet_first_and_are_missed_when_silent() -> None:
    clients = Clients()
    assert not clients.hear(b"a", 0.0)
    assert not clients.greet(b"a", 99, 0.0)
    assert not clients.hear(b"a", 0.0)
    assert clients.greet(b"a", 1, 0.0)
    assert clients.greet(b"b", 1, 0.0)
    assert clients.hear(b"a", 15.0)
    assert clients.silent([b"a", b"b"], 21.0) == [b"b"]
    clients.forget(b"a")
    assert not clients.hear(b"a", 22.0)
    for number in range(MAX_CLIENTS):
        clients.greet(f"{number}".encode(), 1, 30.0)
    assert not clients.hear(b"b", 31.0)
    assert clients.hear(b"0", 31.0)
