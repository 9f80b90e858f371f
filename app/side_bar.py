"""The navigation at the window's left side."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QFont
from PySide6.QtWidgets import QButtonGroup, QFrame, QHBoxLayout, QLabel, QSizePolicy, QToolButton, QVBoxLayout, QWidget

from app.looks.icons import icon, pixmap
from app.looks.theme import theme
from app.looks.widgets import ThemedButton, muted


class SideBar(QFrame):
    """One button per page.

    Signals:
        page_wanted: the number of the page.
        theme_wanted: the person wants the next of auto, light and dark.
        shortcuts_wanted: the person wants the list of keys.
    """

    page_wanted = Signal(int)
    theme_wanted = Signal()
    shortcuts_wanted = Signal()

    def __init__(self, pages: Sequence[tuple[str, str]], parent: QWidget | None = None) -> None:
        """``pages``: icon name and title of each page."""
        super().__init__(parent)
        self.setProperty("navigation", True)
        self._pages = list(pages)
        self._buttons: list[QToolButton] = []
        self._group = QButtonGroup(self)
        self._group.setExclusive(True)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 16, 12, 12)
        column.setSpacing(4)
        column.addLayout(self._make_brand())
        column.addSpacing(14)
        for number, (_icon, title) in enumerate(self._pages):
            column.addWidget(self._make_button(number, title))
        column.addStretch(1)
        self._status = muted("", self)
        self._status.setContentsMargins(6, 0, 0, 0)
        column.addWidget(self._status)
        column.addSpacing(6)
        self._theme_button = ThemedButton("theme", self.tr("Theme"), self, clicked=self.theme_wanted.emit)
        shortcuts = ThemedButton("keyboard", self.tr("Keyboard shortcuts"), self, clicked=self.shortcuts_wanted.emit)
        shortcuts.setToolTip(self.tr("Keyboard shortcuts (F1)"))
        tools = QHBoxLayout()
        tools.addWidget(self._theme_button)
        tools.addWidget(shortcuts)
        tools.addStretch(1)
        column.addLayout(tools)
        self.setFixedWidth(self.fontMetrics().averageCharWidth() * 24 + 24)
        self._group.idClicked.connect(self.page_wanted)
        theme().changed.connect(self._tint)
        self._tint()

    def set_page(self, number: int) -> None:
        self._buttons[number].setChecked(True)
        self._tint()

    def set_status(self, text: str) -> None:
        self._status.setText(text)

    def set_theme_name(self, name: str) -> None:
        self._theme_button.setToolTip(name)
        self._theme_button.setAccessibleName(name)

    def _make_brand(self) -> QHBoxLayout:
        picture = QLabel(self)
        picture.setPixmap(pixmap("paceline", "#000000", 28, self.devicePixelRatioF()))
        name = QLabel("Paceline", self)
        font = QFont(name.font())
        font.setPointSizeF(font.pointSizeF() * 1.35)
        font.setWeight(QFont.Weight.Bold)
        name.setFont(font)
        row = QHBoxLayout()
        row.setSpacing(10)
        row.addSpacing(4)
        row.addWidget(picture)
        row.addWidget(name)
        row.addStretch(1)
        return row

    def _make_button(self, number: int, title: str) -> QToolButton:
        button = QToolButton(self)
        button.setProperty("navigation", True)
        button.setText(f" {title}")
        button.setAccessibleName(title)
        button.setToolTip(self.tr("{title} (Ctrl+{number})").format(title=title, number=number + 1))
        button.setCheckable(True)
        button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        button.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        side = self.fontMetrics().height() + 4
        button.setIconSize(QSize(side, side))
        button.toggled.connect(self._tint)
        self._group.addButton(button, number)
        self._buttons.append(button)
        return button

    def _tint(self) -> None:
        tokens = theme().tokens
        for button, (name, _title) in zip(self._buttons, self._pages, strict=True):
            button.setIcon(icon(name, tokens.accent if button.isChecked() else tokens.text_muted))
