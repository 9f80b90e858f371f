"""Shows a model's Markdown. What a model writes is untrusted: nothing it names is loaded or opened by itself."""

from __future__ import annotations

import time
from math import ceil
from typing import Any

from PySide6.QtCore import QByteArray, QSize, Qt, QUrl, Signal
from PySide6.QtGui import (
    QImage,
    QTextBlockFormat,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextOption,
    QWheelEvent,
)
from PySide6.QtWidgets import QFrame, QSizePolicy, QTextBrowser, QWidget

from app.chat.segments import finished_length

MARKDOWN_FEATURES = QTextDocument.MarkdownFeature.MarkdownDialectGitHub | QTextDocument.MarkdownFeature.MarkdownNoHTML
_RENDER_SHARE = 0.08
"""While an answer streams, at most this share of the time goes into rendering its Markdown anew."""


class MarkdownView(QTextBrowser):
    """As tall as its text; the conversation around it scrolls.

    Signals:
        link_wanted: the person clicked a link (``QUrl``); nothing was opened.
    """

    link_wanted = Signal(QUrl)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("bare", True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setOpenLinks(False)
        self.setOpenExternalLinks(False)
        self.setUndoRedoEnabled(False)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setWordWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(self.tr("Answer"))
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self._fit_height)
        self.anchorClicked.connect(self.link_wanted)
        self._text = ""
        self._rendered_length = 0
        self._rendered_at_s = 0.0
        self._render_cost_s = 0.0
        self._fit_height()

    def text(self) -> str:
        """The Markdown that is shown."""
        return self._text

    def set_text(self, text: str) -> None:
        """Show a whole Markdown text."""
        self._text = text
        self._render(text)

    def grow_text(self, text: str) -> None:
        """Show Markdown that is still being written and begins with what was shown before.

        Whole blocks are rendered, as often as that is cheap; what follows them is appended as plain text.
        """
        if not text.startswith(self._text):
            self._text = ""
            self._rendered_length = 0
            self._replace("")
        finished = finished_length(text)
        due = time.monotonic() - self._rendered_at_s >= self._render_cost_s / _RENDER_SHARE
        if finished > self._rendered_length and due:
            self._render(text[:finished])
            self._rendered_length = finished
            self._append(text[finished:], new_block=True)
        else:
            self._append(text[len(self._text) :], new_block=False)
        self._text = text

    def loadResource(self, kind: int, name: QUrl | str) -> Any:
        """An empty stand-in: no picture, style sheet or file that an answer names is read, here or over the network.

        Were nothing returned, Qt's image handler would open the named file by itself.
        """
        if kind == QTextDocument.ResourceType.ImageResource.value:
            stand_in = QImage(1, 1, QImage.Format.Format_ARGB32)
            stand_in.fill(Qt.GlobalColor.transparent)
            return stand_in
        return QByteArray()

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self.height())

    def minimumSizeHint(self) -> QSize:
        return QSize(0, self.minimumHeight())

    def _render(self, markdown: str) -> None:
        started_s = time.perf_counter()
        self._replace(markdown)
        self._render_cost_s = time.perf_counter() - started_s
        self._rendered_at_s = time.monotonic()

    def _replace(self, markdown: str) -> None:
        """Set the document and keep what the person has selected in its unchanged beginning."""
        anchor, position = self.textCursor().anchor(), self.textCursor().position()
        self.document().setMarkdown(markdown, MARKDOWN_FEATURES)
        last = max(self.document().characterCount() - 1, 0)
        if anchor != position:
            cursor = self.textCursor()
            cursor.setPosition(min(anchor, last))
            cursor.setPosition(min(position, last), QTextCursor.MoveMode.KeepAnchor)
            self.setTextCursor(cursor)

    def _append(self, text: str, *, new_block: bool) -> None:
        if not text:
            return
        cursor = QTextCursor(self.document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        if new_block and not self.document().isEmpty():
            cursor.insertBlock(QTextBlockFormat(), QTextCharFormat())
        cursor.insertText(text, QTextCharFormat())

    def _fit_height(self) -> None:
        height = ceil(self.document().size().height()) + 2
        if height != self.minimumHeight() or height != self.maximumHeight():
            self.setFixedHeight(height)
