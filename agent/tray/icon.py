"""The icon in the tray, or a small window where the desktop has no tray."""

from __future__ import annotations

from PySide6.QtCore import QByteArray, QObject, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QAction, QCloseEvent, QIcon, QPainter, QPixmap
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import (
    QHBoxLayout,
    QLabel,
    QMenu,
    QMessageBox,
    QPushButton,
    QSystemTrayIcon,
    QVBoxLayout,
    QWidget,
)

from agent.tray.words import UNREACHABLE, Face
from resources import icon_svg

_SIZES = (16, 20, 24, 32, 48, 64)


def mood_icon(face: Face) -> QIcon:
    """The icon for a face, sharp at the usual sizes."""
    renderer = QSvgRenderer(QByteArray(icon_svg(f"tray-{face.mood}").replace("currentColor", "#808080").encode()))
    icon = QIcon()
    for size in _SIZES:
        pixmap = QPixmap(QSize(size, size))
        pixmap.fill(Qt.GlobalColor.transparent)
        painter = QPainter(pixmap)
        renderer.render(painter, QRectF(0, 0, size, size))
        painter.end()
        icon.addPixmap(pixmap)
    return icon


class StatusWindow(QWidget):
    """What the agent does, in words, with the same actions as the icon's menu.

    Signals:
        pause_wanted(bool): take no new work, or take it again.
        quit_wanted(): end the agent.
        closed(): the person closed the window.
    """

    pause_wanted = Signal(bool)
    quit_wanted = Signal()
    closed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.setWindowTitle("Paceline agent")
        self.title = QLabel()
        font = self.title.font()
        font.setBold(True)
        self.title.setFont(font)
        self.lines = QLabel()
        self.lines.setWordWrap(True)
        self.lines.setTextFormat(Qt.TextFormat.PlainText)
        self.lines.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.pause_button = QPushButton()
        self.pause_button.clicked.connect(lambda: self.pause_wanted.emit(not self._face.paused))
        self.quit_button = QPushButton("Quit")
        self.quit_button.clicked.connect(self.quit_wanted)
        buttons = QHBoxLayout()
        buttons.addStretch()
        buttons.addWidget(self.pause_button)
        buttons.addWidget(self.quit_button)
        layout = QVBoxLayout(self)
        layout.addWidget(self.title)
        layout.addWidget(self.lines)
        layout.addStretch()
        layout.addLayout(buttons)
        self.setMinimumWidth(360)
        self.show_face(UNREACHABLE)

    def show_face(self, face: Face) -> None:
        """Show what the agent does."""
        self._face = face
        self.title.setText(face.title)
        self.lines.setText("\n".join(face.lines))
        self.lines.setVisible(bool(face.lines))
        self.pause_button.setText("Resume" if face.paused else "Pause")
        self.pause_button.setEnabled(face.reachable)
        self.quit_button.setEnabled(face.reachable)

    def closeEvent(self, event: QCloseEvent) -> None:
        """Tell that the window is gone."""
        super().closeEvent(event)
        self.closed.emit()


class Tray(QObject):
    """The icon with its menu, and the window behind it.

    Signals:
        pause_wanted(bool): take no new work, or take it again.
        quit_wanted(): end the agent; the person has confirmed it where it would stop something.
        hidden(): there is no tray and the window was closed, so nothing shows any more.
    """

    pause_wanted = Signal(bool)
    quit_wanted = Signal()
    hidden = Signal()

    def __init__(self, has_tray: bool | None = None) -> None:
        super().__init__()
        self._face = UNREACHABLE
        self._has_tray = QSystemTrayIcon.isSystemTrayAvailable() if has_tray is None else has_tray
        self.window = StatusWindow()
        self.window.pause_wanted.connect(self.pause_wanted)
        self.window.quit_wanted.connect(self._confirm_quit)
        self.window.closed.connect(self._window_closed)
        self._menu = QMenu()
        self.title_action = QAction(self._face.title, self._menu)
        self.title_action.triggered.connect(self._open_window)
        self.pause_action = QAction("Pause", self._menu)
        self.pause_action.triggered.connect(lambda: self.pause_wanted.emit(not self._face.paused))
        self.quit_action = QAction("Quit", self._menu)
        self.quit_action.triggered.connect(self._confirm_quit)
        self._menu.addAction(self.title_action)
        self._menu.addSeparator()
        self._menu.addAction(self.pause_action)
        self._menu.addAction(self.quit_action)
        self.icon: QSystemTrayIcon | None = None
        if self._has_tray:
            self.icon = QSystemTrayIcon(mood_icon(self._face))
            self.icon.setContextMenu(self._menu)
            self.icon.activated.connect(self._activated)
        self.show_face(self._face)

    def show(self) -> None:
        """Show the icon, or the window where there is no tray."""
        if self.icon is not None:
            self.icon.show()
        else:
            self._open_window()

    def show_face(self, face: Face) -> None:
        """Show what the agent does."""
        mood_changed = face.mood != self._face.mood
        self._face = face
        self.window.show_face(face)
        self.window.setWindowIcon(mood_icon(face))
        self.title_action.setText(face.title)
        self.pause_action.setText("Resume" if face.paused else "Pause")
        self.pause_action.setEnabled(face.reachable)
        self.quit_action.setEnabled(face.reachable)
        if self.icon is not None:
            self.icon.setToolTip(face.tooltip)
            if mood_changed:
                self.icon.setIcon(mood_icon(face))

    def _activated(self, reason: QSystemTrayIcon.ActivationReason) -> None:
        if reason == QSystemTrayIcon.ActivationReason.Trigger:
            self._open_window()

    def _open_window(self) -> None:
        self.window.show()
        self.window.raise_()
        self.window.activateWindow()

    def _confirm_quit(self) -> None:
        if self._face.mood not in ("busy", "serving") or self._really_quit():
            self.quit_wanted.emit()

    def _really_quit(self) -> bool:
        answer = QMessageBox.question(
            self.window,
            "Quit Paceline",
            "This PC works for the fleet now. Those who use the model will be interrupted. Quit all the same?",
        )
        return answer == QMessageBox.StandardButton.Yes

    def _window_closed(self) -> None:
        if self.icon is None:
            self.hidden.emit()
