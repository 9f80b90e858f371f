"""Small widgets that every page is made of."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QSize, Qt, QTimer
from PySide6.QtGui import QFont, QGuiApplication
from PySide6.QtGui import Qt as TextRules
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.looks.icons import icon, pixmap
from app.looks.theme import theme
from app.looks.words import Tone, Wording, tone_colour


class Card(QFrame):
    """A rounded surface that holds one subject."""

    def __init__(self, parent: QWidget | None = None, *, spacing: int = 8, margin: int = 14) -> None:
        super().__init__(parent)
        self.setProperty("card", True)
        self.body = QVBoxLayout(self)
        self.body.setContentsMargins(margin, margin, margin, margin)
        self.body.setSpacing(spacing)


def plain_label(text: str = "", parent: QWidget | None = None) -> QLabel:
    """A label that shows its text as it is. Names come from other PCs, and Qt would take ``<b>`` in one for markup."""
    label = QLabel(text, parent)
    label.setTextFormat(Qt.TextFormat.PlainText)
    return label


def plain_tooltip(text: str) -> str:
    """What to give a tooltip, which has no such setting, for it to show ``text`` as it is."""
    return TextRules.convertFromPlainText(text) if TextRules.mightBeRichText(text) else text


def heading(text: str, level: int = 1, parent: QWidget | None = None) -> QLabel:
    """A title: level 1 names the page, level 2 a card."""
    label = plain_label(text, parent)
    font = QFont(label.font())
    font.setPointSizeF(font.pointSizeF() * (1.6 if level == 1 else 1.15))
    font.setWeight(QFont.Weight.DemiBold)
    label.setFont(font)
    return label


def muted(text: str = "", parent: QWidget | None = None, *, wrap: bool = True) -> QLabel:
    """A quiet explanation."""
    label = plain_label(text, parent)
    label.setProperty("muted", True)
    label.setWordWrap(wrap)
    return label


def set_tone(label: QLabel, tone: Tone) -> None:
    """Colour a label by meaning; the text must carry the meaning too."""
    if label.property("tone") == tone:
        return
    label.setProperty("tone", tone)
    label.setProperty("muted", tone == "muted")
    label.style().unpolish(label)
    label.style().polish(label)


class ThemedButton(QToolButton):
    """A button whose icon follows the theme. Its name is read out and shown as the tooltip."""

    def __init__(
        self,
        icon_name: str,
        name: str,
        parent: QWidget | None = None,
        *,
        clicked: Callable[[], object] | None = None,
        with_text: bool = False,
        tone: str = "text_muted",
    ) -> None:
        super().__init__(parent)
        self._icon_name = icon_name
        self._tone = tone
        self.setAccessibleName(name)
        self.setToolTip(name)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        side = self.fontMetrics().height() + 2
        self.setIconSize(QSize(side, side))
        if with_text:
            self.setText(name)
            self.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        if clicked is not None:
            self.clicked.connect(lambda _checked=False: clicked())
        theme().changed.connect(self._tint)
        self._tint()

    def set_icon_name(self, icon_name: str) -> None:
        self._icon_name = icon_name
        self._tint()

    def _tint(self) -> None:
        self.setIcon(icon(self._icon_name, getattr(theme().tokens, self._tone)))


class CopyButton(ThemedButton):
    """Copies a text to the clipboard and says so for a moment."""

    def __init__(self, name: str, text: Callable[[], str], parent: QWidget | None = None, *, with_text: bool = False):
        super().__init__("copy", name, parent, with_text=with_text)
        self._source = text
        self._name = name
        self._with_text = with_text
        self.clicked.connect(self.copy)

    def copy(self) -> None:
        QGuiApplication.clipboard().setText(self._source())
        self.set_icon_name("state-ok")
        self.setToolTip(self.tr("Copied"))
        if self._with_text:
            self.setText(self.tr("Copied"))
        QTimer.singleShot(1500, self, self._restore)

    def _restore(self) -> None:
        self.set_icon_name("copy")
        self.setToolTip(self._name)
        if self._with_text:
            self.setText(self._name)


class StateLabel(QWidget):
    """A state: icon, word and tone together."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._wording: Wording | None = None
        self._picture = QLabel(self)
        self._text = plain_label("", self)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(5)
        row.addWidget(self._picture)
        row.addWidget(self._text)
        self.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Preferred)
        theme().changed.connect(self._draw)

    def set_wording(self, wording: Wording) -> None:
        if wording != self._wording:
            self._wording = wording
            self._draw()

    def text(self) -> str:
        return self._text.text()

    def _draw(self) -> None:
        if self._wording is None:
            return
        side = self.fontMetrics().height() + 1
        colour = tone_colour(theme().tokens, self._wording.tone)
        self._picture.setPixmap(pixmap(self._wording.icon, colour, side, self.devicePixelRatioF()))
        self._text.setText(self._wording.text)
        set_tone(self._text, self._wording.tone)


class Banner(QFrame):
    """A fault in words, in place, with a button that copies the details. Hidden while there is nothing to say."""

    def __init__(self, parent: QWidget | None = None, *, tone: Tone = "error") -> None:
        super().__init__(parent)
        self._tone: Tone = tone
        self._details = ""
        self._picture = QLabel(self)
        self._text = QLabel(self)
        self._text.setWordWrap(True)
        self._text.setTextFormat(Qt.TextFormat.PlainText)
        self._text.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._copy = CopyButton(self.tr("Copy details"), lambda: self._details, self, with_text=True)
        self._buttons = QHBoxLayout()
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 8, 8, 8)
        row.setSpacing(10)
        row.addWidget(self._picture)
        row.addWidget(self._text, 1)
        row.addLayout(self._buttons)
        row.addWidget(self._copy)
        theme().changed.connect(self._draw)
        self._draw()
        self.hide()

    def add_button(self, text: str, clicked: Callable[[], object]) -> QPushButton:
        button = QPushButton(text, self)
        button.clicked.connect(lambda _checked=False: clicked())
        self._buttons.addWidget(button)
        return button

    def show_message(self, text: str, details: str = "", *, tone: Tone = "error") -> None:
        self._tone = tone
        self._details = details or text
        self._text.setText(text)
        self.setAccessibleDescription(text)
        self._draw()
        self.show()

    def clear(self) -> None:
        self._text.clear()
        self.setAccessibleDescription("")
        self.hide()

    def message(self) -> str:
        return self._text.text()

    def details(self) -> str:
        """What the button copies."""
        return self._details

    def _draw(self) -> None:
        tokens = theme().tokens
        ground = {"ok": tokens.ok_soft, "warning": tokens.warning_soft, "error": tokens.error_soft}.get(
            self._tone, tokens.accent_soft
        )
        colour = tone_colour(tokens, self._tone)
        names = {"ok": "state-ok", "warning": "state-warning", "error": "state-error"}
        side = self.fontMetrics().height() + 2
        self._picture.setPixmap(pixmap(names.get(self._tone, "information"), colour, side, self.devicePixelRatioF()))
        self.setStyleSheet(f"Banner {{ background: {ground}; border: 1px solid {colour}; border-radius: 8px; }}")


class BusyLine(QFrame):
    """What the program is doing at the moment, in one line. Hidden while there is nothing to say."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._picture = QLabel(self)
        self._text = QLabel(self)
        self._text.setTextFormat(Qt.TextFormat.PlainText)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 7, 12, 7)
        row.setSpacing(8)
        row.addWidget(self._picture)
        row.addWidget(self._text, 1)
        theme().changed.connect(self._draw)
        self._draw()
        self.hide()

    def show_text(self, text: str) -> None:
        """An empty text hides the line."""
        self._text.setText(text)
        self.setVisible(bool(text))

    def text(self) -> str:
        return self._text.text()

    def _draw(self) -> None:
        tokens = theme().tokens
        side = self.fontMetrics().height() + 1
        self._picture.setPixmap(pixmap("state-busy", tokens.accent, side, self.devicePixelRatioF()))
        self.setStyleSheet(f"BusyLine {{ background: {tokens.accent_soft}; border: none; border-radius: 8px; }}")


class EmptyState(QWidget):
    """What a page shows while there is nothing to show: why, and what to do."""

    def __init__(self, icon_name: str, title: str, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._icon_name = icon_name
        self._picture = QLabel(self)
        self._picture.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._title = heading(title, 2, self)
        self._title.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._text = muted(text, self)
        self._text.setAlignment(Qt.AlignmentFlag.AlignCenter)
        # A wrapped label that is centred in a layout is not asked for its height at its width.
        width = self.fontMetrics().averageCharWidth() * 84
        self._text.setFixedSize(width, self._text.heightForWidth(width))
        self.body = QVBoxLayout(self)
        self.body.setSpacing(10)
        self.body.addStretch(2)
        self.body.addWidget(self._picture)
        self.body.addWidget(self._title)
        self.body.addWidget(self._text, 0, Qt.AlignmentFlag.AlignHCenter)
        self._below = QVBoxLayout()
        self._below.setSpacing(8)
        self.body.addLayout(self._below)
        self.body.addStretch(3)
        theme().changed.connect(self._draw)
        self._draw()

    def add_widget(self, widget: QWidget) -> None:
        self._below.addWidget(widget, 0, Qt.AlignmentFlag.AlignHCenter)

    def set_title(self, title: str) -> None:
        self._title.setText(title)

    def _draw(self) -> None:
        self._picture.setPixmap(pixmap(self._icon_name, theme().tokens.border_strong, 56, self.devicePixelRatioF()))


def primary_button(text: str, parent: QWidget | None = None) -> QPushButton:
    """The one thing that most people want to do next on a page."""
    button = QPushButton(text, parent)
    button.setProperty("primary", True)
    return button
