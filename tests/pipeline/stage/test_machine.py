"""The stage's state machine: single rules, and a model-based test of arbitrary message orders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleet.codec import PROTOCOL_VERSION
from fleet.gateway_messages import Sampling
from fleet.node import PeerAddress
from pipeline.messages import Attach, Attached, Entry, Fault, Ping, Pong, Release, Sampled, Step, StepResult
from pipeline.stage.machine import (
    MAX_SEQUENCES,
    Compute,
    Connect,
    Disconnect,
    Drop,
    Free,
    FreeAll,
    Instruction,
    PassOn,
    Send,
    StageFacts,
    StageMachine,
)

GATEWAY = b"gateway"
OTHER = b"other"
HIDDEN, WIDER = 8, 12
NEXT = PeerAddress(node_name="PC-2", addresses=("192.0.2.2",), port=5000, public_key="k" * 40)
FIRST = StageFacts(
    node="PC-1",
    device="CPU",
    model_id="model",
    stage=0,
    stages=3,
    first_layer=0,
    end_layer=4,
    input_width=0,
    output_width=HIDDEN,
    vocabulary_size=100,
    context_tokens=64,
)
MIDDLE = replace(FIRST, stage=1, first_layer=4, end_layer=8, input_width=HIDDEN, output_width=WIDER)
LAST = replace(FIRST, stage=2, first_layer=8, end_layer=12, input_width=WIDER, output_width=0)
GREEDY = Sampling()


def attach(machine: StageMachine, epoch: int = 1, connection: bytes = GATEWAY) -> list[Instruction]:
    following = None if machine.facts.is_last else NEXT
    done = machine.attach(connection, Attach(PROTOCOL_VERSION, epoch, machine.facts.stage, following))
    if any(isinstance(instruction, Connect) for instruction in done):
        done += machine.next_ready()
    return done


def shape_for(machine: StageMachine, step: Step) -> tuple[int, ...] | None:
    width = machine.facts.input_width
    return (sum(len(entry.tokens) for entry in step.entries), width) if width else None


def run(machine: StageMachine, step: Step, connection: bytes = GATEWAY) -> list[Instruction]:
    return machine.step(connection, step, shape_for(machine, step))


def prompt(sequence: int, *tokens: int, sampled: int = 1) -> Entry:
    return Entry(sequence, 0, tokens or (1, 2, 3), sampled, GREEDY)


def faults(instructions: list[Instruction]) -> list[Fault]:
    return [
        instruction.message
        for instruction in instructions
        if isinstance(instruction, Send) and isinstance(instruction.message, Fault)
    ]


@pytest.fixture
def first() -> StageMachine:
    machine = StageMachine(FIRST)
    attach(machine)
    return machine


@pytest.fixture
def last() -> StageMachine:
    machine = StageMachine(LAST)
    attach(machine)
    return machine


def test_attaching_connects_to_the_next_stage_and_then_says_so() -> None:
    machine = StageMachine(FIRST)
    begun = machine.attach(GATEWAY, Attach(PROTOCOL_VERSION, 4, 0, NEXT))
    assert begun == [FreeAll(), Connect(NEXT)]
    assert machine.next_ready() == [
        Send(GATEWAY, Attached(PROTOCOL_VERSION, 4, 0, "PC-1", "CPU", 0, 4, "model")),
    ]


def test_the_last_stage_is_attached_at_once() -> None:
    done = attach(StageMachine(LAST))
    assert isinstance(done[0], FreeAll)
    assert isinstance(done[1], Send)
    assert isinstance(done[1].message, Attached)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Attach(PROTOCOL_VERSION + 1, 9, 0, NEXT), "version"),
        (Attach(PROTOCOL_VERSION, 9, 1, NEXT), "runs stage 0, not stage 1"),
        (Attach(PROTOCOL_VERSION, 9, 0, None), "needs the address of the next stage"),
        (Attach(PROTOCOL_VERSION, 0, 0, NEXT), "serves epoch 1 already"),
    ],
)
def test_an_attach_that_does_not_fit_is_refused_and_changes_nothing(
    first: StageMachine, message: Attach, words: str
) -> None:
    run(first, Step(1, 1, (prompt(7),)))
    refused = first.attach(OTHER, message)
    [fault] = faults(refused)
    assert words in fault.message
    assert fault.epoch_over
    assert [instruction.connection for instruction in refused if isinstance(instruction, Send)] == [OTHER]
    assert (first.epoch, first.gateway, first.stored) == (1, GATEWAY, {7: 3})


def test_a_new_epoch_frees_everything_and_tells_the_gateway_that_was_there(first: StageMachine) -> None:
    run(first, Step(1, 1, (prompt(7),)))
    done = attach(first, epoch=2, connection=OTHER)
    assert FreeAll() in done
    assert first.stored == {}
    [fault] = faults(done)
    assert fault.sequences == (7,)
    assert fault.epoch == 1
    assert "taken over" in fault.message


def test_steps_of_another_epoch_are_dropped(first: StageMachine) -> None:
    for epoch in (0, 2):
        [dropped] = run(first, Step(epoch, 1, (prompt(7),)))
        assert isinstance(dropped, Drop)
    assert first.stored == {}


def test_the_first_stage_listens_to_the_attached_gateway_only(first: StageMachine) -> None:
    [dropped] = run(first, Step(1, 1, (prompt(7),)), OTHER)
    assert isinstance(dropped, Drop)
    [dropped] = first.release(OTHER, Release(1, (7,)))
    assert isinstance(dropped, Drop)


def test_a_step_runs_and_goes_on_with_its_timing(first: StageMachine) -> None:
    step = Step(1, 5, (prompt(7), prompt(8, 4, 5)))
    [compute] = run(first, step)
    assert compute == Compute(1, 5, step.entries, (0, 3))
    assert isinstance(compute, Compute)
    [passed] = first.computed(compute, {}, 2.5)
    assert isinstance(passed, PassOn)
    assert isinstance(passed.message, Step)
    assert passed.message.entries == step.entries
    assert [(timing.stage, timing.compute_ms) for timing in passed.message.timings] == [(0, 2.5)]


def test_the_last_stage_answers_also_when_nothing_was_sampled(last: StageMachine) -> None:
    [compute] = run(last, Step(1, 5, (prompt(7, sampled=0),)))
    assert isinstance(compute, Compute)
    [sent] = last.computed(compute, {}, 1.0)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, StepResult)
    assert (sent.connection, sent.message.step, sent.message.sampled) == (GATEWAY, 5, ())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (Entry(7, 3, (1,), 1), "no token of it is here"),
        (Entry(6, 2, (1,), 1), "but 3 are here"),
        (Entry(6, 4, (1,), 1), "but 3 are here"),
        (Entry(6, 3, (1,), 1, GREEDY), "sampling settings"),
        (Entry(7, 0, (1,), 1), "sampling settings"),
        (Entry(6, 3, (1,), 1, None, 4), "prompt's length"),
        (Entry(7, 0, (1,), 2, GREEDY), "cannot be sampled"),
        (Entry(7, 0, (100,), 1, GREEDY), "not one of the model's 100"),
        (Entry(7, 0, (1,) * 65, 1, GREEDY), "the model takes 64"),
        (Entry(7, 0, (1,), 1, Sampling(logit_bias={100: 1.0})), "logit bias"),
        (Entry(7, 0, (1,), 1, Sampling(logit_bias={5: float("nan")})), "logit bias"),
    ],
)
def test_an_entry_that_does_not_fit_fails_its_sequence_and_no_other(
    first: StageMachine, entry: Entry, words: str
) -> None:
    run(first, Step(1, 1, (prompt(6),)))
    done = run(first, Step(1, 2, (prompt(9, 3), entry)))
    [fault] = faults(done)
    assert fault.sequences == (entry.sequence,)
    assert words in fault.message
    assert "PC-1" in fault.message
    assert not fault.epoch_over
    [compute] = [instruction for instruction in done if isinstance(instruction, Compute)]
    assert [kept.sequence for kept in compute.entries] == [9]
    assert entry.sequence not in first.stored
    # What was under way is dropped without a word, until the sequence is released.
    assert run(first, Step(1, 3, (Entry(entry.sequence, 9, (1,), 1),))) == []
    first.release(GATEWAY, Release(1, (entry.sequence,)))
    assert not faults(run(first, Step(1, 4, (prompt(entry.sequence),))))


def test_two_entries_of_one_sequence_follow_each_other(first: StageMachine) -> None:
    [compute] = run(first, Step(1, 1, (prompt(7, 1, 2, sampled=0), Entry(7, 2, (3,), 1))))
    assert isinstance(compute, Compute)
    assert first.stored == {7: 3}
    done = run(first, Step(1, 2, (Entry(7, 3, (4,), 0), Entry(7, 9, (5,), 1))))
    assert len(faults(done)) == 1
    assert not [instruction for instruction in done if isinstance(instruction, Compute)]
    assert Free((7,)) in done


@pytest.mark.parametrize("shape", [None, (3, HIDDEN + 1), (2, HIDDEN), (3 * HIDDEN,), (1, 3, HIDDEN)])
def test_hidden_states_of_another_shape_fail_the_step(last: StageMachine, shape: tuple[int, ...] | None) -> None:
    done = last.step(GATEWAY, Step(1, 1, (prompt(7),)), shape)
    [fault] = faults(done)
    assert fault.sequences == (7,)
    assert not [instruction for instruction in done if isinstance(instruction, Compute)]


def test_the_first_stage_takes_no_hidden_states(first: StageMachine) -> None:
    [fault] = faults(first.step(GATEWAY, Step(1, 1, (prompt(7),)), (3, HIDDEN)))
    assert "not hidden states" in fault.message


def test_a_step_whose_hidden_states_exceed_a_message_is_refused() -> None:
    machine = StageMachine(replace(FIRST, output_width=16384, context_tokens=0))
    attach(machine)
    [fault] = faults(run(machine, Step(1, 1, (prompt(7, *range(50), *range(50), *([1] * 2000)),))))
    assert "MiB" in fault.message


def test_a_step_of_too_many_tokens_is_refused(first: StageMachine) -> None:
    long = tuple(prompt(number, *([1] * 8192)) for number in range(2))
    [fault] = faults(run(first, Step(1, 1, long)))
    assert fault.sequences == (0, 1)


def test_there_is_a_limit_of_sequences(first: StageMachine) -> None:
    for begin in range(0, MAX_SEQUENCES, 256):
        entries = tuple(prompt(number, 1) for number in range(begin, begin + 256))
        assert not faults(run(first, Step(1, 1, entries)))
    [fault] = faults(run(first, Step(1, 2, (prompt(99_999, 1),))))
    assert "limit" in fault.message


def test_a_device_fault_ends_the_sequence_and_the_others_go_on(first: StageMachine) -> None:
    [compute] = run(first, Step(1, 1, (prompt(7), prompt(8))))
    assert isinstance(compute, Compute)
    done = first.computed(compute, {7: "the device CPU failed"}, 1.0)
    assert faults(done)[0].sequences == (7,)
    [passed] = [instruction.message for instruction in done if isinstance(instruction, PassOn)]
    assert isinstance(passed, Step)
    assert [entry.sequence for entry in passed.entries] == [8]


def test_release_frees_and_goes_down_the_chain(first: StageMachine) -> None:
    run(first, Step(1, 1, (prompt(7),)))
    assert first.release(GATEWAY, Release(1, (7, 8))) == [Free((7,)), PassOn(Release(1, (7, 8)))]
    assert first.stored == {}


def test_a_lost_next_stage_ends_the_epoch_and_is_named(first: StageMachine) -> None:
    run(first, Step(1, 1, (prompt(7),)))
    done = first.next_lost("the connection to the next stage on PC-2 was lost.")
    assert Disconnect() in done
    assert FreeAll() in done
    [fault] = faults(done)
    assert fault.sequences == (7,)
    assert fault.epoch_over
    assert "PC-2" in fault.message
    assert first.next_lost("again") == []
    # Steps that were under way hear the same, so that nobody waits for them.
    [fault] = faults(run(first, Step(1, 2, (prompt(8),))))
    assert (fault.sequences, fault.epoch_over) == ((8,), True)
    assert not faults(attach(first, epoch=2))


def test_a_lost_gateway_ends_the_epoch_without_a_word(first: StageMachine) -> None:
    run(first, Step(1, 1, (prompt(7),)))
    assert first.gateway_lost() == [Disconnect(), FreeAll()]
    assert first.gateway_lost() == []
    assert isinstance(run(first, Step(1, 2, (Entry(7, 3, (1,), 1),)))[0], Drop)


def test_a_step_that_ends_after_its_epoch_goes_nowhere(first: StageMachine) -> None:
    [compute] = run(first, Step(1, 1, (prompt(7),)))
    assert isinstance(compute, Compute)
    attach(first, epoch=2)
    assert isinstance(first.computed(compute, {}, 1.0)[0], Drop)


def test_a_ping_is_answered_to_whom_it_came_from(first: StageMachine) -> None:
    run(first, Step(1, 1, (prompt(7),)))
    assert first.ping(OTHER, Ping(3)) == [Send(OTHER, Pong(3, 1, 1), must_arrive=False)]


numbers = st.integers(0, 5)


class AnyOrder(RuleBasedStateMachine):
    """Messages in any order, against what a KV cache would hold if each instruction were carried out."""

    @initialize(facts=st.sampled_from([FIRST, MIDDLE, LAST]))
    def begin(self, facts: StageFacts) -> None:
        self.machine = StageMachine(replace(facts, context_tokens=40))
        self.cache: dict[int, int] = {}
        self.connected = False

    def carry_out(self, instructions: list[Instruction], fail: frozenset[int] = frozenset()) -> None:
        queue: list[Any] = list(instructions)
        while queue:
            match queue.pop(0):
                case FreeAll():
                    self.cache.clear()
                case Free(sequences):
                    for sequence in sequences:
                        self.cache.pop(sequence, None)
                case Connect():
                    self.connected = True
                    queue[:0] = self.machine.next_ready()
                case Disconnect():
                    self.connected = False
                case PassOn(message):
                    assert self.connected
                    assert message.epoch == self.machine.epoch
                case Compute() as compute:
                    for entry in compute.entries:
                        assert self.cache.get(entry.sequence, 0) == entry.start
                        assert (entry.sampling is not None) == (entry.start == 0)
                        self.cache[entry.sequence] = entry.start + len(entry.tokens)
                    failed = {entry.sequence: "it broke" for entry in compute.entries if entry.sequence in fail}
                    sampled = [
                        Sampled(entry.sequence, (1,)) for entry in compute.entries if entry.sequence not in failed
                    ]
                    queue[:0] = self.machine.computed(compute, failed, 1.0, sampled)
                case Send(_, message):
                    msgspec.msgpack.encode(message)

    @rule(epoch=st.integers(0, 6), connection=st.sampled_from([GATEWAY, OTHER]))
    def attach(self, epoch: int, connection: bytes) -> None:
        following = None if self.machine.facts.is_last else NEXT
        self.carry_out(
            self.machine.attach(connection, Attach(PROTOCOL_VERSION, epoch, self.machine.facts.stage, following))
        )

    @rule(
        epoch=st.integers(0, 6),
        connection=st.sampled_from([GATEWAY, OTHER]),
        wanted=st.lists(st.tuples(numbers, st.integers(1, 9), st.booleans()), min_size=1, max_size=4),
        fail=st.frozensets(numbers, max_size=2),
    )
    def step(self, epoch: int, connection: bytes, wanted: list[tuple[int, int, bool]], fail: frozenset[int]) -> None:
        entries = []
        ends = dict(self.cache)
        for sequence, tokens, right in wanted:
            start = ends.get(sequence, 0) + (0 if right else 2)
            entries.append(Entry(sequence, start, (1,) * tokens, 1, GREEDY if start == 0 else None))
            ends[sequence] = start + tokens
        step = Step(epoch, 1, tuple(entries))
        self.carry_out(self.machine.step(connection, step, shape_for(self.machine, step)), fail)

    @rule(epoch=st.integers(0, 6), sequences=st.lists(numbers, max_size=4))
    def release(self, epoch: int, sequences: list[int]) -> None:
        self.carry_out(self.machine.release(GATEWAY, Release(epoch, tuple(sequences))))

    @rule()
    def lose_gateway(self) -> None:
        self.carry_out(self.machine.gateway_lost())

    @precondition(lambda self: self.connected)
    @rule()
    def lose_next(self) -> None:
        self.carry_out(self.machine.next_lost("PC-2 is gone."))

    @invariant()
    def holds_what_it_says(self) -> None:
        assert self.cache == self.machine.stored


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30)
