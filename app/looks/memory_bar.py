"""Bars that show parts of a memory against a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QColor, QPainter, QPainterPath, QPen

from app.looks.tokens import Tokens


@dataclass(frozen=True)
class BarPart:
    """A part of a bar: bytes and the colour (``#rrggbb``) that stands for it."""

    bytes: int
    colour: str


def paint_bar(
    painter: QPainter,
    area: QRectF,
    tokens: Tokens,
    parts: Sequence[BarPart],
    limit_bytes: int,
    *,
    mark_bytes: int | None = None,
) -> None:
    """Draw ``parts`` side by side against ``limit_bytes``, which is the bar's full width.

    Where the parts exceed the limit the bar stretches to their sum, the limit is marked, and what lies beyond is
    hatched as well as red. ``mark_bytes`` draws a thin mark, such as a node's budget within its whole memory.
    """
    total = sum(part.bytes for part in parts)
    scale = max(total, limit_bytes, 1)
    painter.save()
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    radius = min(area.height() / 2, 4.0)
    outline = QPainterPath()
    outline.addRoundedRect(area, radius, radius)
    painter.fillPath(outline, QColor(tokens.bar_track))
    painter.setClipPath(outline)
    left = area.left()
    for part in parts:
        width = area.width() * part.bytes / scale
        painter.fillRect(QRectF(left, area.top(), width, area.height()), QColor(part.colour))
        left += width
    if total > limit_bytes:
        edge = area.left() + area.width() * limit_bytes / scale
        beyond = QRectF(edge, area.top(), area.right() - edge, area.height())
        painter.fillRect(beyond, QColor(tokens.bar_over))
        painter.fillRect(beyond, Qt.BrushStyle.BDiagPattern)
        painter.setPen(QPen(QColor(tokens.text), 2))
        painter.drawLine(beyond.topLeft(), beyond.bottomLeft())
    if mark_bytes is not None and 0 < mark_bytes < scale:
        place = area.left() + area.width() * mark_bytes / scale
        painter.setPen(QPen(QColor(tokens.text_muted), 1.5))
        painter.drawLine(
            QRectF(place, area.top(), 0, area.height()).topLeft(),
            QRectF(place, area.top(), 0, area.height()).bottomLeft(),
        )
    painter.restore()
