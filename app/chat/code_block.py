"""A block of code in an answer, with its language and a button that copies it."""

from __future__ import annotations

from math import ceil

from PySide6.QtCore import Qt
from PySide6.QtGui import QFontDatabase, QTextCursor, QWheelEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPlainTextEdit, QVBoxLayout, QWidget

from app.looks.theme import theme
from app.looks.widgets import CopyButton, muted


class _CodeText(QPlainTextEdit):
    """As tall as its lines; long lines scroll sideways."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setReadOnly(True)
        self.setTabChangesFocus(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.setUndoRedoEnabled(False)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
        font.setPointSizeF(self.font().pointSizeF() * 0.95)
        self.setFont(font)
        self.document().setDocumentMargin(0)
        self.blockCountChanged.connect(self._fit_height)
        self.horizontalScrollBar().rangeChanged.connect(self._fit_height)
        self._fit_height()

    def wheelEvent(self, event: QWheelEvent) -> None:
        if event.angleDelta().x() or event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            super().wheelEvent(event)
        else:
            event.ignore()

    def _fit_height(self) -> None:
        bar = self.horizontalScrollBar()
        lines = self.fontMetrics().lineSpacing() * max(self.blockCount(), 1)
        self.setFixedHeight(ceil(lines) + 6 + (bar.sizeHint().height() if bar.maximum() > 0 else 0))


class CodeBlock(QFrame):
    """Code as it was written; it grows while the answer does."""

    def __init__(self, language: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("code")
        self._language = muted(language or self.tr("code"), self, wrap=False)
        self._view = _CodeText(self)
        self._view.setAccessibleName(self.tr("Code, {language}").format(language=language or self.tr("plain")))
        self._copy = CopyButton(self.tr("Copy code"), self.text, self)
        header = QHBoxLayout()
        header.setContentsMargins(0, 0, 0, 0)
        header.addWidget(self._language)
        header.addStretch(1)
        header.addWidget(self._copy)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 4, 6, 8)
        column.setSpacing(2)
        column.addLayout(header)
        column.addWidget(self._view)
        theme().changed.connect(self._tint)
        self._tint()

    def text(self) -> str:
        return self._view.toPlainText()

    def set_text(self, text: str) -> None:
        """Show this code; where it only grew, the rest is appended and a selection stays."""
        shown = self.text()
        if text == shown:
            return
        if text.startswith(shown):
            cursor = QTextCursor(self._view.document())
            cursor.movePosition(QTextCursor.MoveOperation.End)
            cursor.insertText(text[len(shown) :])
        else:
            self._view.setPlainText(text)

    def _tint(self) -> None:
        tokens = theme().tokens
        self.setStyleSheet(
            f"QFrame#code {{ background: {tokens.code_ground}; border: 1px solid {tokens.border};"
            " border-radius: 8px; }"
            " QFrame#code QPlainTextEdit { background: transparent; border: none; padding: 0; }"
        )
