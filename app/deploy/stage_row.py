"""One stage of a deployment: where it goes and how far it is."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, QObject, Qt
from PySide6.QtWidgets import QGridLayout, QProgressBar

from app.deploy.transfer_meter import TransferMeter
from app.looks import words
from app.looks.widgets import StateLabel, muted, plain_label, plain_tooltip
from fleet.control_messages import StageStatus
from fleet.views import StageProgress

_STEPS = 1000


class StageRow(QObject):
    """The widgets of a stage in a row of its card's grid; they stay while their values change."""

    def __init__(self, grid: QGridLayout, row: int, stage: StageProgress, parent: QObject) -> None:
        super().__init__(parent)
        self._meter = TransferMeter()
        self._node = plain_label()
        self._layers = muted("", wrap=False)
        self._state = StateLabel()
        self._bar = QProgressBar()
        self._bar.setTextVisible(False)
        self._bar.setRange(0, _STEPS)
        self._bar.setFixedWidth(self._node.fontMetrics().averageCharWidth() * 26)
        self._figures = muted("")
        left = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        for column, widget in enumerate((self._node, self._layers, self._state, self._bar, self._figures)):
            if widget is self._figures:
                grid.addWidget(widget, row, column)
            else:
                grid.addWidget(widget, row, column, left)
        self._bar.setAccessibleName(self.tr("Progress of stage {number}").format(number=stage.stage))

    def show_stage(self, stage: StageProgress, now_s: float) -> None:
        """Bring the row up to date."""
        status = stage.status
        self._node.setText(stage.node_name)
        self._layers.setText(_layers(status))
        self._state.set_wording(words.stage_state(status.state if status is not None else None))
        self._state.setToolTip(plain_tooltip(status.detail) if status is not None else "")
        fraction = received_fraction(status)
        self._bar.setVisible(fraction is not None)
        if fraction is not None:
            self._bar.setValue(round(fraction * _STEPS))
        if status is not None and status.progress is not None and status.state == "receiving":
            self._meter.update(status.progress.done_bytes, now_s)
        self._figures.setText(stage_figures(status, self._meter, now_s))

    def figures_text(self) -> str:
        return self._figures.text()


def received_fraction(status: StageStatus | None) -> float | None:
    """Share of the stage's bytes that the node has, 0 to 1; None where there is nothing to receive any more."""
    if status is None:
        return 0.0
    if status.state != "receiving":
        return None
    if status.progress is None or status.progress.total_bytes == 0:
        return 0.0
    return min(status.progress.done_bytes / status.progress.total_bytes, 1.0)


def stage_figures(status: StageStatus | None, meter: TransferMeter, now_s: float) -> str:
    """Bytes, rate and time left of a transfer; memory and restarts of a stage that runs."""
    translate = QCoreApplication.translate
    if status is None:
        return ""
    parts: list[str] = []
    if status.state == "receiving" and status.progress is not None:
        progress = status.progress
        parts.append(
            translate("StageRow", "{done} of {total}").format(
                done=words.size(progress.done_bytes), total=words.size(progress.total_bytes)
            )
        )
        rate = meter.bytes_per_second(now_s)
        if rate is not None:
            parts.append(words.rate(rate))
        left = meter.seconds_left(progress.total_bytes, now_s)
        if left is not None:
            parts.append(translate("StageRow", "{time} left").format(time=words.duration(left)))
        if progress.held_bytes:
            parts.append(
                translate("StageRow", "{size} were there already").format(size=words.size(progress.held_bytes))
            )
    else:
        if status.device:
            parts.append(translate("StageRow", "on {device}").format(device=status.device))
        if status.memory_bytes:
            parts.append(translate("StageRow", "{size} of memory").format(size=words.size(status.memory_bytes)))
        if status.restarts:
            parts.append(translate("StageRow", "restarted {count} times").format(count=status.restarts))
    return " · ".join(parts)


def _layers(status: StageStatus | None) -> str:
    return "" if status is None else words.layer_range(status.first_layer, status.end_layer)
