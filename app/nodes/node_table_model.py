"""The fleet's nodes as a Qt model: rows keyed by node identity, changed cell by cell, never reset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt
from PySide6.QtGui import QBrush, QColor

from app.looks import words
from app.looks.icons import icon
from app.looks.theme import theme
from app.looks.widgets import plain_tooltip
from app.nodes.node_columns import COLUMNS, memory_of
from fleet.node import NodeId
from fleet.views import NodeView

SORT_ROLE = Qt.ItemDataRole.UserRole + 1
NODE_ROLE = Qt.ItemDataRole.UserRole + 2
"""The row's ``NodeView``."""
MEMORY_ROLE = Qt.ItemDataRole.UserRole + 3
"""The row's ``MemoryShare`` in the memory column, else None."""

Index = QModelIndex | QPersistentModelIndex
_NO_PARENT = QModelIndex()
_STATE_COLUMN = next(number for number, column in enumerate(COLUMNS) if column.key == "state")
_MEMORY_COLUMN = next(number for number, column in enumerate(COLUMNS) if column.key == "memory")

_Cells = tuple[tuple[str, str], ...]
"""Text and tooltip of every cell of a row."""


def _cells_of(node: NodeView) -> _Cells:
    return tuple((column.text(node), column.tooltip(node)) for column in COLUMNS)


class NodeTableModel(QAbstractTableModel):
    """One row per node, in the order in which they were first seen."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._nodes: list[NodeView] = []
        self._cells: list[_Cells] = []
        self._rows: dict[NodeId, int] = {}
        theme().changed.connect(self._retint)

    def set_nodes(self, nodes: Sequence[NodeView]) -> None:
        """Take a snapshot: rows come and go, and only cells that show something else now are announced."""
        wanted = {node.id: node for node in nodes}
        for row in range(len(self._nodes) - 1, -1, -1):
            if self._nodes[row].id not in wanted:
                self.beginRemoveRows(_NO_PARENT, row, row)
                del self._nodes[row], self._cells[row]
                self.endRemoveRows()
        self._rows = {node.id: row for row, node in enumerate(self._nodes)}
        for row, old in enumerate(self._nodes):
            self._change(row, old, wanted[old.id])
        new = [node for identity, node in wanted.items() if identity not in self._rows]
        if new:
            first = len(self._nodes)
            self.beginInsertRows(_NO_PARENT, first, first + len(new) - 1)
            self._nodes.extend(new)
            self._cells.extend(map(_cells_of, new))
            self._rows.update({node.id: first + offset for offset, node in enumerate(new)})
            self.endInsertRows()

    def node(self, identity: NodeId) -> NodeView | None:
        row = self._rows.get(identity)
        return None if row is None else self._nodes[row]

    def row_of(self, identity: NodeId) -> int | None:
        return self._rows.get(identity)

    def rowCount(self, parent: Index = _NO_PARENT) -> int:
        return 0 if parent.isValid() else len(self._nodes)

    def columnCount(self, parent: Index = _NO_PARENT) -> int:
        return 0 if parent.isValid() else len(COLUMNS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation == Qt.Orientation.Horizontal and 0 <= section < len(COLUMNS):
            if role == Qt.ItemDataRole.DisplayRole:
                return COLUMNS[section].title()
            if role == Qt.ItemDataRole.TextAlignmentRole:
                return Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        return None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        node, column = self._nodes[index.row()], COLUMNS[index.column()]
        if role == Qt.ItemDataRole.DisplayRole:
            return self._cells[index.row()][index.column()][0]
        if role == SORT_ROLE:
            return column.sort_key(node)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tooltip(column.tooltip(node) or column.text(node)) or None
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return f"{column.title()}: {column.text(node) or self.tr('unknown')}"
        if role == NODE_ROLE:
            return node
        if role == MEMORY_ROLE:
            return memory_of(node) if index.column() == _MEMORY_COLUMN else None
        if index.column() == _STATE_COLUMN:
            wording = words.node_state(node.state)
            colour = words.tone_colour(theme().tokens, wording.tone)
            if role == Qt.ItemDataRole.DecorationRole:
                return icon(wording.icon, colour)
            if role == Qt.ItemDataRole.ForegroundRole:
                return QBrush(QColor(colour))
        elif role == Qt.ItemDataRole.ForegroundRole and node.state in ("lost", "foreign"):
            return QBrush(QColor(theme().tokens.text_muted))
        return None

    def _change(self, row: int, old: NodeView, new: NodeView) -> None:
        if old == new:
            return
        before, after = self._cells[row], _cells_of(new)
        self._nodes[row], self._cells[row] = new, after
        changed = [number for number in range(len(COLUMNS)) if before[number] != after[number]]
        if old.state != new.state:
            changed = [0, len(COLUMNS) - 1]  # a lost node's whole row is drawn in another colour
        if changed:
            self.dataChanged.emit(self.index(row, min(changed)), self.index(row, max(changed)))

    def _retint(self) -> None:
        if self._nodes:
            roles = [Qt.ItemDataRole.DecorationRole, Qt.ItemDataRole.ForegroundRole]
            self.dataChanged.emit(self.index(0, 0), self.index(len(self._nodes) - 1, len(COLUMNS) - 1), roles)
