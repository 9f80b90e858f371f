"""The text of an answer: prose and code blocks below each other, growing while the model writes."""

from __future__ import annotations

from PySide6.QtCore import QUrl, Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.chat.code_block import CodeBlock
from app.chat.markdown_view import MarkdownView
from app.chat.segments import Segment, split_markdown


class AnswerBody(QWidget):
    """Shows Markdown by segments; only the last one changes while the text grows.

    Signals:
        link_wanted: the person clicked a link (``QUrl``); nothing was opened.
    """

    link_wanted = Signal(QUrl)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._segments: list[Segment] = []
        self._views: list[MarkdownView | CodeBlock] = []
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(8)

    def set_text(self, text: str, *, final: bool) -> None:
        """Show this Markdown; ``final`` renders all of it, else the last prose is shown as it grows."""
        segments = split_markdown(text)
        while len(self._views) > len(segments):
            self._drop_last()
        for number, segment in enumerate(segments):
            complete = final or segment.closed
            if number < len(self._views) and isinstance(self._views[number], CodeBlock) != segment.is_code:
                while len(self._views) > number:
                    self._drop_last()
            if number == len(self._views):
                self._add(segment)
            elif segment == self._segments[number] and (segment.closed or not final):
                continue
            view = self._views[number]
            if isinstance(view, CodeBlock) or complete:
                view.set_text(segment.text)
            else:
                view.grow_text(segment.text)
        self._segments = segments

    def code_blocks(self) -> list[str]:
        return [view.text() for view in self._views if isinstance(view, CodeBlock)]

    def prose(self) -> list[str]:
        """The texts between the code blocks, as they are read."""
        return [view.toPlainText() for view in self._views if isinstance(view, MarkdownView)]

    def _add(self, segment: Segment) -> None:
        view: MarkdownView | CodeBlock
        if segment.language is not None:
            view = CodeBlock(segment.language, self)
        else:
            view = MarkdownView(self)
            view.link_wanted.connect(self.link_wanted)
        self._views.append(view)
        self._column.addWidget(view)

    def _drop_last(self) -> None:
        view = self._views.pop()
        self._column.removeWidget(view)
        view.hide()
        view.deleteLater()
