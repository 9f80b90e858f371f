"""Sorting and filtering of the node table."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QObject, QPersistentModelIndex, QSortFilterProxyModel, Qt

from app.nodes.node_columns import COLUMNS
from app.nodes.node_table_model import SORT_ROLE


class NodeFilter(QSortFilterProxyModel):
    """Keeps the rows in which every word of the filter appears in some column, in any case."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._words: tuple[str, ...] = ()
        self.setSortRole(SORT_ROLE)
        self.setDynamicSortFilter(True)

    def set_filter_text(self, text: str) -> None:
        self.beginFilterChange()
        self._words = tuple(text.casefold().split())
        self.endFilterChange()

    def filterAcceptsRow(self, source_row: int, source_parent: QModelIndex | QPersistentModelIndex) -> bool:
        if not self._words:
            return True
        model = self.sourceModel()
        texts = [
            str(model.index(source_row, column, source_parent).data(Qt.ItemDataRole.DisplayRole) or "").casefold()
            for column in range(len(COLUMNS))
        ]
        return all(any(word in text for text in texts) for word in self._words)
