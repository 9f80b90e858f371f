"""What a draft needs of each node, and whether it fits. Free of Qt; the planner does the sums."""

from __future__ import annotations

from dataclasses import dataclass

from app.placement.draft import PlacementDraft
from fleet.manifest import Manifest
from fleet.placement import Placement, PlannedStage, assess_cuts


@dataclass(frozen=True)
class Demand:
    """What the person wants to serve."""

    context_tokens: int
    users: int


@dataclass(frozen=True)
class Assessment:
    """A draft with what the planner says of it."""

    draft: PlacementDraft
    placement: Placement

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        return self.placement.stages

    @property
    def fits(self) -> bool:
        return not any(map(self.over_budget, range(len(self.stages))))

    def over_budget(self, stage: int) -> bool:
        return self.stages[stage].needed_bytes > self.stages[stage].budget_bytes


def assess(manifest: Manifest, draft: PlacementDraft, demand: Demand) -> Assessment:
    """What the draft needs for this demand, whether it fits or not."""
    return Assessment(draft, assess_cuts(manifest, draft.nodes, draft.cuts, demand.context_tokens, demand.users))
