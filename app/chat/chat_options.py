"""How the model shall answer: system prompt, temperature, length."""

from __future__ import annotations

from PySide6.QtWidgets import QDoubleSpinBox, QLabel, QPlainTextEdit, QSpinBox, QWidget

from app.looks.widgets import Card, heading, muted
from fleet.gateway_messages import Sampling

DEFAULT_TEMPERATURE = 0.7
DEFAULT_MAX_TOKENS = 1024


class ChatOptions(Card):
    """The side panel of the Chat page. What is set here holds for the next question."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, spacing=6)
        self._system_prompt = QPlainTextEdit(self)
        self._system_prompt.setAccessibleName(self.tr("System prompt"))
        self._system_prompt.setPlaceholderText(self.tr("You are a helpful assistant."))
        self._system_prompt.setTabChangesFocus(True)
        self._system_prompt.setMaximumHeight(self.fontMetrics().lineSpacing() * 8)
        self._temperature = QDoubleSpinBox(self)
        self._temperature.setRange(0.0, 2.0)
        self._temperature.setSingleStep(0.1)
        self._temperature.setDecimals(2)
        self._temperature.setValue(DEFAULT_TEMPERATURE)
        self._temperature.setAccessibleName(self.tr("Temperature"))
        self._max_tokens = QSpinBox(self)
        self._max_tokens.setRange(1, 1_000_000)
        self._max_tokens.setSingleStep(256)
        self._max_tokens.setGroupSeparatorShown(True)
        self._max_tokens.setValue(DEFAULT_MAX_TOKENS)
        self._max_tokens.setAccessibleName(self.tr("Longest answer, in tokens"))
        self.body.addWidget(heading(self.tr("How to answer"), 2))
        for title, field, explanation in (
            (self.tr("&System prompt"), self._system_prompt, self.tr("Says who the model is and how it talks.")),
            (self.tr("&Temperature"), self._temperature, self.tr("0 always takes the likeliest word; 1 varies more.")),
            (self.tr("&Longest answer (tokens)"), self._max_tokens, ""),
        ):
            label = QLabel(title, self)
            label.setBuddy(field)
            self.body.addSpacing(6)
            self.body.addWidget(label)
            self.body.addWidget(field)
            if explanation:
                self.body.addWidget(muted(explanation, self))
        self.body.addStretch(1)
        self.setFixedWidth(self.fontMetrics().averageCharWidth() * 36)

    def system_prompt(self) -> str:
        return self._system_prompt.toPlainText()

    def sampling(self) -> Sampling:
        return Sampling(temperature=self._temperature.value())

    def max_tokens(self) -> int:
        return self._max_tokens.value()
