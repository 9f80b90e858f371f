"""What an agent's children must know of the PC that they run on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from fleet.identity import Identity


@dataclass(frozen=True)
class NodeFacts:
    """What children must know of the node that they run on."""

    name: str
    identity: Identity
    memory_budget_bytes: int
    compiled_folder: Path | None = None
    """Where shards compiled beforehand may lie; those compiled here are kept with their stage."""
    trusted_controllers: Callable[[], Collection[str]] = tuple
    """Their keys: they may chat with a gateway, whoever of them started it."""
    stage_module: str = "pipeline.stage"
    gateway_module: str = "pipeline.gateway"
