"""The scrolling list of questions and answers."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QScrollArea, QVBoxLayout, QWidget

from app.looks.widgets import ThemedButton

_NEAR_END = 24
"""Pixels from the end within which the reader counts as being at the end."""


class ConversationView(QScrollArea):
    """Follows the newest text only while the reader is at the end; whoever has scrolled up stays there."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(self.tr("Conversation"))
        self._follow = True
        self._content = QWidget(self)
        self._content.setProperty("scrolled", True)
        self._column = QVBoxLayout(self._content)
        self._column.setContentsMargins(8, 8, 8, 8)
        self._column.setSpacing(18)
        self._column.addStretch(1)
        self.setWidget(self._content)
        self._to_end = ThemedButton("down", self.tr("Jump to the newest text"), self, clicked=self.scroll_to_end)
        self._to_end.setProperty("floating", True)
        self._to_end.hide()
        self.verticalScrollBar().valueChanged.connect(self._on_value)
        self.verticalScrollBar().rangeChanged.connect(self._on_range)

    @property
    def follows(self) -> bool:
        """Whether the newest text is kept in sight."""
        return self._follow

    def add_message(self, widget: QWidget) -> None:
        self._column.insertWidget(self._column.count() - 1, widget)

    def clear(self) -> None:
        while self._column.count() > 1:
            item = self._column.takeAt(0)
            widget = item.widget() if item is not None else None
            if widget is not None:
                widget.hide()
                widget.deleteLater()
        self._follow = True

    def scroll_to_end(self) -> None:
        self._follow = True
        self.verticalScrollBar().setValue(self.verticalScrollBar().maximum())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        side = max(8, (self.viewport().width() - self.fontMetrics().averageCharWidth() * 120) // 2)
        self._column.setContentsMargins(side, 8, side, 8)
        self._place_button()

    def _on_value(self, value: int) -> None:
        self._follow = value >= self.verticalScrollBar().maximum() - _NEAR_END
        self._to_end.setVisible(not self._follow)
        self._place_button()

    def _on_range(self, _minimum: int, maximum: int) -> None:
        if self._follow:
            self.verticalScrollBar().setValue(maximum)

    def _place_button(self) -> None:
        self._to_end.adjustSize()
        self._to_end.move(
            (self.width() - self._to_end.width()) // 2, self.viewport().height() - self._to_end.height() - 10
        )
        self._to_end.raise_()
