"""The placement as a table: the same draft as the canvas, for the keyboard and for screen readers."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt, Signal
from PySide6.QtGui import QBrush, QColor

from app.looks import words
from app.looks.icons import icon
from app.looks.theme import theme
from app.placement.assessment import Assessment
from fleet.placement import PlannedStage

Index = QModelIndex | QPersistentModelIndex
_NO_PARENT = QModelIndex()
_NODE, _DEVICE, _FIRST, _LAYERS, _WEIGHTS, _CACHE, _RUNTIME, _NEEDS, _BUDGET = range(9)


class StageTableModel(QAbstractTableModel):
    """One row per stage. The number of layers can be edited.

    Signals:
        layers_edited: stage and the number of layers that the person typed.
    """

    layers_edited = Signal(int, int)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._assessment: Assessment | None = None
        theme().changed.connect(self._announce_all)

    def set_assessment(self, assessment: Assessment | None) -> None:
        """Show this draft; rows come and go only where the number of stages changes."""
        old, new = self.rowCount(), 0 if assessment is None else len(assessment.stages)
        if new > old:
            self.beginInsertRows(_NO_PARENT, old, new - 1)
            self._assessment = assessment
            self.endInsertRows()
        elif new < old:
            self.beginRemoveRows(_NO_PARENT, new, old - 1)
            self._assessment = assessment
            self.endRemoveRows()
        else:
            self._assessment = assessment
        self._announce_all()

    def rowCount(self, parent: Index = _NO_PARENT) -> int:
        return 0 if parent.isValid() or self._assessment is None else len(self._assessment.stages)

    def columnCount(self, parent: Index = _NO_PARENT) -> int:
        return 0 if parent.isValid() else 9

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation != Qt.Orientation.Horizontal or not 0 <= section < 9:
            return None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return self._alignment(section)
        if role == Qt.ItemDataRole.DisplayRole:
            return (
                self.tr("PC"),
                self.tr("Device"),
                self.tr("From layer"),
                self.tr("Layers"),
                self.tr("Weights"),
                self.tr("KV cache"),
                self.tr("Runtime"),
                self.tr("Needs"),
                self.tr("Budget"),
            )[section]
        return None

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = super().flags(index)
        if index.isValid() and index.column() == _LAYERS and self.rowCount() > 1:
            flags |= Qt.ItemFlag.ItemIsEditable
        return flags

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid() or self._assessment is None:
            return None
        stage = self._assessment.stages[index.row()]
        column = index.column()
        over = self._assessment.over_budget(index.row())
        if role == Qt.ItemDataRole.DisplayRole:
            return _text(stage, column)
        if role == Qt.ItemDataRole.EditRole and column == _LAYERS:
            return stage.end_layer - stage.first_layer
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return self._alignment(column)
        if role == Qt.ItemDataRole.AccessibleTextRole:
            title = self.headerData(column, Qt.Orientation.Horizontal)
            text = f"{title}: {_text(stage, column)}"
            return self.tr("{text}, over the budget").format(text=text) if over and column == _NEEDS else text
        if role == Qt.ItemDataRole.ToolTipRole and column == _LAYERS and self.rowCount() > 1:
            return self.tr("Press F2 or double-click to type another number of layers")
        if over and column == _NEEDS:
            if role == Qt.ItemDataRole.ForegroundRole:
                return QBrush(QColor(theme().tokens.error))
            if role == Qt.ItemDataRole.DecorationRole:
                return icon("state-error", theme().tokens.error)
            if role == Qt.ItemDataRole.ToolTipRole:
                return self.tr("More than the PC has free for stages")
        return None

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        if role != Qt.ItemDataRole.EditRole or not index.isValid() or index.column() != _LAYERS:
            return False
        self.layers_edited.emit(index.row(), int(value))
        return True

    @staticmethod
    def _alignment(column: int) -> Qt.AlignmentFlag:
        horizontal = Qt.AlignmentFlag.AlignLeft if column in (_NODE, _DEVICE) else Qt.AlignmentFlag.AlignRight
        return horizontal | Qt.AlignmentFlag.AlignVCenter

    def _announce_all(self) -> None:
        if self.rowCount():
            self.dataChanged.emit(self.index(0, 0), self.index(self.rowCount() - 1, 8))


def _text(stage: PlannedStage, column: int) -> str:
    match column:
        case 0:
            return stage.node_name
        case 1:
            return stage.device
        case 2:
            return str(stage.first_layer)
        case 3:
            return str(stage.end_layer - stage.first_layer)
        case 4:
            return words.size(stage.weight_bytes)
        case 5:
            return words.size(stage.kv_bytes)
        case 6:
            return words.size(stage.runtime_bytes)
        case 7:
            return words.size(stage.needed_bytes)
        case _:
            return words.size(stage.budget_bytes)
