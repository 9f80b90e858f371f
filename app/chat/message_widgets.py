"""One question and one answer in the conversation."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, Qt, QUrl, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLabel, QProgressBar, QVBoxLayout, QWidget

from app.chat.answer_body import AnswerBody
from app.chat.conversation import Answer
from app.looks.icons import pixmap
from app.looks.theme import theme
from app.looks.widgets import Banner, CopyButton, ThemedButton, muted, plain_label

_QUESTION_SHARE = 0.78
"""A question takes at most this share of the width."""


class QuestionWidget(QWidget):
    """What the person wrote, shown as it was written."""

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._bubble = QFrame(self)
        self._bubble.setObjectName("question")
        self._label = QLabel(_breakable(text), self._bubble)
        self._label.setTextFormat(Qt.TextFormat.PlainText)
        self._label.setWordWrap(True)
        self._label.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self._label.setAccessibleName(self.tr("You: {text}").format(text=text))
        inside = QVBoxLayout(self._bubble)
        inside.setContentsMargins(14, 9, 14, 9)
        inside.addWidget(self._label)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addStretch(1)
        row.addWidget(self._bubble)
        theme().changed.connect(self._tint)
        self._tint()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        available = round(self.width() * _QUESTION_SHARE) - 28
        natural = (
            self._label.fontMetrics()
            .boundingRect(0, 0, available, 1 << 20, Qt.TextFlag.TextWordWrap.value, self._label.text())
            .width()
        )
        self._label.setFixedWidth(max(min(natural + 4, available), 20))

    def _tint(self) -> None:
        tokens = theme().tokens
        self.setStyleSheet(
            f"QFrame#question {{ background: {tokens.accent_soft}; border: none; border-radius: 12px; }}"
            f" QFrame#question QLabel {{ color: {tokens.text}; }}"
        )


class AnswerWidget(QWidget):
    """What the model wrote, what it took, and what went wrong.

    Signals:
        retry_wanted: ask the same question again.
        link_wanted: the person clicked a link (``QUrl``); nothing was opened.
    """

    retry_wanted = Signal()
    link_wanted = Signal(QUrl)

    def __init__(self, model: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._answer_text = ""
        self._picture = QLabel(self)
        name = plain_label(model, self)
        font = name.font()
        font.setBold(True)
        name.setFont(font)
        self._body = AnswerBody(self)
        self._body.link_wanted.connect(self.link_wanted)
        self._status = muted("", self, wrap=False)
        self._progress = QProgressBar(self)
        self._progress.setTextVisible(False)
        self._progress.setMaximumWidth(self.fontMetrics().averageCharWidth() * 40)
        self._progress.setAccessibleName(self.tr("How much of the prompt has been read"))
        self._progress.hide()
        self.error = Banner(self)
        self.error.add_button(self.tr("Try again"), self.retry_wanted.emit)
        self._copy = CopyButton(self.tr("Copy answer"), lambda: self._answer_text, self)
        self._again = ThemedButton("retry", self.tr("Answer again"), self, clicked=self.retry_wanted.emit)
        self._copy.hide()
        self._again.hide()
        header = QHBoxLayout()
        header.setSpacing(8)
        header.addWidget(self._picture)
        header.addWidget(name)
        header.addStretch(1)
        footer = QHBoxLayout()
        footer.setSpacing(4)
        footer.addWidget(self._copy)
        footer.addWidget(self._again)
        footer.addWidget(self._status)
        footer.addWidget(self._progress, 1)
        footer.addStretch(1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addLayout(header)
        column.addWidget(self._body)
        column.addWidget(self.error)
        column.addLayout(footer)
        theme().changed.connect(self._tint)
        self._tint()

    def show_answer(self, answer: Answer, *, last: bool) -> None:
        """Bring the widget up to date; ``last`` answers can be asked for again."""
        self._answer_text = answer.text
        self._body.set_text(answer.text, final=not answer.running)
        self._status.setText(figures(answer))
        reading = answer.state == "reading" and answer.prompt_tokens > 0
        self._progress.setVisible(reading)
        if reading:
            self._progress.setMaximum(answer.prompt_tokens)
            self._progress.setValue(answer.read_tokens)
        if answer.state == "failed":
            self.error.show_message(answer.error, answer.error_details)
        else:
            self.error.clear()
        self._copy.setVisible(not answer.running and bool(answer.text))
        self._again.setVisible(last and answer.state in ("finished", "stopped"))

    def body(self) -> AnswerBody:
        return self._body

    def status_text(self) -> str:
        return self._status.text()

    def _tint(self) -> None:
        side = self.fontMetrics().height() + 4
        self._picture.setPixmap(pixmap("paceline", "#000000", side, self.devicePixelRatioF()))


def figures(answer: Answer) -> str:
    """What an answer took, in words: speed, wait for the first token, and why it ended where that is not plain."""
    translate = QCoreApplication.translate
    if answer.state == "waiting":
        return translate("Answer", "Waiting for the first token…")
    if answer.state == "reading":
        return translate("Answer", "Reading the prompt: {done} of {total} tokens").format(
            done=f"{answer.read_tokens:,}", total=f"{answer.prompt_tokens:,}"
        )
    parts = []
    if answer.tokens_per_second is not None:
        parts.append(translate("Answer", "{rate} tokens/s").format(rate=f"{answer.tokens_per_second:.1f}"))
    if answer.time_to_first_token_s is not None:
        parts.append(
            translate("Answer", "first token after {seconds} s").format(seconds=f"{answer.time_to_first_token_s:.2f}")
        )
    if answer.tokens:
        parts.append(translate("Answer", "{count} tokens").format(count=f"{answer.tokens:,}"))
    if answer.state == "stopped":
        parts.append(translate("Answer", "stopped"))
    if answer.cut_short:
        parts.append(translate("Answer", "ended at the limit of tokens"))
    return " · ".join(parts)


def _breakable(text: str, longest: int = 40) -> str:
    """The text with places to break inside words that would otherwise be wider than the bubble."""
    words = []
    for word in text.split(" "):
        pieces = [word[start : start + longest] for start in range(0, len(word), longest)] or [""]
        words.append("\u200b".join(pieces))
    return " ".join(words)
