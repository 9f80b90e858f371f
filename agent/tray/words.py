"""What the tray says, from what the agent reports. No Qt here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleet.control_messages import NodeStatus, StageStatus

Mood = Literal["idle", "busy", "serving", "paused", "fault"]
MAX_TOOLTIP_CHARACTERS = 120
"""Windows cuts tooltips of tray icons at 127."""


@dataclass(frozen=True)
class Face:
    """What to show: the icon's kind, a title, and a line for each thing that goes on."""

    mood: Mood
    title: str
    lines: tuple[str, ...] = ()
    paused: bool = False
    reachable: bool = True

    @property
    def tooltip(self) -> str:
        """Title and lines, as short as tooltips must be."""
        text = "\n".join((f"Paceline: {self.title}", *self.lines))
        return text if len(text) <= MAX_TOOLTIP_CHARACTERS else text[: MAX_TOOLTIP_CHARACTERS - 1] + "…"


UNREACHABLE = Face("fault", "The agent does not answer", reachable=False)


def face_of(status: NodeStatus) -> Face:
    """The face for a status."""
    lines = tuple(_stage_line(stage) for stage in status.stages)
    states = {stage.state for stage in status.stages}
    if states & {"failed"}:
        return Face("fault", "A stage failed on this PC", lines, status.paused)
    if status.paused:
        return Face("paused", "Paused: takes no new work", lines, paused=True)
    if states & {"receiving", "starting", "restarting", "stopping"}:
        return Face("busy", "Getting ready for the fleet", lines)
    if "ready" in states:
        return Face("serving", "Computes for the fleet", lines)
    return Face("idle", "Ready for the fleet", lines)


def _stage_line(stage: StageStatus) -> str:
    layers = f"layers {stage.first_layer} to {stage.end_layer - 1} of {stage.model}"
    match stage.state:
        case "receiving":
            progress = stage.progress
            percent = 100 * progress.done_bytes // progress.total_bytes if progress and progress.total_bytes else 0
            return f"Receives {layers}: {percent} %"
        case "received":
            return f"Holds {layers}"
        case "starting":
            return f"Starts {layers}"
        case "restarting":
            return f"Starts {layers} again: {stage.detail}"
        case "ready":
            memory = f" ({stage.memory_bytes / 1e6:,.0f} MB)" if stage.memory_bytes else ""
            return f"Runs {layers} on {stage.device}{memory}"
        case "stopping":
            return f"Stops {layers}"
        case "failed":
            return f"Cannot run {layers}: {stage.detail}"
