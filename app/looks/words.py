"""States, sizes and times in words, with the icon and tone that go with them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from PySide6.QtCore import QCoreApplication, QLocale

from app.looks.tokens import Tokens
from fleet.control_messages import StageState
from fleet.views import DeploymentState, NodeState

Tone = Literal["ok", "warning", "error", "planned", "muted"]


class Wording(NamedTuple):
    """How a state is shown: never by colour alone."""

    text: str
    icon: str
    tone: Tone


def tone_colour(tokens: Tokens, tone: Tone) -> str:
    return tokens.text_muted if tone == "muted" else str(getattr(tokens, tone))


def node_state(state: NodeState) -> Wording:
    translate = QCoreApplication.translate
    wordings: dict[NodeState, Wording] = {
        "found": Wording(translate("Words", "Found, not enrolled"), "state-new", "planned"),
        "connecting": Wording(translate("Words", "Connecting"), "state-busy", "planned"),
        "ready": Wording(translate("Words", "Ready"), "state-ok", "ok"),
        "paused": Wording(translate("Words", "Paused by owner"), "state-paused", "warning"),
        "suspect": Wording(translate("Words", "Slow to answer"), "state-warning", "warning"),
        "lost": Wording(translate("Words", "Lost"), "state-error", "error"),
        "refused": Wording(translate("Words", "Refused"), "state-error", "error"),
        "foreign": Wording(translate("Words", "In another fleet"), "state-off", "muted"),
    }
    return wordings[state]


def deployment_state(state: DeploymentState) -> Wording:
    translate = QCoreApplication.translate
    wordings: dict[DeploymentState, Wording] = {
        "planning": Wording(translate("Words", "Planning"), "state-busy", "planned"),
        "sending": Wording(translate("Words", "Sending shards"), "state-busy", "planned"),
        "starting": Wording(translate("Words", "Starting"), "state-busy", "planned"),
        "probing": Wording(translate("Words", "Testing with a first token"), "state-busy", "planned"),
        "ready": Wording(translate("Words", "Ready"), "state-ok", "ok"),
        "degraded": Wording(translate("Words", "Degraded"), "state-warning", "warning"),
        "failed": Wording(translate("Words", "Failed"), "state-error", "error"),
        "cancelled": Wording(translate("Words", "Cancelled"), "state-off", "muted"),
        "stopped": Wording(translate("Words", "Stopped"), "state-off", "muted"),
    }
    return wordings[state]


def stage_state(state: StageState | None) -> Wording:
    translate = QCoreApplication.translate
    wordings: dict[StageState | None, Wording] = {
        None: Wording(translate("Words", "Waiting"), "state-off", "muted"),
        "receiving": Wording(translate("Words", "Receiving"), "state-busy", "planned"),
        "received": Wording(translate("Words", "Received"), "state-ok", "planned"),
        "starting": Wording(translate("Words", "Loading"), "state-busy", "planned"),
        "ready": Wording(translate("Words", "Ready"), "state-ok", "ok"),
        "restarting": Wording(translate("Words", "Restarting"), "state-warning", "warning"),
        "failed": Wording(translate("Words", "Failed"), "state-error", "error"),
        "stopping": Wording(translate("Words", "Stopping"), "state-off", "muted"),
    }
    return wordings[state]


def size(size_bytes: float) -> str:
    """Bytes in the unit that people read, in binary units: '7.6 GiB'."""
    return QLocale().formattedDataSize(max(round(size_bytes), 0), 1, QLocale.DataSizeFormat.DataSizeIecFormat)


def rate(bytes_per_second: float) -> str:
    return QCoreApplication.translate("Words", "{size}/s").format(size=size(bytes_per_second))


def duration(seconds: float) -> str:
    """A span of time as people say it: '8 s', '3 min', '1 h 20 min'."""
    translate = QCoreApplication.translate
    whole = max(round(seconds), 0)
    if whole < 60:
        return translate("Words", "{seconds} s").format(seconds=whole)
    minutes = round(whole / 60)
    if minutes < 60:
        return translate("Words", "{minutes} min").format(minutes=minutes)
    return translate("Words", "{hours} h {minutes} min").format(hours=minutes // 60, minutes=minutes % 60)


def layer_range(first_layer: int, end_layer: int) -> str:
    """Layers ``first_layer`` to ``end_layer`` (exclusive) as people count them, from 0."""
    translate = QCoreApplication.translate
    if end_layer - first_layer == 1:
        return translate("Words", "layer {layer}").format(layer=first_layer)
    return translate("Words", "layers {first} to {last}").format(first=first_layer, last=end_layer - 1)
