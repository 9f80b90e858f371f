"""The theme of the running application: Fusion, a palette and a style sheet made from the colour tokens."""

from __future__ import annotations

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtGui import QColor, QPalette
from PySide6.QtWidgets import QApplication

from app.looks.style_sheet import style_sheet
from app.looks.tokens import Scheme, SchemeChoice, Tokens, tokens_of


class Theme(QObject):
    """Which scheme is shown, and its tokens; follows the desktop while the choice is ``auto``.

    Signals:
        changed: the tokens are others now; whoever paints or holds tinted icons takes the new ones.
    """

    changed = Signal()

    def __init__(self, application: QApplication, choice: SchemeChoice = "auto") -> None:
        super().__init__(application)
        self._application = application
        self._choice: SchemeChoice = choice
        self._scheme: Scheme | None = None
        application.setStyle("Fusion")
        application.styleHints().colorSchemeChanged.connect(self._follow_desktop)
        self._apply()

    @property
    def choice(self) -> SchemeChoice:
        return self._choice

    @property
    def scheme(self) -> Scheme:
        return self._scheme or "light"

    @property
    def tokens(self) -> Tokens:
        return tokens_of(self.scheme)

    def set_choice(self, choice: SchemeChoice) -> None:
        self._choice = choice
        self._apply()

    def _follow_desktop(self) -> None:
        if self._choice == "auto":
            self._apply()

    def _apply(self) -> None:
        desktop_is_dark = self._application.styleHints().colorScheme() == Qt.ColorScheme.Dark
        scheme: Scheme = ("dark" if desktop_is_dark else "light") if self._choice == "auto" else self._choice
        if scheme == self._scheme:
            return
        self._scheme = scheme
        # The offscreen platform ignores QStyleHints.setColorScheme, and a desktop may know no dark scheme:
        # an explicit palette works everywhere.
        self._application.setPalette(palette_of(self.tokens))
        self._application.setStyleSheet(style_sheet(self.tokens, scheme))
        self.changed.emit()


def palette_of(tokens: Tokens) -> QPalette:
    """The widget palette of a scheme."""
    palette = QPalette()
    role = QPalette.ColorRole
    for name, colour in (
        (role.Window, tokens.window),
        (role.WindowText, tokens.text),
        (role.Base, tokens.surface),
        (role.AlternateBase, tokens.raised),
        (role.Text, tokens.text),
        (role.PlaceholderText, tokens.text_muted),
        (role.Button, tokens.surface),
        (role.ButtonText, tokens.text),
        (role.BrightText, tokens.error),
        (role.ToolTipBase, tokens.raised),
        (role.ToolTipText, tokens.text),
        (role.Highlight, tokens.accent_fill),
        (role.HighlightedText, tokens.text_on_accent),
        (role.Link, tokens.accent),
        (role.LinkVisited, tokens.planned),
        (role.Light, tokens.surface),
        (role.Midlight, tokens.raised),
        (role.Mid, tokens.border),
        (role.Dark, tokens.border_strong),
        (role.Shadow, tokens.border_strong),
        (role.Accent, tokens.accent_fill),
    ):
        palette.setColor(name, QColor(colour))
    for name in (role.WindowText, role.Text, role.ButtonText):
        palette.setColor(QPalette.ColorGroup.Disabled, name, QColor(tokens.border_strong))
    return palette


def theme() -> Theme:
    """The application's theme; made by the first call."""
    application = QApplication.instance()
    if not isinstance(application, QApplication):
        raise RuntimeError("the theme needs a QApplication")
    found = application.findChild(Theme)
    return found if isinstance(found, Theme) else Theme(application)
