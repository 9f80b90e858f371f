"""Where the person writes: Enter sends, Shift+Enter begins a new line, and the field grows with its text."""

from __future__ import annotations

from math import ceil

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QPlainTextEdit, QWidget

_MAX_LINES = 8


class PromptField(QPlainTextEdit):
    """A text field for the next question.

    Signals:
        submitted: Enter was pressed on a text that is not blank.
    """

    submitted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setPlaceholderText(self.tr("Ask something…  (Enter sends, Shift+Enter begins a new line)"))
        self.setAccessibleName(self.tr("Your message"))
        self.setTabChangesFocus(True)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAsNeeded)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.document().documentLayout().documentSizeChanged.connect(self._fit_height)
        self._fit_height()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if enter and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            event.accept()
            if self.toPlainText().strip():
                self.submitted.emit()
            return
        super().keyPressEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_height()

    def _fit_height(self) -> None:
        # The document layout of a QPlainTextEdit measures its height in lines.
        lines = min(max(ceil(self.document().size().height()), 1), _MAX_LINES)
        margin = self.document().documentMargin() * 2
        self.setFixedHeight(ceil(lines * self.fontMetrics().lineSpacing() + margin) + 14)
