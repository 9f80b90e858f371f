"""The placement as a picture that can be changed: boundaries are dragged, or moved with the arrow keys."""

from __future__ import annotations

from PySide6.QtCore import QPointF, QSize, Qt, Signal
from PySide6.QtGui import QFocusEvent, QKeyEvent, QMouseEvent, QResizeEvent
from PySide6.QtWidgets import QGraphicsScene, QGraphicsView, QSizePolicy, QWidget

from app.looks.theme import theme
from app.placement.assessment import Assessment
from app.placement.canvas_geometry import CanvasGeometry
from app.placement.canvas_items import BoundaryItem, LanesItem

BIG_STEP_LAYERS = 5


class PlacementCanvas(QGraphicsView):
    """Draws an ``Assessment``. What the person does goes out as signals; the answer is a new assessment.

    Signals:
        boundary_dragged: boundary and the layer that it is over now; the drag goes on.
        drag_finished: the mouse was let go.
        boundary_stepped: boundary and by how many layers a key moves it.
        stage_moved: stage and -1 or 1, its new place in the order.
        stage_chosen: the stage whose lane was clicked or reached with a key.
    """

    boundary_dragged = Signal(int, int)
    drag_finished = Signal()
    boundary_stepped = Signal(int, int)
    stage_moved = Signal(int, int)
    stage_chosen = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._assessment: Assessment | None = None
        self._chosen_boundary = 0
        self._chosen_stage = 0
        self._dragged: int | None = None
        self.setScene(QGraphicsScene(self))
        self._lanes = LanesItem(self.font())
        self.scene().addItem(self._lanes)
        self._boundaries: list[BoundaryItem] = []
        self.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setMouseTracking(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(self.tr("Layers of the model on the PCs"))
        self.setAccessibleDescription(
            self.tr(
                "Up and down choose a boundary between two PCs, left and right move it by one layer, with Shift or "
                "Ctrl by five. The table beside it shows the same and can be edited too."
            )
        )
        theme().changed.connect(self._draw)

    def set_assessment(self, assessment: Assessment | None) -> None:
        """Draw this placement."""
        self._assessment = assessment
        boundaries = 0 if assessment is None else len(assessment.draft.cuts)
        self._chosen_boundary = min(self._chosen_boundary, max(boundaries - 1, 0))
        if assessment is not None:
            self._chosen_stage = min(self._chosen_stage, len(assessment.stages) - 1)
        while len(self._boundaries) > boundaries:
            self.scene().removeItem(self._boundaries.pop())
        while len(self._boundaries) < boundaries:
            item = BoundaryItem(len(self._boundaries))
            self._boundaries.append(item)
            self.scene().addItem(item)
        self._draw()

    @property
    def chosen_stage(self) -> int:
        return self._chosen_stage

    def choose_stage(self, stage: int) -> None:
        """Mark a stage's lane."""
        if self._assessment is not None and 0 <= stage < len(self._assessment.stages) and stage != self._chosen_stage:
            self._chosen_stage = stage
            self._draw()

    def canvas_geometry(self) -> CanvasGeometry | None:
        """Where everything is now; None while nothing is drawn."""
        if self._assessment is None:
            return None
        return CanvasGeometry(
            width=max(float(self.viewport().width()), 480.0),
            line_height=float(self.fontMetrics().height()),
            layer_count=self._assessment.draft.layer_count,
            lanes=len(self._assessment.stages),
            available_height=float(self.viewport().height()),
        )

    def begin_drag(self, position: QPointF) -> bool:
        """Take hold of the boundary at a place of the scene; False where there is none."""
        boundary = self._boundary_at(position)
        if boundary is None:
            return False
        self._dragged = self._chosen_boundary = boundary
        self._draw()
        return True

    def drag_to(self, position: QPointF) -> None:
        """Move the boundary that is held to a place of the scene."""
        geometry = self.canvas_geometry()
        if self._dragged is None or geometry is None or self._assessment is None:
            return
        layer = geometry.layer_at(position.x())
        if layer != self._assessment.draft.cuts[self._dragged]:
            self.boundary_dragged.emit(self._dragged, layer)

    def end_drag(self) -> None:
        """Let go."""
        if self._dragged is not None:
            self._dragged = None
            self.drag_finished.emit()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        place = self.mapToScene(event.position().toPoint())
        if event.button() == Qt.MouseButton.LeftButton and not self.begin_drag(place):
            self._choose_lane_at(place)
        event.accept()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        place = self.mapToScene(event.position().toPoint())
        if self._dragged is not None:
            self.drag_to(place)
        over = self._dragged is not None or self._boundary_at(place) is not None
        self.viewport().setCursor(Qt.CursorShape.SplitHCursor if over else Qt.CursorShape.ArrowCursor)
        event.accept()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self.end_drag()
        event.accept()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        modifiers = event.modifiers()
        big = modifiers & (Qt.KeyboardModifier.ShiftModifier | Qt.KeyboardModifier.ControlModifier)
        step = BIG_STEP_LAYERS if big else 1
        alternative = bool(modifiers & Qt.KeyboardModifier.AltModifier)
        key = event.key()
        if key in (Qt.Key.Key_Left, Qt.Key.Key_Right) and self._boundaries and not alternative:
            self.boundary_stepped.emit(self._chosen_boundary, -step if key == Qt.Key.Key_Left else step)
        elif key in (Qt.Key.Key_Up, Qt.Key.Key_Down) and self._assessment is not None:
            direction = -1 if key == Qt.Key.Key_Up else 1
            if alternative:
                self.stage_moved.emit(self._chosen_stage, direction)
            else:
                self._choose_boundary(self._chosen_boundary + direction)
        else:
            super().keyPressEvent(event)
            return
        event.accept()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._draw()

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self._draw()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self._draw()

    def sizeHint(self) -> QSize:
        geometry = self.canvas_geometry()
        return QSize(800, 240 if geometry is None else round(geometry.height) + 4)

    def _boundary_at(self, position: QPointF) -> int | None:
        for item in self._boundaries:
            if item.mapRectToScene(item.boundingRect()).contains(position):
                return item.number
        return None

    def _choose_lane_at(self, position: QPointF) -> None:
        geometry = self.canvas_geometry()
        if geometry is None:
            return
        for lane in range(geometry.lanes):
            if geometry.lane(lane).contains(position):
                self.choose_stage(lane)
                self.stage_chosen.emit(lane)

    def _choose_boundary(self, boundary: int) -> None:
        if 0 <= boundary < len(self._boundaries):
            self._chosen_boundary = boundary
            self.choose_stage(boundary)
            self.stage_chosen.emit(self._chosen_stage)
            self._draw()

    def _draw(self) -> None:
        geometry, assessment = self.canvas_geometry(), self._assessment
        self._lanes.setVisible(assessment is not None)
        if geometry is None or assessment is None:
            return
        tokens = theme().tokens
        self._lanes.show_assessment(geometry, assessment, tokens, self._chosen_stage)
        for item, cut in zip(self._boundaries, assessment.draft.cuts, strict=True):
            chosen = item.number == self._dragged or (self.hasFocus() and item.number == self._chosen_boundary)
            item.show_boundary(geometry.x_of_layer(cut), geometry.boundary(item.number), tokens, chosen)
        self.setSceneRect(0, 0, geometry.width, geometry.height)
        self.updateGeometry()
