"""The scheduler: a synchronous state machine that keeps the stages busy with everybody's tokens.

Events come in as method calls with the time; what must be done comes out as instructions. It touches no socket.

The policy:

- As many steps are in flight as there are stages, each with other sequences, and one more when there are more
  sequences than stages, so that a stage that has just finished finds the next step waiting.
- Sequences that are ready for their next token are spread over the free steps, until the steps are of one size.
- A prompt goes in chunks, several of them behind each other. When somebody reads an answer meanwhile, chunks and
  decode steps take turns, and :class:`StepCosts` bounds the chunks. Prompts take turns with each other.
- Requests are admitted first come, first served. A request that would not fit the KV cache waits, and with it those
  behind it.
- A sequence that has ended, for whatever reason, is released on the stages at once, behind the steps it is part of.
- When a stage is lost, every sequence ends with an error that names the node; requests that wait stay in the queue
  for ``patience_s``. Results of an earlier epoch, and of steps that nobody waits for, are dropped.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from fleet.gateway_messages import (
    Accepted,
    Delta,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    PrefillProgress,
    Sampling,
    TokenLogprob,
)
from pipeline.gateway.instructions import (
    BeginEpoch,
    ChainClosed,
    ChainOpened,
    Instruction,
    SendRelease,
    SendStep,
    ToClient,
)
from pipeline.gateway.sequence import Request, RequestKey, Sequence
from pipeline.gateway.step_costs import StepCosts
from pipeline.messages import MAX_STEP_ENTRIES, Entry, Fault, Release, Sampled, Step, StepResult

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0
MISSING_TOKEN_S = 5.0
"""How long a Fault may lag behind the result that lacks its sequence's token."""

ChainState = Literal["closed", "attaching", "probing", "open"]


@dataclass(frozen=True)
class SchedulerLimits:
    """``kv_capacity_tokens`` is what all sequences together may hold; None where ``max_sequences`` is limit enough."""

    stages: int
    context_tokens: int
    max_sequences: int
    prefill_chunk_tokens: int
    step_switch_tokens: int = 0
    """A prompt of more than so many tokens begins with a step of more than so many; 0: no such rule."""
    max_waiting: int = 256
    kv_capacity_tokens: int | None = None
    step_deadline_s: float = 120.0
    """How long the stages may be silent while steps are in flight."""
    patience_s: float = 20.0
    """How long a request waits for a chain that is not open."""


@dataclass(frozen=True)
class _Part:
    sequence: int
    tokens: int
    samples: bool


@dataclass
class _StepInFlight:
    parts: tuple[_Part, ...]
    sent_s: float


class Scheduler:
    """See the module. ``first_epoch`` must be higher than that of any gateway that these stages have seen."""

    def __init__(self, limits: SchedulerLimits, stop_ids: frozenset[int], first_epoch: int) -> None:
        self.limits = limits
        self.costs = StepCosts(limits.stages)
        self.state: ChainState = "closed"
        self.epoch = first_epoch - 1
        self.closed_node = ""
        self.closed_message = "The stages are being connected."
        self.tokens_total = 0
        self._stop_ids = stop_ids
        self._waiting: OrderedDict[RequestKey, Request] = OrderedDict()
        self._active: dict[int, Sequence] = {}
        self._numbers_of: dict[RequestKey, int] = {}
        self._prefilling: OrderedDict[int, Sequence] = OrderedDict()
        self._ready: OrderedDict[int, Sequence] = OrderedDict()
        self._in_flight: dict[int, _StepInFlight] = {}
        self._sequence_numbers = itertools.count(1)
        self._step_numbers = itertools.count(1)
        self._reserved_tokens = 0
        self._last_was_prefill = True
        self._probe: int | None = None
        self._connected = False
        self._closed_since_s = 0.0
        self._retry_s = FIRST_RETRY_S
        self._retry_at_s = 0.0
        self._last_result_s = 0.0

    @property
    def running(self) -> int:
        """Sequences that hold KV cache on the stages."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def knows(self, key: RequestKey) -> bool:
        """Whether this request is waiting or running."""
        return key in self._waiting or key in self._numbers_of

    def clients(self) -> set[bytes]:
        """Connections that have requests waiting or running."""
        return {key.client for key in self._waiting} | {key.client for key in self._numbers_of}

    # Requests

    def submit(self, request: Request, now_s: float) -> list[Instruction]:
        """A request has arrived. Its end is exactly one Finished or Failed, unless its client goes away."""
        context = self.limits.context_tokens
        prompt = len(request.tokens)
        if self.knows(request.key):
            return [_failed(request.key, "bad_request", f"Request number {request.key.number} is running already.")]
        if prompt == 0:
            return [_failed(request.key, "bad_request", "The prompt is empty.")]
        if prompt >= context:
            text = f"context full: {prompt}/{context} tokens are in the prompt alone; shorten it."
            return [_failed(request.key, "context_full", text)]
        capacity = self.limits.kv_capacity_tokens
        if capacity is not None and self._tokens_needed(request) > capacity:
            text = f"context full: {self._tokens_needed(request)}/{capacity} tokens of KV cache; ask for fewer tokens."
            return [_failed(request.key, "context_full", text)]
        if len(self._waiting) >= self.limits.max_waiting:
            return [_failed(request.key, "overloaded", f"{len(self._waiting)} requests are waiting; try again later.")]
        self._waiting[request.key] = request
        accepted = ToClient(request.key.client, Accepted(request.key.number, prompt))
        return [accepted, *self._fill(now_s)]

    def cancel(self, key: RequestKey, now_s: float) -> list[Instruction]:
        """The client wants no more of this request; nothing happens where it has ended already."""
        request = self._waiting.pop(key, None)
        if request is not None:
            finished = Finished(key.number, "cancelled", len(request.tokens), 0, 0.0, 0.0)
            return [ToClient(key.client, finished), *self._fill(now_s)]
        number = self._numbers_of.get(key)
        if number is None:
            return []
        sequence = self._active[number]
        return [*self._finish(sequence, "cancelled"), *self._fill(now_s)]

    def client_gone(self, client: bytes, now_s: float) -> list[Instruction]:
        """Nobody reads this client's answers any more."""
        for key in [key for key in self._waiting if key.client == client]:
            del self._waiting[key]
        instructions: list[Instruction] = []
        for key in [key for key in self._numbers_of if key.client == client]:
            instructions += self._drop(self._active[self._numbers_of[key]])
        return [*instructions, *self._fill(now_s)]

    # The chain

    def stages_connected(self, now_s: float) -> list[Instruction]:
        """There is a connection to every stage."""
        self._connected = True
        return self._retry(now_s)

    def all_attached(self, epoch: int, now_s: float) -> list[Instruction]:
        """Every stage has begun the epoch. One token is sent through, and nothing else until it is back."""
        if self.state != "attaching" or epoch != self.epoch:
            return []
        self.state = "probing"
        self._probe = next(self._sequence_numbers)
        entry = Entry(self._probe, 0, (0,), 1, Sampling())
        return [self._send((entry,), (_Part(self._probe, 1, True),), now_s)]

    def stage_lost(
        self, node: str, message: str, now_s: float, *, connected: bool = False, seen_epoch: int = 0
    ) -> list[Instruction]:
        """A stage is gone, or serves nothing more in this epoch (then it may still be ``connected``)."""
        self._connected = connected
        self.epoch = max(self.epoch, seen_epoch)
        instructions: list[Instruction] = []
        for sequence in list(self._active.values()):
            self._forget(sequence)
            instructions.append(_failed(sequence.request.key, "stage_lost", message, node))
        self._in_flight.clear()
        self._probe = None
        if self.state == "open":
            self._closed_since_s = now_s
        elif self.state != "closed":
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
        self._retry_at_s = now_s + self._retry_s
        self.state = "closed"
        self.closed_node, self.closed_message = node, message
        instructions.append(ChainClosed(node, message))
        return instructions

    def fault(self, fault: Fault, now_s: float) -> list[Instruction]:
        """A stage says that some sequences, or all, cannot go on."""
        if fault.epoch < self.epoch:
            return []
        if self.state == "closed":
            if fault.epoch_over:
                self.epoch = fault.epoch
            return []
        if fault.epoch_over:
            return self.stage_lost(fault.node, fault.message, now_s, connected=True, seen_epoch=fault.epoch)
        if fault.epoch != self.epoch:
            return []
        dead = frozenset(fault.sequences)
        if self._probe in dead:
            return self.stage_lost(fault.node, fault.message, now_s, connected=True)
        instructions: list[Instruction] = []
        for number in fault.sequences:
            sequence = self._active.get(number)
            if sequence is not None:
                instructions += self._fail(sequence, "internal", fault.message, fault.node)
        for step, in_flight in list(self._in_flight.items()):
            # A step of which no entry is left has no result.
            in_flight.parts = tuple(part for part in in_flight.parts if part.sequence not in dead)
            if not in_flight.parts:
                del self._in_flight[step]
        return [*instructions, *self._fill(now_s)]

    def result(self, result: StepResult, now_s: float) -> list[Instruction]:
        """A step has come through."""
        if result.epoch != self.epoch:
            return []
        self._last_result_s = now_s
        in_flight = self._in_flight.pop(result.step, None)
        if in_flight is None:
            return []
        if self.state == "probing":
            return self._probed(result, now_s)
        self.costs.record(tuple(part.tokens for part in in_flight.parts), result.timings)
        sampled = {one.sequence: one for one in result.sampled}
        instructions: list[Instruction] = []
        for part in in_flight.parts:
            sequence = self._active.get(part.sequence)
            if sequence is None:
                continue
            if sequence.generated == 0:
                sequence.done += part.tokens
            if not part.samples:
                progress = PrefillProgress(sequence.request.key.number, sequence.done, sequence.prompt_tokens)
                instructions.append(ToClient(sequence.request.key.client, progress))
                continue
            one = sampled.get(part.sequence)
            if one is None or not one.tokens:
                sequence.unanswered_since_s = now_s
                continue
            instructions += self._take(sequence, one, now_s)
        return [*instructions, *self._fill(now_s)]

    def tick(self, now_s: float) -> list[Instruction]:
        """Time has passed. Call it a few times a second."""
        instructions: list[Instruction] = []
        oldest_s = min((step.sent_s for step in self._in_flight.values()), default=now_s)
        if now_s - max(oldest_s, self._last_result_s) > self.limits.step_deadline_s:
            message = f"The stages have not answered for {self.limits.step_deadline_s:.0f} s."
            instructions += self.stage_lost("", message, now_s, connected=self._connected)
        for sequence in list(self._active.values()):
            since_s = sequence.unanswered_since_s
            if since_s is not None and now_s - since_s > MISSING_TOKEN_S:
                instructions += self._fail(sequence, "internal", "The last stage returned no token for this answer.")
        if self.state != "open":
            for key, request in list(self._waiting.items()):
                if now_s - max(request.arrived_s, self._closed_since_s) > self.limits.patience_s:
                    del self._waiting[key]
                    instructions.append(_failed(key, "not_ready", self.closed_message, self.closed_node))
        return [*instructions, *self._retry(now_s), *self._fill(now_s)]

    # Inside

    def _retry(self, now_s: float) -> list[Instruction]:
        if self.state != "closed" or not self._connected or now_s < self._retry_at_s:
            return []
        self.epoch += 1
        self.state = "attaching"
        return [BeginEpoch(self.epoch)]

    def _probed(self, result: StepResult, now_s: float) -> list[Instruction]:
        probe = self._probe
        assert probe is not None
        self._probe = None
        self.state = "open"
        self._retry_s = FIRST_RETRY_S
        release = SendRelease(Release(self.epoch, (probe,)))
        return [ChainOpened(), release, *self._fill(now_s)]

    def _tokens_needed(self, request: Request) -> int:
        return len(request.tokens) + self._max_generated(request)

    def _max_generated(self, request: Request) -> int:
        room = self.limits.context_tokens - len(request.tokens)
        return room if request.max_tokens is None else min(room, request.max_tokens)

    def _admit(self) -> None:
        capacity = self.limits.kv_capacity_tokens
        while self._waiting and len(self._active) < self.limits.max_sequences:
            key, request = next(iter(self._waiting.items()))
            needed = self._tokens_needed(request)
            if capacity is not None and self._reserved_tokens + needed > capacity:
                return
            del self._waiting[key]
            number = next(self._sequence_numbers)
            sequence = Sequence(number, request, self._max_generated(request), needed)
            self._active[number] = sequence
            self._numbers_of[key] = number
            self._prefilling[number] = sequence
            self._reserved_tokens += needed

    def _fill(self, now_s: float) -> list[Instruction]:
        """Steps for the free slots."""
        instructions: list[Instruction] = []
        if self.state != "open":
            return instructions
        self._admit()
        stages = self.limits.stages
        slots = stages if len(self._active) <= stages else stages + 1
        while (free := slots - len(self._in_flight)) > 0:
            if self._ready and (self._last_was_prefill or not self._prefilling):
                entries, parts = self._decode_step(free, slots)
                self._last_was_prefill = False
            elif self._prefilling:
                entries, parts = self._prefill_step(free)
                self._last_was_prefill = True
            else:
                break
            instructions.append(self._send(entries, parts, now_s))
        return instructions

    def _decode_step(self, free: int, slots: int) -> tuple[tuple[Entry, ...], tuple[_Part, ...]]:
        count = math.ceil(len(self._ready) / free)
        if not self._prefilling:
            # A step that came back larger than its share leaves some to the next one, until all are of one size.
            count = min(count, math.ceil(len(self._active) / slots))
        entries: list[Entry] = []
        for _ in range(min(count, MAX_STEP_ENTRIES)):
            number, sequence = self._ready.popitem(last=False)
            entries.append(Entry(number, sequence.sent, (sequence.last_token,), 1))
            sequence.sent += 1
        return tuple(entries), tuple(_Part(entry.sequence, 1, True) for entry in entries)

    def _prefill_step(self, free: int) -> tuple[tuple[Entry, ...], tuple[_Part, ...]]:
        prefilling = len(self._prefilling)
        decoding = sum(1 for sequence in self._active.values() if sequence.generated)
        budget = self.costs.chunk_tokens(self.limits.prefill_chunk_tokens, decoding, prefilling)
        entries: list[Entry] = []
        parts: list[_Part] = []
        for _ in range(min(math.ceil(prefilling / free), MAX_STEP_ENTRIES)):
            if budget <= 0:
                break
            number, sequence = self._prefilling.popitem(last=False)
            count = min(max(budget, self._least_first_chunk(sequence)), sequence.unsent)
            tokens = sequence.request.tokens[sequence.sent : sequence.sent + count]
            is_last = count == sequence.unsent
            sampling = sequence.request.sampling if sequence.sent == 0 else None
            prompt_tokens = sequence.prompt_tokens if sequence.sent == 0 else None
            entries.append(Entry(number, sequence.sent, tokens, 1 if is_last else 0, sampling, prompt_tokens))
            parts.append(_Part(number, count, is_last))
            sequence.sent += count
            budget -= count
            if not is_last:
                self._prefilling[number] = sequence
        return tuple(entries), tuple(parts)

    def _least_first_chunk(self, sequence: Sequence) -> int:
        switch = self.limits.step_switch_tokens
        return switch + 1 if switch and sequence.sent == 0 and sequence.unsent > switch else 0

    def _send(self, entries: tuple[Entry, ...], parts: tuple[_Part, ...], now_s: float) -> SendStep:
        step = next(self._step_numbers)
        self._in_flight[step] = _StepInFlight(parts, now_s)
        return SendStep(Step(self.epoch, step, entries))

    def _take(self, sequence: Sequence, sampled: Sampled, now_s: float) -> list[Instruction]:
        """Tokens of a sequence have been sampled."""
        answer = sequence.request.answer
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        sequence.last_token_s = now_s
        text = ""
        taken: list[int] = []
        reason: FinishReason | None = None
        for token in sampled.tokens:
            if token in self._stop_ids and not sequence.request.sampling.ignore_stop_ids:
                reason = "stop"
                break
            taken.append(token)
            text += answer.push(token)
            sequence.generated += 1
            sequence.last_token = token
            self.tokens_total += 1
            if answer.stopped:
                reason = "stop"
                break
            if sequence.generated >= sequence.max_generated:
                reason = "length"
                break
        if reason is not None and not answer.stopped:
            text += answer.flush()
        instructions: list[Instruction] = []
        if taken or text:
            logprobs: tuple[TokenLogprob, ...] = ()
            if sampled.logprobs:
                logprobs = answer.describe(taken, sampled.logprobs[: len(taken)])
            delta = Delta(sequence.request.key.number, text, tuple(taken), logprobs)
            instructions.append(ToClient(sequence.request.key.client, delta))
        if reason is None:
            self._ready[sequence.number] = sequence
            return instructions
        return instructions + self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> list[Instruction]:
        key = sequence.request.key
        first_s = sequence.first_token_s
        finished = Finished(
            key.number,
            reason,
            sequence.prompt_tokens,
            sequence.generated,
            0.0 if first_s is None else first_s - sequence.request.arrived_s,
            0.0 if first_s is None else sequence.last_token_s - first_s,
        )
        return [ToClient(key.client, finished), *self._drop(sequence)]

    def _fail(self, sequence: Sequence, code: FailureCode, message: str, node: str = "") -> list[Instruction]:
        return [_failed(sequence.request.key, code, message, node), *self._drop(sequence)]

    def _drop(self, sequence: Sequence) -> list[Instruction]:
        """End a sequence here and free its KV cache on the stages."""
        self._forget(sequence)
        return [SendRelease(Release(self.epoch, (sequence.number,)))] if sequence.sent else []

    def _forget(self, sequence: Sequence) -> None:
        del self._active[sequence.number]
        del self._numbers_of[sequence.request.key]
        self._prefilling.pop(sequence.number, None)
        self._ready.pop(sequence.number, None)
        self._reserved_tokens -= sequence.reserved_tokens


def _failed(key: RequestKey, code: FailureCode, message: str, node: str = "") -> ToClient:
    return ToClient(key.client, Failed(key.number, code, message, node))
