"""Messages of the data path: gateway to stage 0, stage to next stage, last stage to gateway.

Every stage binds one ROUTER (CURVE server). The gateway holds a DEALER to each stage, and each stage but the last a
DEALER to the next. Steps go down the chain; results and faults go back to the gateway over the gateway's own
connection to the stage that sends them. A message is ``[header]`` or ``[header, tensor]``: the header is msgpack, the
tensor (steps that reach a stage after the first) is ``[tokens, width]`` in the order of the header's entries.

Every frame carries the epoch. The gateway starts a new epoch when a stage was lost; a stage that sees a new epoch
drops all its sequences, and drops frames of older ones. Epochs only rise: a gateway counts on from the clock
(``time.time_ns()``) or from the epoch of the Fault that refuses its Attach, so that a stage that outlived an earlier
gateway follows a new one.

A sequence that met a Fault is dead at the stage that sent it until it is released: its later entries are dropped
there without a word, while the other entries of a step go on. A step of which no entry is left has no result.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from fleet.codec import TensorHeader
from fleet.gateway_messages import Sampling, TokenId
from fleet.node import PeerAddress, Text

MAX_STEP_TOKENS = 8192
MAX_STEP_ENTRIES = 256

Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
StepNumber = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
SequenceNumber = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
StageNumber = Annotated[int, msgspec.Meta(ge=0, le=1023)]
Position = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Attach(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="attach"):
    """Gateway to stage, first message: begin this epoch, send results to this connection and steps to ``next``."""

    protocol: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    epoch: Epoch
    stage: StageNumber
    next: PeerAddress | None


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens of one sequence in a step."""

    sequence: SequenceNumber
    start: Position
    """Tokens of the sequence that the KV cache must hold before this step."""
    tokens: Annotated[tuple[TokenId, ...], msgspec.Meta(min_length=1, max_length=MAX_STEP_TOKENS)]
    sampled_positions: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP_TOKENS)] = 0
    """At how many of the last positions of this entry a token is sampled: 0 inside a prompt, 1 in decode."""
    sampling: Sampling | None = None
    """Given in the sequence's first entry (``start`` 0)."""
    prompt_tokens: Position | None = None
    """Given with ``sampling``: how many of the sequence's tokens are its prompt; presence and frequency penalties count
    those after it. None: all before the first sampled one. A replay says it, because it prefills generated tokens."""


class StageTiming(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a stage spent on a step."""

    stage: StageNumber
    compute_ms: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Step(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="step"):
    """A ragged batch on its way down the chain."""

    epoch: Epoch
    step: StepNumber
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1, max_length=MAX_STEP_ENTRIES)]
    tensor: TensorHeader | None = None
    timings: Annotated[tuple[StageTiming, ...], msgspec.Meta(max_length=1024)] = ()


class Release(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="release"):
    """Free the KV cache of these sequences; passed down the chain behind the steps that came before."""

    epoch: Epoch
    sequences: Annotated[tuple[SequenceNumber, ...], msgspec.Meta(max_length=4096)]


class Ping(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="ping"):
    number: Annotated[int, msgspec.Meta(ge=0, le=2**62)]


StageMessage = Attach | Step | Release | Ping


class Attached(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="attached"):
    """Stage to gateway: the epoch has begun here."""

    protocol: int
    epoch: Epoch
    stage: int
    node: Text
    device: Text
    first_layer: int
    end_layer: int
    model_id: Text


class Sampled(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens sampled for one sequence, in order of their positions, and log-probabilities if asked.

    ``logprobs`` has, per token, the chosen token's log-probability and the most probable tokens with theirs.
    """

    sequence: SequenceNumber
    tokens: tuple[TokenId, ...]
    logprobs: tuple[tuple[float, tuple[tuple[TokenId, float], ...]], ...] = ()


class StepResult(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="result"):
    """Last stage to gateway: the step is through. Entries that sampled nothing have no ``Sampled``."""

    epoch: Epoch
    step: StepNumber
    sampled: tuple[Sampled, ...]
    timings: tuple[StageTiming, ...]


class Fault(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="fault"):
    """Stage to gateway: these sequences cannot go on; ``message`` is one plain sentence."""

    epoch: Epoch
    """That of the steps; in the answer to a refused Attach the stage's own."""
    stage: int
    node: Text
    sequences: tuple[SequenceNumber, ...]
    message: str
    epoch_over: bool = False
    """This stage serves nothing more in this epoch (or did not begin it): attach again with a higher one."""


class Pong(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="pong"):
    number: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    epoch: Epoch
    sequences: int
    """Sequences that hold KV cache here."""


GatewayBoundMessage = Attached | StepResult | Fault | Pong
