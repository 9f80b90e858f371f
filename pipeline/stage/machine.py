"""What a stage does with each message, as a synchronous state machine: messages in, instructions out.

It knows the epoch, the connection that attached, and how many tokens of each sequence the KV cache holds. It touches
no socket and no device: :mod:`pipeline.stage.server` carries its instructions out and tells it what came of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleet.codec import MAX_TENSOR_BYTES, PROTOCOL_VERSION
from fleet.node import PeerAddress
from pipeline.messages import (
    MAX_STEP_TOKENS,
    Attach,
    Attached,
    Entry,
    Fault,
    GatewayBoundMessage,
    Ping,
    Pong,
    Release,
    Sampled,
    StageTiming,
    Step,
    StepResult,
)

MAX_SEQUENCES = 1024
MAX_SAMPLED_POSITIONS = 256
"""Of one entry: 128,256 logits in f32 for each make 131 MB."""
MAX_REMEMBERED_FAULTS = 4096
_HIDDEN_VALUE_BYTES = 4


@dataclass(frozen=True)
class StageFacts:
    """What never changes while the process runs."""

    node: str
    device: str
    model_id: str
    stage: int
    stages: int
    first_layer: int
    end_layer: int
    input_width: int
    """Numbers per token of the hidden states that arrive; 0 in the first stage."""
    output_width: int
    """The same for what is passed on; 0 in the last stage."""
    vocabulary_size: int
    context_tokens: int = 0
    """0: the model does not say."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


@dataclass(frozen=True)
class Send:
    """Send a message to the connection with this routing id. ``must_arrive``: losing it would leave someone waiting."""

    connection: bytes
    message: GatewayBoundMessage
    must_arrive: bool = True


@dataclass(frozen=True)
class Connect:
    """Close the connection to the next stage, if there is one, and make this one; report with ``next_ready`` or
    ``next_lost``."""

    peer: PeerAddress


@dataclass(frozen=True)
class Disconnect:
    """Close the connection to the next stage."""


@dataclass(frozen=True)
class FreeAll:
    """Free the KV cache of every sequence."""


@dataclass(frozen=True)
class Free:
    """Free the KV cache of these sequences."""

    sequences: tuple[int, ...]


@dataclass(frozen=True)
class Compute:
    """Run these entries and report with ``computed``. ``rows`` are their first rows in the step's tensor."""

    epoch: int
    step: int
    entries: tuple[Entry, ...]
    rows: tuple[int, ...]
    timings: tuple[StageTiming, ...] = ()


@dataclass(frozen=True)
class PassOn:
    """Send a message to the next stage; a Step gets the hidden states of its entries, in their order, as its tensor.
    Report a failure with ``next_lost``."""

    message: Step | Release


@dataclass(frozen=True)
class Drop:
    """The message was ignored; worth a line in the log, not more than a few a minute."""

    reason: str


Instruction = Send | Connect | Disconnect | FreeAll | Free | Compute | PassOn | Drop


@dataclass
class StageMachine:
    """The state of a stage. ``connection`` arguments are the routing ids of connections whose key is allowed."""

    facts: StageFacts
    epoch: int = -1
    gateway: bytes | None = None
    stored: dict[int, int] = field(default_factory=dict)
    """Tokens in the KV cache per sequence."""
    _faulted: dict[int, None] = field(default_factory=dict)
    """Sequences that met a Fault and are not released yet, oldest first."""
    _next: PeerAddress | None = None
    _next_is_ready: bool = False
    _over: str = ""
    """Why nothing more can be served in this epoch."""

    def attach(self, connection: bytes, message: Attach) -> list[Instruction]:
        """A gateway begins an epoch."""
        facts = self.facts
        why_not = self._why_not_attached(connection, message)
        if why_not:
            # The epoch tells a gateway how far it must count up to be heard.
            epoch = max(self.epoch, message.epoch)
            text = f"{facts.node} refused the gateway: it {why_not}."
            fault = Fault(epoch, facts.stage, facts.node, (), text, epoch_over=True)
            return [Send(connection, fault, must_arrive=False)]
        if message.epoch == self.epoch:
            if self._over:
                return [self._fault((), self._over, epoch_over=True)]
            return [self._attached()] if self._can_serve else []
        instructions: list[Instruction] = []
        if self.gateway is not None and self.gateway != connection:
            text = f"Another gateway has taken over stage {facts.stage} on {facts.node}."
            fault = Fault(self.epoch, facts.stage, facts.node, tuple(self.stored), text, epoch_over=True)
            instructions.append(Send(self.gateway, fault, must_arrive=False))
        self.epoch = message.epoch
        self.gateway = connection
        self._next = message.next
        self._next_is_ready = False
        self._over = ""
        self._forget()
        instructions.append(FreeAll())
        instructions.append(self._attached() if message.next is None else Connect(message.next))
        return instructions

    def next_ready(self) -> list[Instruction]:
        """The connection to the next stage stands."""
        self._next_is_ready = True
        return [self._attached()]

    def next_lost(self, reason: str) -> list[Instruction]:
        """The next stage cannot be reached, or went away: nothing more can be served in this epoch."""
        if self._next is None or self._over:
            return []
        self._next_is_ready = False
        self._over = f"Stage {self.facts.stage} on {self.facts.node} cannot go on: {reason}"
        sequences = tuple(self.stored)
        self._forget()
        return [Disconnect(), FreeAll(), self._fault(sequences, self._over, epoch_over=True)]

    def gateway_lost(self) -> list[Instruction]:
        """The connection that attached is gone. The epoch ends without a word, for there is nobody to tell."""
        if self.gateway is None:
            return []
        self.gateway = None
        self._next = None
        self._next_is_ready = False
        self._forget()
        return [Disconnect(), FreeAll()]

    def ping(self, connection: bytes, message: Ping) -> list[Instruction]:
        """Anyone who is allowed may ask for a sign of life."""
        pong = Pong(message.number, max(self.epoch, 0), len(self.stored))
        return [Send(connection, pong, must_arrive=False)]

    def release(self, connection: bytes, message: Release) -> list[Instruction]:
        """Sequences have ended."""
        stale = self._why_not_served(connection, message.epoch)
        if stale:
            return [Drop(stale)]
        held = tuple(sequence for sequence in message.sequences if self.stored.pop(sequence, None) is not None)
        for sequence in message.sequences:
            self._faulted.pop(sequence, None)
        instructions: list[Instruction] = [Free(held)] if held else []
        if not self.facts.is_last and not self._over:
            instructions.append(PassOn(message))
        return instructions

    def step(
        self, connection: bytes, message: Step, tensor_shape: tuple[int, ...] | None, tensor_fault: str = ""
    ) -> list[Instruction]:
        """A step has arrived; ``tensor_fault`` says what is wrong with its tensor frame, if anything is."""
        stale = self._why_not_served(connection, message.epoch)
        if stale:
            return [Drop(stale)]
        everyone = tuple(dict.fromkeys(entry.sequence for entry in message.entries))
        if self._over:
            return [self._fault(everyone, self._over, epoch_over=True)]
        wrong = tensor_fault or self._what_is_wrong_with_step(message, tensor_shape)
        if wrong:
            return self._fail(everyone, dict.fromkeys(everyone, wrong))
        entries: list[Entry] = []
        rows: list[int] = []
        wrong_by_sequence: dict[int, str] = {}
        row = 0
        for entry in message.entries:
            wrong = self._what_is_wrong_with_entry(entry)
            if wrong:
                wrong_by_sequence.setdefault(entry.sequence, wrong)
            elif entry.sequence not in self._faulted and entry.sequence not in wrong_by_sequence:
                entries.append(entry)
                rows.append(row)
                self.stored[entry.sequence] = entry.start + len(entry.tokens)
            row += len(entry.tokens)
        kept = [index for index, entry in enumerate(entries) if entry.sequence not in wrong_by_sequence]
        instructions = self._fail(tuple(wrong_by_sequence), wrong_by_sequence)
        if kept:
            instructions.append(
                Compute(
                    message.epoch,
                    message.step,
                    tuple(entries[index] for index in kept),
                    tuple(rows[index] for index in kept),
                    message.timings,
                )
            )
        return instructions

    def computed(
        self, compute: Compute, failed: Mapping[int, str], compute_ms: float, sampled: Sequence[Sampled] = ()
    ) -> list[Instruction]:
        """A step has been run. ``failed`` gives for each sequence that did not get through what happened to it."""
        if compute.epoch != self.epoch or self.gateway is None:
            return [Drop("a step ended after its epoch")]
        instructions = self._fail(tuple(failed), failed)
        entries = tuple(entry for entry in compute.entries if entry.sequence not in failed)
        if not entries:
            return instructions
        timings = (*compute.timings, StageTiming(self.facts.stage, compute_ms))
        if self.facts.is_last:
            result = StepResult(compute.epoch, compute.step, tuple(sampled), timings)
            instructions.append(Send(self.gateway, result))
        else:
            instructions.append(PassOn(Step(compute.epoch, compute.step, entries, None, timings)))
        return instructions

    @property
    def _can_serve(self) -> bool:
        return self.facts.is_last or self._next_is_ready

    def _why_not_attached(self, connection: bytes, message: Attach) -> str:
        facts = self.facts
        if message.protocol != PROTOCOL_VERSION:
            return (
                f"speaks version {PROTOCOL_VERSION} of the protocol and the gateway version {message.protocol}; "
                "install the same Paceline on both"
            )
        if message.stage != facts.stage:
            return f"runs stage {facts.stage}, not stage {message.stage}"
        if (message.next is None) != facts.is_last:
            have = "has no next stage" if facts.is_last else "needs the address of the next stage"
            return f"runs stage {facts.stage} of {facts.stages} and {have}"
        if message.epoch < self.epoch or (message.epoch == self.epoch and connection != self.gateway):
            return f"serves epoch {self.epoch} already"
        return ""

    def _why_not_served(self, connection: bytes, epoch: int) -> str:
        if self.gateway is None:
            return "no gateway is attached"
        if epoch != self.epoch:
            return f"it is of epoch {epoch}, this is epoch {self.epoch}"
        if self.facts.is_first and connection != self.gateway:
            return "its sender is not the gateway that is attached"
        if not self._can_serve and not self._over:
            return "the next stage is not connected yet"
        return ""

    def _what_is_wrong_with_step(self, message: Step, tensor_shape: tuple[int, ...] | None) -> str:
        facts = self.facts
        tokens = sum(len(entry.tokens) for entry in message.entries)
        if tokens > MAX_STEP_TOKENS:
            return f"a step of {tokens} tokens exceeds the limit of {MAX_STEP_TOKENS}"
        if tokens * facts.output_width * _HIDDEN_VALUE_BYTES > MAX_TENSOR_BYTES:
            return f"the hidden states of {tokens} tokens exceed the limit of {MAX_TENSOR_BYTES >> 20} MiB a message"
        if facts.is_first:
            return "stage 0 takes tokens, not hidden states" if tensor_shape is not None else ""
        if tensor_shape is None:
            return "the hidden states are missing"
        expected = (tokens, facts.input_width)
        if tensor_shape != expected:
            return f"the hidden states have the shape {list(tensor_shape)} instead of {list(expected)}"
        return ""

    def _what_is_wrong_with_entry(self, entry: Entry) -> str:
        """A reason, or nothing; nothing, too, where the sequence met its Fault earlier."""
        if entry.sequence in self._faulted:
            return ""
        facts = self.facts
        stored = self.stored.get(entry.sequence)
        if stored is None and entry.start > 0:
            return f"the sequence begins at token {entry.start}, and no token of it is here"
        if stored is not None and entry.start != stored:
            return f"the sequence goes on at token {entry.start}, but {stored} are here"
        if (entry.sampling is not None) != (entry.start == 0):
            return "the sampling settings come with a sequence's first tokens and only then"
        if entry.start and entry.prompt_tokens is not None:
            return "the prompt's length comes with a sequence's first tokens and only then"
        if stored is None and len(self.stored) >= MAX_SEQUENCES:
            return f"{MAX_SEQUENCES} sequences are here already, and that is the limit"
        end = entry.start + len(entry.tokens)
        if facts.context_tokens and end > facts.context_tokens:
            return f"the sequence reaches {end} tokens, and the model takes {facts.context_tokens}"
        if entry.sampled_positions > min(len(entry.tokens), MAX_SAMPLED_POSITIONS):
            return f"{entry.sampled_positions} positions of {len(entry.tokens)} tokens cannot be sampled"
        if max(entry.tokens) >= facts.vocabulary_size:
            return f"token {max(entry.tokens)} is not one of the model's {facts.vocabulary_size}"
        if entry.sampling is not None:
            for token, bias in entry.sampling.logit_bias.items():
                if not 0 <= token < facts.vocabulary_size or not math.isfinite(bias):
                    return f"a logit bias of {bias} for token {token} cannot be applied"
        return ""

    def _fail(self, sequences: tuple[int, ...], reasons: Mapping[int, str]) -> list[Instruction]:
        """One Fault per distinct reason, and the KV cache of the sequences that had some."""
        held = tuple(sequence for sequence in sequences if self.stored.pop(sequence, None) is not None)
        by_reason: dict[str, list[int]] = {}
        for sequence in sequences:
            if sequence in self._faulted:
                continue
            by_reason.setdefault(reasons[sequence], []).append(sequence)
            if len(self._faulted) >= MAX_REMEMBERED_FAULTS:
                del self._faulted[next(iter(self._faulted))]
            self._faulted[sequence] = None
        instructions: list[Instruction] = [Free(held)] if held else []
        place = f"Stage {self.facts.stage} on {self.facts.node}"
        for reason, members in by_reason.items():
            instructions.append(self._fault(tuple(members), f"{place} cannot go on with an answer: {reason}."))
        return instructions

    def _forget(self) -> None:
        self.stored.clear()
        self._faulted.clear()

    def _attached(self) -> Send:
        facts = self.facts
        assert self.gateway is not None
        return Send(
            self.gateway,
            Attached(
                protocol=PROTOCOL_VERSION,
                epoch=self.epoch,
                stage=facts.stage,
                node=facts.node,
                device=facts.device,
                first_layer=facts.first_layer,
                end_layer=facts.end_layer,
                model_id=facts.model_id,
            ),
        )

    def _fault(self, sequences: tuple[int, ...], text: str, *, epoch_over: bool = False) -> Send:
        assert self.gateway is not None
        return Send(self.gateway, Fault(self.epoch, self.facts.stage, self.facts.node, sequences, text, epoch_over))
