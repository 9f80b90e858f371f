"""The Fleet page: a live table of the nodes, a filter, and the details of one."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QAction, QIcon
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHBoxLayout,
    QHeaderView,
    QLineEdit,
    QPushButton,
    QSplitter,
    QStackedWidget,
    QTableView,
    QVBoxLayout,
    QWidget,
)

from app.looks.icons import icon
from app.looks.theme import theme
from app.looks.widgets import Banner, Card, EmptyState, heading, muted, primary_button
from app.nodes.memory_delegate import MemoryDelegate
from app.nodes.node_columns import COLUMNS
from app.nodes.node_details import NodeDetails
from app.nodes.node_filter import NodeFilter
from app.nodes.node_table_model import NODE_ROLE, NodeTableModel
from fleet.views import FleetView, NodeView

_COLUMN_CHARACTERS = {"name": 11, "state": 18, "address": 12, "memory": 20, "cpu": 18, "gpu": 17, "npu": 8}


class FleetPage(QWidget):
    """Who is there.

    Signals:
        token_wanted: the person asks for an enrolment token.
    """

    token_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._model = NodeTableModel(self)
        self._proxy = NodeFilter(self)
        self._proxy.setSourceModel(self._model)
        self._summary = muted("", wrap=False)
        self.banner = Banner(self)
        self._filter = self._make_filter()
        self._token_button = QPushButton(self.tr("Create enrolment token…"), self)
        self._token_button.clicked.connect(self.token_wanted)
        self._table = self._make_table()
        self._details = NodeDetails(self)
        self._stack = QStackedWidget(self)
        self._stack.addWidget(self._make_splitter())
        self._stack.addWidget(self._make_empty_state())
        self._arrange()
        theme().changed.connect(self._tint)
        self._tint()
        self.set_view(FleetView())

    def set_view(self, view: FleetView) -> None:
        """Take a snapshot of the fleet."""
        self._model.set_nodes(view.nodes)
        self._stack.setCurrentIndex(0 if view.nodes else 1)
        self._filter.setEnabled(bool(view.nodes))
        ready = sum(node.state == "ready" for node in view.nodes)
        self._summary.setText(
            self.tr("{ready} of {count} PCs ready").format(ready=ready, count=len(view.nodes)) if view.nodes else ""
        )
        if view.nodes and not self._table.selectionModel().hasSelection() and self._proxy.rowCount():
            self._table.selectRow(0)
        self._show_selected()

    def focus_table(self) -> None:
        self._table.setFocus(Qt.FocusReason.OtherFocusReason)

    def focus_filter(self) -> None:
        self._filter.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self._filter.selectAll()

    def selected_node(self) -> NodeView | None:
        rows = self._table.selectionModel().selectedRows()
        node = rows[0].data(NODE_ROLE) if rows else None
        return node if isinstance(node, NodeView) else None

    def _show_selected(self) -> None:
        self._details.show_node(self.selected_node())

    def _make_filter(self) -> QLineEdit:
        field = QLineEdit(self)
        field.setPlaceholderText(self.tr("Filter by name, address, device…"))
        field.setAccessibleName(self.tr("Filter the PCs"))
        field.setToolTip(self.tr("Filter the PCs (Ctrl+F)"))
        field.setClearButtonEnabled(True)
        field.setMaximumWidth(field.fontMetrics().averageCharWidth() * 46)
        field.textChanged.connect(self._proxy.set_filter_text)
        self._search_action = QAction(QIcon(), "", field)
        field.addAction(self._search_action, QLineEdit.ActionPosition.LeadingPosition)
        return field

    def _make_table(self) -> QTableView:
        table = QTableView(self)
        table.setModel(self._proxy)
        table.setAccessibleName(self.tr("PCs of the fleet"))
        table.setItemDelegateForColumn(self._column("memory"), MemoryDelegate(table))
        table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        table.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        table.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        table.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        table.setShowGrid(False)
        table.setWordWrap(False)
        table.setTabKeyNavigation(False)
        table.setSortingEnabled(True)
        table.sortByColumn(0, Qt.SortOrder.AscendingOrder)
        table.verticalHeader().setVisible(False)
        table.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        table.verticalHeader().setDefaultSectionSize(round(table.fontMetrics().height() * 2.7))
        header = table.horizontalHeader()
        header.setHighlightSections(False)
        header.setSectionsMovable(True)
        header.setStretchLastSection(True)
        header.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        width = table.fontMetrics().averageCharWidth()
        for number, column in enumerate(COLUMNS):
            header.resizeSection(number, width * _COLUMN_CHARACTERS[column.key] + 24)
        table.selectionModel().selectionChanged.connect(self._show_selected)
        return table

    def _make_splitter(self) -> QSplitter:
        splitter = QSplitter(Qt.Orientation.Vertical, self)
        splitter.setChildrenCollapsible(False)
        splitter.setHandleWidth(10)
        above = Card(margin=1)
        above.body.addWidget(self._table)
        below = Card(margin=14)
        below.body.addWidget(self._details)
        below.setMinimumHeight(self.fontMetrics().height() * 8)
        splitter.addWidget(above)
        splitter.addWidget(below)
        splitter.setStretchFactor(0, 3)
        splitter.setStretchFactor(1, 2)
        splitter.setSizes([380, 320])
        return splitter

    def _make_empty_state(self) -> EmptyState:
        empty = EmptyState(
            "fleet",
            self.tr("Looking for PCs on this network…"),
            self.tr(
                "Start the agent on each PC: 'paceline agent --enrol TOKEN'. PCs that run it then appear here. "
                "If one does not: check that both PCs are on the same network, that its firewall lets the agent in "
                "(UDP port 5353 for discovery, and the agent's own ports), and that a Windows PC's network is set to "
                "'private'."
            ),
            self,
        )
        button = primary_button(self.tr("Create enrolment token…"))
        button.clicked.connect(self.token_wanted)
        empty.add_widget(button)
        return empty

    def _arrange(self) -> None:
        title = QHBoxLayout()
        title.setSpacing(12)
        title.addWidget(heading(self.tr("Fleet")))
        title.addWidget(self._summary)
        title.addStretch(1)
        title.addWidget(self._filter, 2)
        title.addWidget(self._token_button)
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 16, 20, 20)
        column.setSpacing(12)
        column.addLayout(title)
        column.addWidget(self.banner)
        column.addWidget(self._stack, 1)

    @staticmethod
    def _column(key: str) -> int:
        return next(number for number, column in enumerate(COLUMNS) if column.key == key)

    def _tint(self) -> None:
        self._search_action.setIcon(icon("search", theme().tokens.text_muted))
