"""How far a build is, with a button that stops it. Hidden while nothing is built."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, Signal
from PySide6.QtWidgets import QHBoxLayout, QLabel, QProgressBar, QPushButton, QWidget

from app.looks import words
from app.looks.widgets import Card
from fleet.build_messages import BuildPhase, BuildProgress

_STEPS = 1000


class BuildStrip(Card):
    """Phase, share and bytes of a build.

    Signals:
        cancel_wanted: the person stops the build.
    """

    cancel_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, margin=10)
        self._text = QLabel(self)
        self._bar = QProgressBar(self)
        self._bar.setTextVisible(False)
        self._bar.setRange(0, _STEPS)
        self._bar.setAccessibleName(self.tr("Progress of the build"))
        cancel = QPushButton(self.tr("Cancel build"), self)
        cancel.clicked.connect(self.cancel_wanted)
        row = QHBoxLayout()
        row.setSpacing(14)
        row.addWidget(self._text)
        row.addWidget(self._bar, 1)
        row.addWidget(cancel)
        self.body.addLayout(row)
        self.hide()

    def show_progress(self, progress: BuildProgress | None) -> None:
        """None: nothing is built."""
        self.setVisible(progress is not None)
        if progress is None:
            return
        self._bar.setValue(round(progress.fraction * _STEPS))
        text = phase_text(progress.phase)
        if progress.remark:
            self._text.setToolTip(progress.remark)
        if progress.bytes_total:
            text = self.tr("{phase}: {done} of {total}").format(
                phase=text, done=words.size(progress.bytes_done), total=words.size(progress.bytes_total)
            )
        if progress.seconds_left is not None:
            text = self.tr("{progress}, {rate}, {time} left").format(
                progress=text,
                rate=words.rate(progress.bytes_per_second),
                time=words.duration(progress.seconds_left),
            )
        self._text.setText(text)

    def text(self) -> str:
        return self._text.text()


def phase_text(phase: BuildPhase) -> str:
    translate = QCoreApplication.translate
    texts: dict[BuildPhase, str] = {
        "download": translate("BuildStrip", "Downloading the model"),
        "convert": translate("BuildStrip", "Converting the model"),
        "compress": translate("BuildStrip", "Compressing the weights"),
        "analyse": translate("BuildStrip", "Finding the layers"),
        "write": translate("BuildStrip", "Writing the shards"),
        "verify": translate("BuildStrip", "Checking the shards against the whole model"),
    }
    return texts[phase]
