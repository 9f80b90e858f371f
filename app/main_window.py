"""The control panel's window: navigation, pages, shortcuts, and an orderly end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QAction, QCloseEvent, QKeySequence
from PySide6.QtWidgets import (
    QDialog,
    QFormLayout,
    QHBoxLayout,
    QLabel,
    QMainWindow,
    QPushButton,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.chat.chat_page import ChatPage
from app.deploy.deploy_page import DeployPage
from app.looks.icons import icon
from app.looks.theme import theme
from app.looks.tokens import SchemeChoice
from app.looks.widgets import Banner, BusyLine, heading
from app.nodes.fleet_page import FleetPage
from app.placement.placement_page import PlacementPage
from app.settings import Settings
from app.side_bar import SideBar
from fleet.views import FleetView

PageName = Literal["fleet", "placement", "deploy", "chat"]
PAGES: tuple[PageName, ...] = ("fleet", "placement", "deploy", "chat")
_NEXT_SCHEME: dict[SchemeChoice, SchemeChoice] = {"auto": "light", "light": "dark", "dark": "auto"}


class MainWindow(QMainWindow):
    """All pages, fed with snapshots of the fleet.

    Signals:
        close_wanted: the person closes the window; it stays until ``close_now`` is called.
    """

    close_wanted = Signal()

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self._may_close = False
        self._shortcuts: list[tuple[str, str]] = []
        self.setWindowTitle("Paceline")
        self.setWindowIcon(icon("paceline"))
        self.fleet_page = FleetPage(self)
        self.placement_page = PlacementPage(self)
        self.deploy_page = DeployPage(self)
        self.chat_page = ChatPage(self)
        self._side_bar = SideBar(
            (
                ("fleet", self.tr("Fleet")),
                ("placement", self.tr("Placement")),
                ("deploy", self.tr("Deploy")),
                ("chat", self.tr("Chat")),
            ),
            self,
        )
        self.banner = Banner(self)
        self.banner.add_button(self.tr("Dismiss"), self.banner.clear)
        self._busy = BusyLine(self)
        self._stack = QStackedWidget(self)
        for page in (self.fleet_page, self.placement_page, self.deploy_page, self.chat_page):
            self._stack.addWidget(page)
        self._arrange()
        self._add_shortcuts()
        self._side_bar.page_wanted.connect(self._show_number)
        self._side_bar.theme_wanted.connect(self.next_scheme)
        self._side_bar.shortcuts_wanted.connect(self.show_shortcuts)
        self.chat_page.placement_wanted.connect(lambda: self.show_page("placement"))
        self.deploy_page.placement_wanted.connect(lambda: self.show_page("placement"))
        self._name_theme()
        self.resize(1280, 800)
        if not settings.geometry.isEmpty():
            self.restoreGeometry(settings.geometry)
        self.show_page("fleet")

    @property
    def page(self) -> PageName:
        return PAGES[self._stack.currentIndex()]

    def show_page(self, name: PageName) -> None:
        number = PAGES.index(name)
        self._stack.setCurrentIndex(number)
        self._side_bar.set_page(number)
        if name == "fleet":
            self.fleet_page.focus_table()
        elif name == "chat":
            self.chat_page.focus_prompt()

    def set_view(self, view: FleetView) -> None:
        """Show a snapshot of the fleet on every page."""
        self.fleet_page.set_view(view)
        self.placement_page.set_view(view)
        self.deploy_page.set_view(view)
        self.chat_page.set_view(view)
        ready = sum(node.state == "ready" for node in view.nodes)
        models = sum(deployment.state == "ready" for deployment in view.deployments)
        self._side_bar.set_status(self.tr("PCs ready: {pcs}\nModels ready: {models}").format(pcs=ready, models=models))

    def show_progress(self, text: str) -> None:
        """What is being done at the moment; empty: nothing."""
        self._busy.show_text(text)

    def next_scheme(self) -> None:
        """From auto to light to dark and back."""
        choice = _NEXT_SCHEME[theme().choice]
        theme().set_choice(choice)
        self._settings.scheme = choice
        self._name_theme()

    def show_shortcuts(self) -> None:
        """A list of all keys."""
        dialog = QDialog(self)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.setWindowTitle(self.tr("Keyboard shortcuts"))
        form = QFormLayout()
        form.setHorizontalSpacing(28)
        form.setVerticalSpacing(8)
        for keys, what in self._shortcuts:
            form.addRow(QLabel(keys, dialog), QLabel(what, dialog))
        close = QPushButton(self.tr("Close"), dialog)
        close.clicked.connect(dialog.accept)
        column = QVBoxLayout(dialog)
        column.setContentsMargins(20, 18, 20, 14)
        column.setSpacing(14)
        column.addWidget(heading(self.tr("Keyboard shortcuts"), 2))
        column.addLayout(form)
        column.addWidget(close, 0, Qt.AlignmentFlag.AlignRight)
        dialog.open()

    def close_now(self) -> None:
        """Close after everything behind the window has ended."""
        self._may_close = True
        self.close()

    def closeEvent(self, event: QCloseEvent) -> None:
        self._settings.geometry = self.saveGeometry()
        self._settings.save()
        if self._may_close:
            event.accept()
            return
        event.ignore()
        self.close_wanted.emit()

    def _show_number(self, number: int) -> None:
        self.show_page(PAGES[number])

    def _arrange(self) -> None:
        right = QVBoxLayout()
        right.setContentsMargins(0, 0, 0, 0)
        right.setSpacing(0)
        news = QVBoxLayout()
        news.setContentsMargins(20, 0, 20, 0)
        news.setSpacing(8)
        news.addWidget(self.banner)
        news.addWidget(self._busy)
        right.addLayout(news)
        right.addWidget(self._stack, 1)
        content = QWidget(self)
        row = QHBoxLayout(content)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        row.addWidget(self._side_bar)
        row.addLayout(right, 1)
        self.setCentralWidget(content)

    def _add_shortcuts(self) -> None:
        for number, name in enumerate(PAGES, 1):
            title = (self.tr("Fleet"), self.tr("Placement"), self.tr("Deploy"), self.tr("Chat"))[number - 1]
            self._add_shortcut(
                f"Ctrl+{number}", self.tr("Go to {page}").format(page=title), partial(self.show_page, name)
            )
        self._add_shortcut("Ctrl+F", self.tr("Filter the PCs"), self._filter_nodes)
        self._add_shortcut("Ctrl+O", self.tr("Choose a model"), self._choose_model)
        self._add_shortcut("Ctrl+Z", self.tr("Undo a change of the placement"), self.placement_page.undo)
        self._add_shortcut("Ctrl+Shift+Z", self.tr("Redo it"), self.placement_page.redo)
        self._add_shortcut("Ctrl+N", self.tr("New chat"), self._new_chat)
        self._add_shortcut("Esc", self.tr("Stop the answer"), self._stop_answer)
        self._add_shortcut("Ctrl+T", self.tr("Change the theme"), self.next_scheme)
        self._add_shortcut("F1", self.tr("Show this list"), self.show_shortcuts)
        self._add_shortcut("Ctrl+Q", self.tr("Quit"), self.close)
        self._shortcuts.append(("←  →", self.tr("Move the chosen boundary by 1 layer, with Shift by 5")))
        self._shortcuts.append(("Alt+↑  Alt+↓", self.tr("Move the chosen PC in the order of the stages")))

    def _add_shortcut(self, keys: str, what: str, triggered: Callable[[], object]) -> None:
        action = QAction(what, self)
        action.setShortcut(QKeySequence(keys))
        action.triggered.connect(lambda _checked=False: triggered())
        self.addAction(action)
        shown = QKeySequence(keys).toString(QKeySequence.SequenceFormat.NativeText)
        self._shortcuts.append((shown, what))

    def _filter_nodes(self) -> None:
        self.show_page("fleet")
        self.fleet_page.focus_filter()

    def _choose_model(self) -> None:
        self.show_page("placement")
        self.placement_page.choose_file()

    def _new_chat(self) -> None:
        self.show_page("chat")
        self.chat_page.new_chat()

    def _stop_answer(self) -> None:
        if self.chat_page.answering:
            self.chat_page.stop_wanted.emit()

    def _name_theme(self) -> None:
        names = {
            "auto": self.tr("Theme: as the desktop (Ctrl+T)"),
            "light": self.tr("Theme: light (Ctrl+T)"),
            "dark": self.tr("Theme: dark (Ctrl+T)"),
        }
        self._side_bar.set_theme_name(names[theme().choice])
