"""What is drawn on the placement canvas. Items only draw; all rules are the draft's."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, QRectF, Qt
from PySide6.QtGui import QColor, QFont, QPainter, QPen
from PySide6.QtWidgets import QGraphicsItem, QStyleOptionGraphicsItem, QWidget

from app.looks import words
from app.looks.memory_bar import BarPart, paint_bar
from app.looks.tokens import Tokens
from app.placement.assessment import Assessment
from app.placement.canvas_geometry import CanvasGeometry

_LEFT = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter


class LanesItem(QGraphicsItem):
    """Everything but the boundaries: the axis, and per node its label, its layers and its memory."""

    def __init__(self, font: QFont) -> None:
        super().__init__()
        self._font = font
        self._geometry: CanvasGeometry | None = None
        self._assessment: Assessment | None = None
        self._tokens: Tokens | None = None
        self._chosen_stage = -1

    def show_assessment(
        self, geometry: CanvasGeometry, assessment: Assessment, tokens: Tokens, chosen_stage: int
    ) -> None:
        if geometry != self._geometry:
            self.prepareGeometryChange()
        self._geometry, self._assessment, self._tokens = geometry, assessment, tokens
        self._chosen_stage = chosen_stage
        self.update()

    def boundingRect(self) -> QRectF:
        return QRectF() if self._geometry is None else QRectF(0, 0, self._geometry.width, self._geometry.height)

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None) -> None:
        geometry, assessment, tokens = self._geometry, self._assessment, self._tokens
        if geometry is None or assessment is None or tokens is None:
            return
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(self._font)
        self._paint_axis(painter, geometry, assessment, tokens)
        for lane in range(len(assessment.stages)):
            self._paint_lane(painter, geometry, assessment, tokens, lane)

    def _paint_axis(self, painter: QPainter, geometry: CanvasGeometry, assessment: Assessment, tokens: Tokens) -> None:
        painter.setPen(QColor(tokens.text_muted))
        count = geometry.layer_count
        digits = painter.fontMetrics().horizontalAdvance("000") * 1.6
        step = next(
            (step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 50, 100) if step * geometry.layer_width >= digits),
            100,
        )
        top = QRectF(0, 0, 0, geometry.header_height)
        for layer in range(0, count, step):
            place = QRectF(geometry.x_of_layer(layer), top.top(), geometry.layer_width, geometry.header_height)
            center = place.center().x()
            painter.drawText(
                QRectF(center - 40, 0, 80, geometry.header_height), Qt.AlignmentFlag.AlignCenter, str(layer)
            )
        label = geometry.label(0)
        painter.drawText(
            QRectF(label.left(), 0, label.width(), geometry.header_height),
            _LEFT,
            QCoreApplication.translate("Canvas", "PC"),
        )
        memory = geometry.memory(0)
        painter.drawText(
            QRectF(memory.left(), 0, memory.width(), geometry.header_height),
            _LEFT,
            QCoreApplication.translate("Canvas", "Memory needed of its budget"),
        )

    def _paint_lane(
        self, painter: QPainter, geometry: CanvasGeometry, assessment: Assessment, tokens: Tokens, lane: int
    ) -> None:
        stage = assessment.stages[lane]
        over = assessment.over_budget(lane)
        area = geometry.lane(lane)
        if lane == self._chosen_stage:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(QColor(tokens.raised))
            painter.drawRoundedRect(area.adjusted(0, 2, 0, -2), 8, 8)
        painter.setPen(QPen(QColor(tokens.border), 1))
        painter.drawLine(area.bottomLeft(), area.bottomRight())
        self._paint_blocks(painter, geometry, tokens, lane, stage.first_layer, stage.end_layer, over)
        label = geometry.label(lane)
        line = painter.fontMetrics().height()
        bold = QFont(self._font)
        bold.setBold(True)
        painter.setFont(bold)
        painter.setPen(QColor(tokens.text))
        top = label.center().y() - line
        name = painter.fontMetrics().elidedText(stage.node_name, Qt.TextElideMode.ElideRight, int(label.width()))
        painter.drawText(QRectF(label.left(), top, label.width(), line), _LEFT, name)
        painter.setFont(self._font)
        painter.setPen(QColor(tokens.text_muted))
        layers = words.layer_range(stage.first_layer, stage.end_layer)
        below = painter.fontMetrics().elidedText(
            f"{stage.device}, {layers}", Qt.TextElideMode.ElideRight, int(label.width())
        )
        painter.drawText(QRectF(label.left(), top + line, label.width(), line), _LEFT, below)
        self._paint_memory(painter, geometry.memory(lane), tokens, assessment, lane)

    def _paint_blocks(
        self,
        painter: QPainter,
        geometry: CanvasGeometry,
        tokens: Tokens,
        lane: int,
        first_layer: int,
        end_layer: int,
        over: bool,
    ) -> None:
        fill = QColor(tokens.stages[lane % len(tokens.stages)])
        radius = min(4.0, geometry.layer_width / 4)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(tokens.bar_track))
        middle = geometry.block(lane, 0).center().y()
        painter.drawRoundedRect(QRectF(geometry.axis_left, middle - 1.5, geometry.axis_width, 3), 1.5, 1.5)
        for layer in range(first_layer, end_layer):
            painter.setBrush(fill)
            painter.setPen(QPen(QColor(tokens.error), 2) if over else Qt.PenStyle.NoPen)
            painter.drawRoundedRect(geometry.block(lane, layer), radius, radius)
        count = str(end_layer - first_layer)
        whole = geometry.block(lane, first_layer).united(geometry.block(lane, end_layer - 1))
        if whole.width() > painter.fontMetrics().horizontalAdvance(count) + 8:
            ground = QRectF(
                0, 0, painter.fontMetrics().horizontalAdvance(count) + 12, painter.fontMetrics().height() + 2
            )
            ground.moveCenter(whole.center())
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(fill)
            painter.drawRoundedRect(ground, 5, 5)
            painter.setPen(QColor(tokens.text_on_stage))
            painter.drawText(ground, Qt.AlignmentFlag.AlignCenter, count)

    def _paint_memory(self, painter: QPainter, area: QRectF, tokens: Tokens, assessment: Assessment, lane: int) -> None:
        stage = assessment.stages[lane]
        over = assessment.over_budget(lane)
        line = painter.fontMetrics().height()
        top = area.center().y() - line
        painter.setPen(QColor(tokens.error if over else tokens.text))
        pattern = (
            QCoreApplication.translate("Canvas", "{need} of {budget}: too much")
            if over
            else QCoreApplication.translate("Canvas", "{need} of {budget}")
        )
        text = pattern.format(need=words.size(stage.needed_bytes), budget=words.size(stage.budget_bytes))
        text = painter.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, int(area.width()))
        painter.drawText(QRectF(area.left(), top, area.width(), line), _LEFT, text)
        paint_bar(
            painter,
            QRectF(area.left(), top + line + 4, area.width(), line * 0.65),
            tokens,
            (
                BarPart(stage.weight_bytes, tokens.bar_weights),
                BarPart(stage.kv_bytes, tokens.bar_cache),
                BarPart(stage.runtime_bytes, tokens.bar_runtime),
            ),
            stage.budget_bytes,
        )


class BoundaryItem(QGraphicsItem):
    """The line between two stages, with a grip. The view moves it; the item only says where it is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self._span = QRectF()
        self._tokens: Tokens | None = None
        self._chosen = False
        self.setCursor(Qt.CursorShape.SplitHCursor)
        self.setZValue(1)

    def show_boundary(self, x: float, span: QRectF, tokens: Tokens, chosen: bool) -> None:
        if span != self._span:
            self.prepareGeometryChange()
        self._span, self._tokens, self._chosen = span, tokens, chosen
        self.setPos(x, 0)
        self.update()

    def boundingRect(self) -> QRectF:
        return self._span.adjusted(-9, -2, 9, 2)

    def paint(self, painter: QPainter, option: QStyleOptionGraphicsItem, widget: QWidget | None = None) -> None:
        if self._tokens is None:
            return
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        colour = QColor(self._tokens.accent if self._chosen else self._tokens.border_strong)
        painter.setPen(QPen(colour, 2.5 if self._chosen else 1.5))
        painter.drawLine(self._span.topLeft(), self._span.bottomLeft())
        grip = QRectF(-5, self._span.center().y() - 11, 10, 22)
        painter.setBrush(QColor(self._tokens.surface))
        painter.drawRoundedRect(grip, 5, 5)
        for offset in (-4, 0, 4):
            y = grip.center().y() + offset
            painter.drawLine(QRectF(-2, y, 4, 0).topLeft(), QRectF(-2, y, 4, 0).topRight())
