"""The Placement page: the model's layers on the PCs, as a picture and as a table of the same draft."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QCoreApplication, QItemSelectionModel, Qt, Signal
from PySide6.QtGui import QUndoStack
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHBoxLayout,
    QHeaderView,
    QMenu,
    QPushButton,
    QSplitter,
    QStackedWidget,
    QTableView,
    QVBoxLayout,
    QWidget,
)

from app.looks import words
from app.looks.widgets import (
    Banner,
    Card,
    EmptyState,
    StateLabel,
    ThemedButton,
    heading,
    muted,
    plain_label,
    plain_tooltip,
    primary_button,
)
from app.looks.words import Wording
from app.placement.assessment import Assessment, Demand
from app.placement.build_strip import BuildStrip
from app.placement.canvas import PlacementCanvas
from app.placement.draft import PlacementDraft
from app.placement.draft_commands import ChangeDraft
from app.placement.legend import MemoryLegend
from app.placement.model_bar import ModelBar
from app.placement.stage_table_model import StageTableModel
from fleet.build_messages import BuildProgress
from fleet.node import NodeId
from fleet.views import FleetView

_STEP_KEY = 1000


def problem_text(assessment: Assessment) -> str:
    """Which PCs are over their budget, by how much, and what to do; empty where everything fits."""
    translate = QCoreApplication.translate
    parts = [
        translate("PlacementPage", "{node} needs {need} for {layers} and has {budget}: {excess} too much.").format(
            node=stage.node_name,
            need=words.size(stage.needed_bytes),
            layers=words.layer_range(stage.first_layer, stage.end_layer),
            budget=words.size(stage.budget_bytes),
            excess=words.size(stage.needed_bytes - stage.budget_bytes),
        )
        for number, stage in enumerate(assessment.stages)
        if assessment.over_budget(number)
    ]
    if parts:
        parts.append(translate("PlacementPage", "Move layers to another PC, or lower context or users."))
    return " ".join(parts)


class PlacementPage(QWidget):
    """Changes a ``PlacementDraft``; what it means comes back through ``show_assessment``.

    Signals:
        path_chosen: a model, IR folder or shard folder was chosen.
        demand_changed: context or users are others now (``Demand``).
        proposal_wanted: the planner shall propose anew.
        draft_changed: the draft is another one now (``PlacementDraft``).
        deploy_wanted: build if need be, and deploy this draft.
        build_cancel_wanted: stop the build.
    """

    path_chosen = Signal(str)
    demand_changed = Signal(object)
    proposal_wanted = Signal()
    draft_changed = Signal(object)
    deploy_wanted = Signal()
    build_cancel_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._draft: PlacementDraft | None = None
        self._before_drag: PlacementDraft | None = None
        self._undo_stack = QUndoStack(self)
        self._summary = muted("", wrap=False)
        self.banner = Banner(self)
        self._bar = ModelBar(self)
        self._bar.path_chosen.connect(self.path_chosen)
        self._bar.demand_changed.connect(lambda: self.demand_changed.emit(self.demand))
        self._strip = BuildStrip(self)
        self._strip.cancel_wanted.connect(self.build_cancel_wanted)
        self._canvas = PlacementCanvas(self)
        self._model = StageTableModel(self)
        self._table = self._make_table()
        self._verdict = StateLabel(self)
        self._reason = muted("", self)
        self._deploy = primary_button(self.tr("Deploy"), self)
        self._deploy.clicked.connect(self.deploy_wanted)
        self._note = plain_label("", self)
        self._empty = self._make_empty_state()
        self._stack = QStackedWidget(self)
        self._arrange()
        self._connect()
        self.show_assessment(None)

    @property
    def demand(self) -> Demand:
        return self._bar.demand

    @property
    def draft(self) -> PlacementDraft | None:
        return self._draft

    def set_view(self, view: FleetView) -> None:
        """Take a snapshot of the fleet."""
        ready = sum(node.state == "ready" for node in view.nodes)
        self._summary.setText(self.tr("PCs that can take layers: {count}").format(count=ready))

    def set_recent(self, paths: Sequence[str], chosen: str | None) -> None:
        self._bar.set_recent(paths, chosen)

    def set_demand(self, demand: Demand) -> None:
        self._bar.set_demand(demand)

    def choose_file(self) -> None:
        self._bar.choose_file()

    def set_draft(self, draft: PlacementDraft | None) -> None:
        """Begin with a new proposal; what was undoable is forgotten."""
        self._undo_stack.clear()
        self._before_drag = None
        self._show_draft(draft)

    def undo(self) -> None:
        self._undo_stack.undo()

    def redo(self) -> None:
        self._undo_stack.redo()

    def show_assessment(self, assessment: Assessment | None, left_out: str = "") -> None:
        """Show what the draft needs and whether it fits; ``left_out`` says in words which PCs are not used and why."""
        self._canvas.set_assessment(assessment)
        self._model.set_assessment(assessment)
        self._stack.setCurrentIndex(0 if assessment is not None else 1)
        self._verdict.setVisible(assessment is not None)
        self._deploy.setVisible(assessment is not None)
        if assessment is None:
            self._reason.setText("")
        elif not assessment.fits:
            self._verdict.set_wording(Wording(self.tr("Does not fit"), "state-error", "error"))
            self._reason.setText(problem_text(assessment))
        else:
            self._verdict.set_wording(Wording(self.tr("Fits"), "state-ok", "ok"))
            self._reason.setText(left_out)
        self._enable_tools()

    def show_build(self, progress: BuildProgress | None) -> None:
        """How far a build is, or None while nothing is built."""
        self._strip.show_progress(progress)

    def set_action(self, text: str, *, enabled: bool, why: str = "") -> None:
        """What the main button does, and why it cannot where it cannot."""
        self._deploy.setText(text)
        self._deploy.setEnabled(enabled)
        self._deploy.setToolTip(plain_tooltip(why))
        self._note.setText(why)
        self._note.setVisible(bool(why))

    def set_busy(self, busy: bool) -> None:
        """While a model is opened, built or deployed, nothing else can be begun."""
        self._bar.setEnabled(not busy)
        self._propose.setEnabled(not busy and self._draft is not None)

    def canvas(self) -> PlacementCanvas:
        return self._canvas

    def table(self) -> QTableView:
        return self._table

    def deploy_button(self) -> QPushButton:
        return self._deploy

    def move_boundary(self, boundary: int, layers: int) -> None:
        """Move a boundary by so many layers."""
        if self._draft is not None:
            self._change(self.tr("Move boundary"), self._draft.moved(boundary, layers), _STEP_KEY + boundary)

    def _show_draft(self, draft: PlacementDraft | None) -> None:
        self._draft = draft
        self.draft_changed.emit(draft)

    def _change(self, text: str, after: PlacementDraft, merge_key: int = -1) -> None:
        if self._draft is not None and after != self._draft:
            self._undo_stack.push(ChangeDraft(text, self._draft, after, self._show_draft, merge_key))

    def _drag(self, boundary: int, layer: int) -> None:
        if self._draft is None:
            return
        if self._before_drag is None:
            self._before_drag = self._draft
        self._show_draft(self._draft.with_boundary(boundary, layer))

    def _finish_drag(self) -> None:
        before, after = self._before_drag, self._draft
        self._before_drag = None
        if before is not None and after is not None and before != after:
            self._undo_stack.push(ChangeDraft(self.tr("Move boundary"), before, after, self._show_draft))

    def _edit_layers(self, stage: int, count: int) -> None:
        if self._draft is not None:
            self._change(self.tr("Change layers"), self._draft.with_layers(stage, count))

    def _move_stage(self, stage: int, direction: int) -> None:
        if self._draft is not None and 0 <= stage + direction < len(self._draft.nodes):
            self._change(self.tr("Change order"), self._draft.exchanged(stage, stage + direction))
            self._choose_stage(stage + direction)

    def _leave_out(self) -> None:
        if self._draft is not None:
            self._change(self.tr("Leave out PC"), self._draft.without(self._canvas.chosen_stage))

    def _fill_add_menu(self) -> None:
        self._add_menu.clear()
        for node in self._draft.unused if self._draft is not None else ():
            action = self._add_menu.addAction(node.name)
            action.triggered.connect(lambda _checked=False, identity=node.id: self._use_node(identity))

    def _use_node(self, identity: NodeId) -> None:
        if self._draft is not None:
            self._change(self.tr("Use PC"), self._draft.with_node(identity))

    def _choose_stage(self, stage: int) -> None:
        self._canvas.choose_stage(stage)
        index = self._model.index(stage, 0)
        flags = QItemSelectionModel.SelectionFlag.ClearAndSelect | QItemSelectionModel.SelectionFlag.Rows
        self._table.selectionModel().setCurrentIndex(index, flags)
        self._enable_tools()

    def _on_row(self) -> None:
        rows = self._table.selectionModel().selectedRows()
        if rows:
            self._canvas.choose_stage(rows[0].row())
        self._enable_tools()

    def _enable_tools(self) -> None:
        count = 0 if self._draft is None else len(self._draft.nodes)
        stage = self._canvas.chosen_stage
        self._up.setEnabled(count > 1 and stage > 0)
        self._down.setEnabled(count > 1 and stage < count - 1)
        self._leave.setEnabled(count > 1)
        self._add.setEnabled(self._draft is not None and bool(self._draft.unused))
        self._propose.setEnabled(self._draft is not None)

    def _connect(self) -> None:
        self._canvas.boundary_dragged.connect(self._drag)
        self._canvas.drag_finished.connect(self._finish_drag)
        self._canvas.boundary_stepped.connect(self.move_boundary)
        self._canvas.stage_moved.connect(self._move_stage)
        self._canvas.stage_chosen.connect(self._choose_stage)
        self._model.layers_edited.connect(self._edit_layers)
        self._table.selectionModel().selectionChanged.connect(self._on_row)
        self._undo_stack.canUndoChanged.connect(self._undo.setEnabled)
        self._undo_stack.canRedoChanged.connect(self._redo.setEnabled)

    def _make_table(self) -> QTableView:
        table = QTableView(self)
        table.setModel(self._model)
        table.setAccessibleName(self.tr("Stages of the placement"))
        table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        table.setShowGrid(False)
        table.setTabKeyNavigation(False)
        table.setWordWrap(False)
        table.verticalHeader().setVisible(False)
        table.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        table.verticalHeader().setDefaultSectionSize(round(table.fontMetrics().height() * 2.1))
        table.horizontalHeader().setHighlightSections(False)
        table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        table.horizontalHeader().setFocusPolicy(Qt.FocusPolicy.NoFocus)
        return table

    def _make_empty_state(self) -> EmptyState:
        empty = EmptyState(
            "placement",
            self.tr("Choose a model to place"),
            self.tr(
                "A GGUF file or the folder of an OpenVINO model is first cut into shards; this takes from seconds to a "
                "few minutes. A folder of shards opens at once. Then you see which layers go to which PC, and can "
                "change it."
            ),
            self,
        )
        choose_file = primary_button(self.tr("Choose a GGUF file…"), empty)
        choose_file.clicked.connect(self._bar.choose_file)
        choose_folder = QPushButton(self.tr("Choose a folder…"), empty)
        choose_folder.clicked.connect(self._bar.choose_folder)
        empty.add_widget(choose_file)
        empty.add_widget(choose_folder)
        return empty

    def _make_tools(self) -> QHBoxLayout:
        self._undo = ThemedButton("undo", self.tr("Undo"), self, clicked=self.undo)
        self._redo = ThemedButton("redo", self.tr("Redo"), self, clicked=self.redo)
        self._undo.setToolTip(self.tr("Undo (Ctrl+Z)"))
        self._redo.setToolTip(self.tr("Redo (Ctrl+Shift+Z)"))
        self._undo.setEnabled(False)
        self._redo.setEnabled(False)
        self._up = ThemedButton(
            "up", self.tr("Earlier in the order"), self, clicked=lambda: self._move_stage(self._canvas.chosen_stage, -1)
        )
        self._down = ThemedButton(
            "down", self.tr("Later in the order"), self, clicked=lambda: self._move_stage(self._canvas.chosen_stage, 1)
        )
        self._leave = ThemedButton(
            "remove", self.tr("Leave out this PC"), self, clicked=self._leave_out, with_text=True
        )
        self._add = ThemedButton("add", self.tr("Use another PC"), self, with_text=True)
        self._add_menu = QMenu(self._add)
        self._add_menu.aboutToShow.connect(self._fill_add_menu)
        self._add.setMenu(self._add_menu)
        self._add.setPopupMode(ThemedButton.ToolButtonPopupMode.InstantPopup)
        self._propose = ThemedButton(
            "propose", self.tr("Propose anew"), self, clicked=self.proposal_wanted.emit, with_text=True
        )
        row = QHBoxLayout()
        row.setSpacing(2)
        for tool in (self._undo, self._redo, self._up, self._down, self._leave, self._add, self._propose):
            row.addWidget(tool)
        row.addStretch(1)
        row.addWidget(MemoryLegend(self))
        return row

    def _arrange(self) -> None:
        picture = Card(margin=8, spacing=4)
        picture.body.addLayout(self._make_tools())
        picture.body.addWidget(self._canvas, 1)
        table = Card(margin=1)
        table.body.addWidget(self._table)
        splitter = QSplitter(Qt.Orientation.Vertical, self)
        splitter.setChildrenCollapsible(False)
        splitter.setHandleWidth(10)
        splitter.addWidget(picture)
        splitter.addWidget(table)
        splitter.setStretchFactor(0, 3)
        splitter.setStretchFactor(1, 2)
        self._stack.addWidget(splitter)
        self._stack.addWidget(self._empty)
        title = QHBoxLayout()
        title.setSpacing(12)
        title.addWidget(heading(self.tr("Placement")))
        title.addWidget(self._summary)
        title.addStretch(1)
        self._note.setProperty("muted", True)
        bottom = QHBoxLayout()
        bottom.setSpacing(12)
        bottom.addWidget(self._verdict)
        bottom.addWidget(self._reason, 1)
        bottom.addWidget(self._note)
        bottom.addWidget(self._deploy)
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 16, 20, 16)
        column.setSpacing(12)
        column.addLayout(title)
        column.addWidget(self._bar)
        column.addWidget(self.banner)
        column.addWidget(self._strip)
        column.addWidget(self._stack, 1)
        column.addLayout(bottom)
