"""What a draft needs of each node, and whether it fits. Free of Qt; the planner does the sums."""

from __future__ import annotations

from dataclasses import dataclass

from app.placement.draft import PlacementDraft
from fleet.placement import Placement, PlannedStage


@dataclass(frozen=True)
class Demand:
    """What the person wants to serve."""

    context_tokens: int
    users: int


@dataclass(frozen=True)
class Assessment:
    """A draft with what the planner says of it. ``problem`` is empty where it fits."""

    draft: PlacementDraft
    placement: Placement
    problem: str

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        return self.placement.stages

    def over_budget(self, stage: int) -> bool:
        return self.stages[stage].needed_bytes > self.stages[stage].budget_bytes
