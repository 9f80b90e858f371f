"""What the scheduler wants done."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.gateway_messages import Accepted, Delta, Failed, Finished, PrefillProgress
from pipeline.messages import Release, Step


@dataclass(frozen=True)
class SendStep:
    """Send a step to stage 0."""

    step: Step


@dataclass(frozen=True)
class SendRelease:
    """Send a release to stage 0, behind the steps that were sent before."""

    release: Release


@dataclass(frozen=True)
class BeginEpoch:
    """Attach to every stage with this epoch; report with ``all_attached`` or ``stage_lost``."""

    epoch: int


@dataclass(frozen=True)
class ToClient:
    """Send a message to a client; report one that cannot be reached with ``client_gone``."""

    client: bytes
    message: Accepted | PrefillProgress | Delta | Finished | Failed


@dataclass(frozen=True)
class ChainOpened:
    """A probe token went through every stage and back."""


@dataclass(frozen=True)
class ChainClosed:
    """Nothing can be served until the chain opens again."""

    node: str
    message: str


Instruction = SendStep | SendRelease | BeginEpoch | ToClient | ChainOpened | ChainClosed
