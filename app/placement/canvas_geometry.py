"""Where things are on the placement canvas. Free of widgets, so that dragging is tested as arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QRectF


@dataclass(frozen=True)
class CanvasGeometry:
    """Lanes below each other, one per node; in each a label, the layers' axis, and the memory."""

    width: float
    line_height: float
    layer_count: int
    lanes: int
    available_height: float = 0.0

    @property
    def margin(self) -> float:
        return self.line_height * 0.8

    @property
    def header_height(self) -> float:
        return self.line_height * 1.9

    @property
    def lane_height(self) -> float:
        room = (self.available_height - self.header_height - self.margin) / max(self.lanes, 1)
        return min(max(room, self.line_height * 3.4), self.line_height * 5.5)

    @property
    def label_width(self) -> float:
        return min(self.line_height * 10, self.width * 0.2)

    @property
    def memory_width(self) -> float:
        return min(self.line_height * 15, self.width * 0.28)

    @property
    def axis_left(self) -> float:
        return self.margin + self.label_width

    @property
    def axis_width(self) -> float:
        return max(self.width - self.axis_left - self.memory_width - 2.5 * self.margin, 40.0)

    @property
    def layer_width(self) -> float:
        return self.axis_width / max(self.layer_count, 1)

    @property
    def height(self) -> float:
        return self.header_height + self.lanes * self.lane_height + self.margin

    def x_of_layer(self, layer: int) -> float:
        """Left edge of a layer."""
        return self.axis_left + layer * self.layer_width

    def layer_at(self, x: float) -> int:
        """The boundary nearest to ``x``: the layer that would begin there."""
        return min(max(round((x - self.axis_left) / self.layer_width), 0), self.layer_count)

    def lane(self, number: int) -> QRectF:
        return QRectF(
            self.margin / 2, self.header_height + number * self.lane_height, self.width - self.margin, self.lane_height
        )

    def block(self, lane: int, layer: int) -> QRectF:
        """The block of a layer in a lane."""
        gap = min(1.5, self.layer_width * 0.15)
        area = self.lane(lane)
        height = min(self.lane_height * 0.6, self.line_height * 2.6)
        top = area.center().y() - height / 2
        return QRectF(self.x_of_layer(layer) + gap, top, self.layer_width - 2 * gap, height)

    def label(self, lane: int) -> QRectF:
        area = self.lane(lane)
        return QRectF(self.margin + 4, area.top(), self.label_width - 12, self.lane_height)

    def memory(self, lane: int) -> QRectF:
        area = self.lane(lane)
        left = self.axis_left + self.axis_width + self.margin
        return QRectF(left, area.top(), self.width - left - self.margin, self.lane_height)

    def boundary(self, number: int) -> QRectF:
        """The lanes' part through which a boundary's line runs: from its stage's lane into the next one's."""
        top = self.lane(number).top() + self.lane_height * 0.12
        bottom = self.lane(number + 1).bottom() - self.lane_height * 0.12
        return QRectF(0, top, 0, bottom - top)
