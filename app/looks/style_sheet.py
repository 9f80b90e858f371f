"""The application's style sheet, made from the colour tokens. Sizes follow the font; only hairlines are pixels."""

from __future__ import annotations

from string import Template

from app.looks.tokens import Scheme, Tokens
from resources import icon_path

_SHEET = Template(
    """
QToolTip { background: $raised; color: $text; border: 1px solid $border; padding: 4px 6px; }

QFrame[card="true"] { background: $surface; border: 1px solid $border; border-radius: 10px; }
QFrame[navigation="true"] { background: $surface; border: none; border-right: 1px solid $border; }
QFrame[line="true"] { background: $border; border: none; max-height: 1px; min-height: 1px; }
QLabel[muted="true"] { color: $text_muted; }
QLabel[tone="ok"] { color: $ok; }
QLabel[tone="warning"] { color: $warning; }
QLabel[tone="error"] { color: $error; }
QLabel[tone="planned"] { color: $planned; }

QPushButton {
    background: $surface; color: $text; border: 1px solid $border; border-radius: 6px; padding: 6px 14px;
}
QPushButton:hover { background: $hover; border-color: $border_strong; }
QPushButton:pressed { background: $accent_soft; }
QPushButton:focus { border: 2px solid $accent; padding: 5px 13px; }
QPushButton:disabled { color: $border_strong; background: $window; }
QPushButton[primary="true"] { background: $accent_fill; color: $text_on_accent; border-color: $accent_fill; }
QPushButton[primary="true"]:hover { background: $accent_fill_hover; }
QPushButton[primary="true"]:focus { border: 2px solid $text; padding: 5px 13px; }
QPushButton[primary="true"]:disabled { background: $hover; color: $border_strong; border-color: $border; }

QToolButton { background: transparent; color: $text; border: 1px solid transparent; border-radius: 6px; padding: 5px; }
QToolButton:hover { background: $hover; }
QToolButton:pressed, QToolButton:checked { background: $accent_soft; }
QToolButton:focus { border-color: $accent; }
QToolButton:disabled { color: $border_strong; }
QToolButton[navigation="true"] { padding: 9px 12px; text-align: left; color: $text_muted; font-weight: 500; }
QToolButton[navigation="true"]:checked { background: $accent_soft; color: $accent; font-weight: 600; }
QToolButton[navigation="true"]:hover:!checked { color: $text; }

QToolButton[floating="true"] { background: $surface; border: 1px solid $border_strong; border-radius: 14px; }

QLineEdit, QPlainTextEdit, QTextEdit, QSpinBox, QDoubleSpinBox, QComboBox {
    background: $surface; color: $text; border: 1px solid $border; border-radius: 6px; padding: 5px 8px;
    selection-background-color: $accent_fill; selection-color: $text_on_accent;
}
QLineEdit:focus, QPlainTextEdit:focus, QTextEdit:focus, QSpinBox:focus, QDoubleSpinBox:focus, QComboBox:focus {
    border: 1px solid $accent;
}
QLineEdit:disabled, QSpinBox:disabled, QDoubleSpinBox:disabled, QComboBox:disabled {
    background: $window; color: $border_strong;
}
QComboBox { padding-right: 24px; }
QComboBox::drop-down { border: none; width: 24px; }
QComboBox::down-arrow { image: url("$arrow_down"); width: 12px; height: 12px; }
QSpinBox, QDoubleSpinBox { padding-right: 22px; }
QSpinBox::up-button, QDoubleSpinBox::up-button, QSpinBox::down-button, QDoubleSpinBox::down-button {
    border: none; background: transparent; width: 20px; margin-right: 2px;
}
QSpinBox::up-button:hover, QDoubleSpinBox::up-button:hover,
QSpinBox::down-button:hover, QDoubleSpinBox::down-button:hover { background: $hover; }
QSpinBox::up-arrow, QDoubleSpinBox::up-arrow { image: url("$arrow_up"); width: 10px; height: 10px; }
QSpinBox::down-arrow, QDoubleSpinBox::down-arrow { image: url("$arrow_down"); width: 10px; height: 10px; }
QToolButton::menu-indicator { image: none; width: 0; }
QComboBox QAbstractItemView { background: $surface; color: $text; border: 1px solid $border; padding: 4px; }

QTextBrowser[bare="true"] { background: transparent; border: none; padding: 0; }
QTextBrowser[bare="true"]:focus { border: none; }

QTableView {
    background: $surface; alternate-background-color: $raised; border: none; gridline-color: $border;
    selection-background-color: $accent_soft; selection-color: $text; outline: 0;
}
QTableView::item { padding: 0 8px; border-bottom: 1px solid $border; }
QTableView::item:selected { background: $accent_soft; color: $text; }
QTableView::item:focus { border: 1px solid $accent; }
QHeaderView { background: $surface; border: none; }
QHeaderView::section {
    background: $surface; color: $text_muted; border: none; border-bottom: 1px solid $border;
    padding: 8px 11px; font-weight: 600;
}
QTableCornerButton::section { background: $surface; border: none; }

QScrollArea, QScrollArea > QWidget > QWidget[scrolled="true"] { background: transparent; border: none; }
QScrollBar:vertical { background: transparent; width: 12px; margin: 2px; }
QScrollBar:horizontal { background: transparent; height: 12px; margin: 2px; }
QScrollBar::handle { background: $border; border-radius: 4px; }
QScrollBar::handle:vertical { min-height: 28px; }
QScrollBar::handle:horizontal { min-width: 28px; }
QScrollBar::handle:hover { background: $border_strong; }
QScrollBar::add-line, QScrollBar::sub-line { width: 0; height: 0; }
QScrollBar::add-page, QScrollBar::sub-page { background: transparent; }

QProgressBar {
    background: $bar_track; border: none; border-radius: 4px; min-height: 8px; max-height: 8px; color: transparent;
}
QProgressBar::chunk { background: $accent_fill; border-radius: 4px; }

QSplitter::handle { background: transparent; }
QGraphicsView { background: $surface; border: none; }
QGraphicsView:focus { border: none; }
QMenu { background: $surface; border: 1px solid $border; padding: 4px; }
QMenu::item { padding: 6px 22px; border-radius: 4px; }
QMenu::item:selected { background: $accent_soft; color: $text; }
"""
)


def style_sheet(tokens: Tokens, scheme: Scheme) -> str:
    """The style sheet of a scheme."""
    colours = {name: getattr(tokens, name) for name in Tokens.__dataclass_fields__}
    return _SHEET.substitute(
        {name: colour for name, colour in colours.items() if isinstance(colour, str)},
        arrow_up=icon_path(f"arrow-up-{scheme}").as_posix(),
        arrow_down=icon_path(f"arrow-down-{scheme}").as_posix(),
    )
