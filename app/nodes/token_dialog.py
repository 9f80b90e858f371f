"""Makes an enrolment token and shows how to use it."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QHBoxLayout, QLabel, QLineEdit, QPlainTextEdit, QPushButton, QVBoxLayout, QWidget

from app.looks.widgets import CopyButton, heading, muted


class TokenDialog(QDialog):
    """Shows a token and the command that enrols a PC with it. Opened with ``open()``, it never blocks."""

    def __init__(self, token: str, uses: int, expires_hours: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Enrolment token"))
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self._token = token
        command = f"paceline agent --enrol {token}"
        explanation = muted(
            self.tr(
                "Start the agent on the PC that is to join, with this token. It works for {uses} PCs and for {hours} "
                "hours. Treat it like a password: whoever has it can add a PC to this fleet."
            ).format(uses=uses, hours=expires_hours)
        )
        self._field = QPlainTextEdit(token, self)
        self._field.setReadOnly(True)
        self._field.setTabChangesFocus(True)
        self._field.setAccessibleName(self.tr("Enrolment token"))
        self._field.setMaximumHeight(self.fontMetrics().height() * 4)
        command_label = QLabel(self.tr("&Command"), self)
        self._command = QLineEdit(command, self)
        self._command.setReadOnly(True)
        self._command.setCursorPosition(0)
        self._command.setAccessibleName(self.tr("Command that enrols a PC"))
        command_label.setBuddy(self._command)
        close = QPushButton(self.tr("Close"), self)
        close.clicked.connect(self.accept)
        row = QHBoxLayout()
        row.addWidget(CopyButton(self.tr("Copy token"), lambda: token, self, with_text=True))
        row.addWidget(CopyButton(self.tr("Copy command"), lambda: command, self, with_text=True))
        row.addStretch(1)
        row.addWidget(close)
        column = QVBoxLayout(self)
        column.setSpacing(10)
        column.setContentsMargins(18, 18, 18, 14)
        column.addWidget(heading(self.tr("A PC joins with this token"), 2))
        column.addWidget(explanation)
        column.addWidget(self._field)
        column.addWidget(command_label)
        column.addWidget(self._command)
        column.addLayout(row)
        self.resize(self.fontMetrics().averageCharWidth() * 90, self.sizeHint().height())
        close.setDefault(True)

    def token(self) -> str:
        return self._token
