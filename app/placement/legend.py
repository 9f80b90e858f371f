"""What the colours of the memory bars stand for."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize
from PySide6.QtGui import QColor, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.looks.theme import theme


class MemoryLegend(QWidget):
    """Weights, KV cache and runtime, each with its colour."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        theme().changed.connect(self.update)

    def sizeHint(self) -> QSize:
        line = self.fontMetrics().height()
        width = sum(self.fontMetrics().horizontalAdvance(text) + line * 2 for text, _colour in self._entries())
        return QSize(width, line + 4)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        line = self.fontMetrics().height()
        left = 0.0
        for text, colour in self._entries():
            side = line * 0.7
            painter.setBrush(QColor(colour))
            painter.setPen(QColor(colour))
            painter.drawRoundedRect(QRectF(left, (self.height() - side) / 2, side, side), 2, 2)
            painter.setPen(QColor(theme().tokens.text_muted))
            painter.drawText(round(left + line), round((self.height() + self.fontMetrics().ascent()) / 2) - 1, text)
            left += self.fontMetrics().horizontalAdvance(text) + line * 2
        painter.end()

    def _entries(self) -> tuple[tuple[str, str], ...]:
        tokens = theme().tokens
        return (
            (self.tr("Weights"), tokens.bar_weights),
            (self.tr("KV cache"), tokens.bar_cache),
            (self.tr("Runtime"), tokens.bar_runtime),
        )
