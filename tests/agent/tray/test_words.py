"""What the tray says."""

from __future__ import annotations

import pytest

from agent.tray.words import MAX_TOOLTIP_CHARACTERS, face_of
from fleet.control_messages import NodeStatus, Progress, StageState, StageStatus
from fleet.node import LiveLoad

LOAD = LiveLoad(1.0, 1 << 30, 1 << 30)


def status(*states: StageState, paused: bool = False, detail: str = "") -> NodeStatus:
    stages = tuple(
        StageStatus(
            deployment="0123456789ab", model="Llama 8B", stage=number, first_layer=0, end_layer=16, state=state,
            device="CPU", detail=detail, progress=Progress(done_bytes=30, total_bytes=120), memory_bytes=2_000_000_000,
        )
        for number, state in enumerate(states)
    )  # fmt: skip
    return NodeStatus(load=LOAD, paused=paused, stages=stages, gateways=())


@pytest.mark.parametrize(
    ("states", "paused", "mood", "line"),
    [
        ((), False, "idle", None),
        (("receiving",), False, "busy", "Receives layers 0 to 15 of Llama 8B: 25 %"),
        (("received",), False, "idle", "Holds layers 0 to 15 of Llama 8B"),
        (("starting",), False, "busy", "Starts layers 0 to 15 of Llama 8B"),
        (("ready",), False, "serving", "Runs layers 0 to 15 of Llama 8B on CPU (2,000 MB)"),
        (("ready", "restarting"), False, "busy", "Starts layers 0 to 15 of Llama 8B again: no memory"),
        (("ready",), True, "paused", "Runs layers 0 to 15 of Llama 8B on CPU (2,000 MB)"),
        (("failed",), True, "fault", "Cannot run layers 0 to 15 of Llama 8B: no memory"),
        (("stopping",), False, "busy", "Stops layers 0 to 15 of Llama 8B"),
    ],
)
def test_faces(states: tuple[StageState, ...], paused: bool, mood: str, line: str | None) -> None:
    face = face_of(status(*states, paused=paused, detail="no memory"))
    assert face.mood == mood
    assert face.paused == paused
    assert (face.lines[-1] if face.lines else None) == line


def test_a_tooltip_is_never_longer_than_a_desktop_shows() -> None:
    face = face_of(status("ready", "ready", "ready"))
    assert len(face.tooltip) == MAX_TOOLTIP_CHARACTERS
    assert face.tooltip.endswith("…")
