"""The scheduler against a simulated chain of stages, driven by hypothesis in any order of events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleet.gateway_messages import Accepted, Delta, Failed, Finished, PrefillProgress, Sampling, TokenLogprob
from pipeline.gateway.instructions import BeginEpoch, ChainClosed, ChainOpened, Instruction, SendRelease, SendStep
from pipeline.gateway.scheduler import Scheduler, SchedulerLimits
from pipeline.gateway.sequence import LogprobsOfTokens, Request, RequestKey
from pipeline.messages import Entry, Fault, Release, Sampled, StageTiming, Step, StepResult

STOP_ID = 0
CONTEXT_TOKENS = 40
CHUNK_TOKENS = 6
MAX_SEQUENCES = 5
KV_CAPACITY_TOKENS = 120
PATIENCE_S = 20.0


def next_token(tokens: Tokens[int]) -> int:
    """What the simulated model says after these tokens: sometimes the stop id."""
    return hash((*tokens[-3:], len(tokens))) % 11


def expected_answer(prompt: Tokens[int], most: int, ignore_stop_ids: bool) -> tuple[list[int], str]:
    """The whole answer and how it ends."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < most:
        token = next_token(tokens)
        if token == STOP_ID and not ignore_stop_ids:
            return tokens[len(prompt) :], "stop"
        tokens.append(token)
    return tokens[len(prompt) :], "length"


class PlainText:
    """Answer text that shows each token as its number, and holds the newest back."""

    def __init__(self) -> None:
        self.held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        ready, self.held = self.held, f"{token} "
        return ready

    def flush(self) -> str:
        ready, self.held = self.held, ""
        return ready

    def describe(self, tokens: Tokens[int], logprobs: LogprobsOfTokens) -> tuple[TokenLogprob, ...]:
        return ()


@dataclass
class SimulatedStage:
    epoch: int = -1
    held: dict[int, list[int]] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    inbox: deque[Step | Release] = field(default_factory=deque)


@dataclass
class Client:
    """What a client knows of one request."""

    prompt: tuple[int, ...]
    most: int
    ignore_stop_ids: bool
    accepted: bool = False
    ended: Finished | Failed | None = None
    gone: bool = False
    cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    prefilled: int = 0


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.clients: dict[RequestKey, Client] = {}
        self.numbers = 0
        self.opened = False
        self.to_gateway: deque[StepResult | Fault] = deque()
        self.begun = 0

    @initialize(stages=st.integers(1, 4))
    def start(self, stages: int) -> None:
        self.stages = [SimulatedStage() for _ in range(stages)]
        limits = SchedulerLimits(
            stages=stages,
            context_tokens=CONTEXT_TOKENS,
            max_sequences=MAX_SEQUENCES,
            prefill_chunk_tokens=CHUNK_TOKENS,
            max_waiting=6,
            kv_capacity_tokens=KV_CAPACITY_TOKENS,
            patience_s=PATIENCE_S,
        )
        self.scheduler = Scheduler(limits, frozenset([STOP_ID]), first_epoch=7)
        self.carry_out(self.scheduler.stages_connected(self.now_s))

    def carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case SendStep(step):
                    assert step.epoch == self.scheduler.epoch
                    self.stages[0].inbox.append(step)
                case SendRelease(release):
                    assert release.epoch == self.scheduler.epoch
                    self.stages[0].inbox.append(release)
                case BeginEpoch(epoch):
                    assert all(epoch > stage.epoch for stage in self.stages)
                    for stage in self.stages:
                        stage.epoch = epoch
                        stage.held.clear()
                        stage.dead.clear()
                    self.begun = epoch
                case ChainOpened():
                    self.opened = True
                case ChainClosed():
                    self.opened = False
                case _:
                    self.deliver(RequestKey(instruction.client, instruction.message.number), instruction.message)

    def deliver(self, key: RequestKey, message: Accepted | PrefillProgress | Delta | Finished | Failed) -> None:
        client = self.clients[key]
        assert client.ended is None, "a request ends once, and nothing follows"
        assert not client.gone
        match message:
            case Accepted():
                assert not client.accepted
                client.accepted = True
                assert message.prompt_tokens == len(client.prompt)
            case PrefillProgress():
                assert client.prefilled < message.done_tokens < message.total_tokens == len(client.prompt)
                client.prefilled = message.done_tokens
            case Delta():
                client.tokens += message.tokens
                client.text += message.text
            case _:
                client.ended = message
                self.check_end(client, message)

    def check_end(self, client: Client, end: Finished | Failed) -> None:
        tokens, reason = expected_answer(client.prompt, client.most, client.ignore_stop_ids)
        assert client.tokens == tokens[: len(client.tokens)], "no token is lost, invented or doubled"
        if isinstance(end, Finished):
            assert end.completion_tokens == len(client.tokens)
            assert end.prompt_tokens == len(client.prompt)
            if end.reason == "cancelled":
                assert client.cancelled
            else:
                assert (client.tokens, end.reason) == (tokens, reason)
                assert client.text == "".join(f"{token} " for token in tokens)
        elif end.code == "context_full":
            assert len(client.prompt) >= CONTEXT_TOKENS
            assert f"{len(client.prompt)}/{CONTEXT_TOKENS}" in end.message
        elif end.code in ("stage_lost", "internal"):
            assert end.node == "bob"
        else:
            assert end.code in ("not_ready", "overloaded")

    # What clients do

    @rule(
        client=st.sampled_from([b"a", b"b", b"c"]),
        length=st.integers(1, CONTEXT_TOKENS + 3),
        first=st.integers(1, 9),
        max_tokens=st.none() | st.integers(1, 12),
        ignore_stop_ids=st.booleans(),
    )
    def submit(self, client: bytes, length: int, first: int, max_tokens: int | None, ignore_stop_ids: bool) -> None:
        self.numbers += 1
        key = RequestKey(client, self.numbers)
        prompt = tuple((first + index) % 11 for index in range(length))
        room = CONTEXT_TOKENS - length
        most = room if max_tokens is None else min(room, max_tokens)
        self.clients[key] = Client(prompt, most, ignore_stop_ids)
        sampling = Sampling(ignore_stop_ids=ignore_stop_ids)
        request = Request(key, prompt, sampling, max_tokens, PlainText(), self.now_s)
        self.carry_out(self.scheduler.submit(request, self.now_s))

    def open_keys(self) -> list[RequestKey]:
        return [key for key, client in self.clients.items() if client.ended is None and not client.gone]

    @precondition(lambda self: self.open_keys())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.open_keys()))
        self.clients[key].cancelled = True
        self.carry_out(self.scheduler.cancel(key, self.now_s))
        assert self.clients[key].ended is not None

    @rule(client=st.sampled_from([b"a", b"b", b"c"]))
    def vanish(self, client: bytes) -> None:
        for key in self.open_keys():
            if key.client == client:
                self.clients[key].gone = True
        self.carry_out(self.scheduler.client_gone(client, self.now_s))

    # What the chain does

    @precondition(lambda self: any(stage.inbox for stage in self.stages))
    @rule(data=st.data(), times=st.integers(1, 6))
    def work(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            busy = [index for index, stage in enumerate(self.stages) if stage.inbox]
            if not busy:
                return
            self.work_at(data.draw(st.sampled_from(busy)), fails=False)

    @precondition(lambda self: any(stage.inbox for stage in self.stages))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.work_at(data.draw(st.sampled_from([i for i, s in enumerate(self.stages) if s.inbox])), fails=True)

    def work_at(self, index: int, fails: bool) -> None:
        stage = self.stages[index]
        message = stage.inbox.popleft()
        is_last = index == len(self.stages) - 1
        if message.epoch != stage.epoch:
            return
        if isinstance(message, Release):
            for sequence in message.sequences:
                stage.held.pop(sequence, None)
                stage.dead.discard(sequence)
            if not is_last:
                self.stages[index + 1].inbox.append(message)
            return
        kept: list[Entry] = []
        sampled: list[Sampled] = []
        for entry in message.entries:
            if entry.sequence in stage.dead:
                continue
            if fails:
                fails = False
                stage.dead.add(entry.sequence)
                stage.held.pop(entry.sequence, None)
                fault = Fault(stage.epoch, index, "bob", (entry.sequence,), "Stage on bob cannot go on.")
                self.to_gateway.append(fault)
                continue
            held = stage.held.setdefault(entry.sequence, [])
            assert entry.start == len(held), "a stage sees every token of a sequence once, in order"
            assert (entry.sampling is not None) == (entry.start == 0)
            held += entry.tokens
            assert len(held) <= CONTEXT_TOKENS
            kept.append(entry)
            if is_last and entry.sampled_positions:
                sampled.append(Sampled(entry.sequence, (next_token(held),)))
        assert sum(len(held) for held in stage.held.values()) <= KV_CAPACITY_TOKENS + CONTEXT_TOKENS
        if not kept:
            return
        if is_last:
            timings = tuple(StageTiming(i, 1.0 + len(kept)) for i in range(len(self.stages)))
            self.to_gateway.append(StepResult(message.epoch, message.step, tuple(sampled), timings))
        else:
            self.stages[index + 1].inbox.append(Step(message.epoch, message.step, tuple(kept)))

    @precondition(lambda self: self.to_gateway)
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        """Results keep their order; a fault, on another connection, may overtake them or lag behind."""
        faults = [index for index, message in enumerate(self.to_gateway) if isinstance(message, Fault)]
        results = [index for index, message in enumerate(self.to_gateway) if isinstance(message, StepResult)]
        index = data.draw(st.sampled_from([each[0] for each in (faults, results) if each]))
        message = self.to_gateway[index]
        del self.to_gateway[index]
        if isinstance(message, Fault):
            self.carry_out(self.scheduler.fault(message, self.now_s))
        else:
            self.carry_out(self.scheduler.result(message, self.now_s))

    @rule(keeps_connection=st.booleans())
    def lose_stage(self, keeps_connection: bool) -> None:
        message = "Stage 1 on bob went away."
        self.carry_out(self.scheduler.stage_lost("bob", message, self.now_s, connected=keeps_connection))
        assert self.scheduler.running == 0

    @rule()
    def connect(self) -> None:
        self.carry_out(self.scheduler.stages_connected(self.now_s))

    @precondition(lambda self: self.scheduler.state == "attaching")
    @rule()
    def attach(self) -> None:
        self.carry_out(self.scheduler.all_attached(self.begun, self.now_s))

    @rule(elapsed_s=st.sampled_from([0.1, 1.0, 8.0]))
    def wait(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.carry_out(self.scheduler.tick(self.now_s))

    # What always holds

    @invariant()
    def few_steps_are_in_flight(self) -> None:
        stages = len(self.stages)
        assert self.scheduler.steps_in_flight <= stages + 1
        of_this_epoch = {
            message.step
            for stage in self.stages
            for message in stage.inbox
            if isinstance(message, Step) and message.epoch == self.scheduler.epoch
        }
        # A step that a fault emptied may still be on its way through with nothing in it that anyone waits for.
        if not any(stage.dead for stage in self.stages):
            assert len(of_this_epoch) <= stages + 1

    @invariant()
    def counts_agree(self) -> None:
        assert self.scheduler.running <= MAX_SEQUENCES
        assert self.scheduler.waiting <= 6
        assert self.scheduler.running + self.scheduler.waiting == len(self.open_keys())

    @invariant()
    def an_open_chain_with_work_is_never_idle(self) -> None:
        if self.scheduler.state == "open" and self.scheduler.running and not self.to_gateway:
            assert self.scheduler.steps_in_flight > 0 or any(stage.dead for stage in self.stages)

    def teardown(self) -> None:
        """Whatever happened, once the chain is left in peace every request ends and every stage is empty."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.open_keys() and self.opened and not any(stage.inbox for stage in self.stages):
                break
            self.now_s += 0.25
            if self.scheduler.state == "closed":
                self.carry_out(self.scheduler.stages_connected(self.now_s))
            if self.scheduler.state == "attaching":
                self.carry_out(self.scheduler.all_attached(self.begun, self.now_s))
            for index in range(len(self.stages)):
                while self.stages[index].inbox:
                    self.work_at(index, fails=False)
            while self.to_gateway:
                message = self.to_gateway.popleft()
                if isinstance(message, Fault):
                    self.carry_out(self.scheduler.fault(message, self.now_s))
                else:
                    self.carry_out(self.scheduler.result(message, self.now_s))
            self.carry_out(self.scheduler.tick(self.now_s))
        assert self.open_keys() == []
        assert self.scheduler.running == self.scheduler.waiting == self.scheduler.steps_in_flight == 0
        assert all(not stage.held and not stage.dead for stage in self.stages), "every sequence is released everywhere"


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestScheduler = SchedulerMachine.TestCase
