"""Paints a node's memory as a bar with its text."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QRectF, Qt
from PySide6.QtGui import QColor, QPainter
from PySide6.QtWidgets import QApplication, QStyle, QStyledItemDelegate, QStyleOptionViewItem

from app.looks.memory_bar import BarPart, paint_bar
from app.looks.theme import theme
from app.nodes.node_columns import MemoryShare
from app.nodes.node_table_model import MEMORY_ROLE


class MemoryDelegate(QStyledItemDelegate):
    """Text above, bar below: used memory in the whole, with a mark at the most that stages may take."""

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        memory = index.data(MEMORY_ROLE)
        if not isinstance(memory, MemoryShare):
            super().paint(painter, option, index)
            return
        tokens = theme().tokens
        styled = QStyleOptionViewItem(option)
        self.initStyleOption(styled, index)
        styled.text = ""
        style = styled.widget.style() if styled.widget is not None else QApplication.style()
        style.drawControl(QStyle.ControlElement.CE_ItemViewItem, styled, painter, styled.widget)
        area = QRectF(option.rect).adjusted(8, 0, -12, 0)
        text_height = option.fontMetrics.height()
        bar_height = 6.0
        top = area.top() + (area.height() - text_height - bar_height - 3) / 2
        painter.save()
        painter.setPen(QColor(tokens.text))
        painter.drawText(
            QRectF(area.left(), top, area.width(), text_height),
            Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter,
            option.fontMetrics.elidedText(str(index.data() or ""), Qt.TextElideMode.ElideRight, int(area.width())),
        )
        painter.restore()
        paint_bar(
            painter,
            QRectF(area.left(), top + text_height + 3, area.width(), bar_height),
            tokens,
            (BarPart(memory.used_bytes, tokens.bar_used),),
            memory.total_bytes,
            mark_bytes=memory.budget_bytes,
        )
