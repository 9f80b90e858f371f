"""What to place: the model, and for how long a context and how many users."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QComboBox, QFileDialog, QHBoxLayout, QLabel, QPushButton, QSpinBox, QWidget

from app.looks.widgets import Card
from app.placement.assessment import Demand
from fleet.placement import DEFAULT_CONTEXT_TOKENS, DEFAULT_USERS


class ModelBar(Card):
    """A row of choices.

    Signals:
        path_chosen: the path of a GGUF file, an OpenVINO folder or a shard folder.
        demand_changed: context or users are others now.
    """

    path_chosen = Signal(str)
    demand_changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent, margin=12)
        self._recent = QComboBox(self)
        self._recent.setAccessibleName(self.tr("Model"))
        self._recent.view().setAccessibleName(self.tr("Models used lately"))
        self._recent.setPlaceholderText(self.tr("No model chosen yet"))
        self._recent.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self._recent.setMinimumContentsLength(24)
        self._recent.activated.connect(self._on_recent)
        self._file = QPushButton(self.tr("Choose &file…"), self)
        self._file.setToolTip(self.tr("A GGUF file (Ctrl+O)"))
        self._file.clicked.connect(self.choose_file)
        self._folder = QPushButton(self.tr("Choose f&older…"), self)
        self._folder.setToolTip(self.tr("A folder with an OpenVINO model, or with shards"))
        self._folder.clicked.connect(self.choose_folder)
        self._context = self._spin(self.tr("Tokens of context for each user"), 16, 1_048_576, DEFAULT_CONTEXT_TOKENS)
        self._context.setSingleStep(1024)
        self._users = self._spin(self.tr("Users who chat at once"), 1, 1024, DEFAULT_USERS)
        row = QHBoxLayout()
        row.setSpacing(8)
        for title, field, stretch in (
            (self.tr("&Model"), self._recent, 1),
            ("", self._file, 0),
            ("", self._folder, 0),
            (self.tr("&Context"), self._context, 0),
            (self.tr("&Users"), self._users, 0),
        ):
            if title:
                label = QLabel(title, self)
                label.setBuddy(field)
                row.addSpacing(0 if field is self._recent else 10)
                row.addWidget(label)
            row.addWidget(field, stretch)
        self.body.addLayout(row)

    @property
    def demand(self) -> Demand:
        return Demand(self._context.value(), self._users.value())

    def set_demand(self, demand: Demand) -> None:
        self._context.setValue(demand.context_tokens)
        self._users.setValue(demand.users)

    def set_recent(self, paths: Sequence[str], chosen: str | None) -> None:
        """Offer these paths; ``chosen`` is shown as the present one."""
        self._recent.blockSignals(True)
        self._recent.clear()
        for path in paths:
            self._recent.addItem(Path(path).name, path)
            self._recent.setItemData(self._recent.count() - 1, path, Qt.ItemDataRole.ToolTipRole)
        self._recent.setCurrentIndex(-1 if chosen is None else self._recent.findData(chosen))
        self._recent.setToolTip(chosen or "")
        self._recent.blockSignals(False)

    def choose_file(self) -> None:
        """Ask for a GGUF file."""
        dialog = QFileDialog(self, self.tr("Choose a model"))
        dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
        dialog.setNameFilters([self.tr("GGUF models (*.gguf)"), self.tr("All files (*)")])
        self._open(dialog)

    def choose_folder(self) -> None:
        """Ask for a folder with an OpenVINO model or with shards."""
        dialog = QFileDialog(self, self.tr("Choose the folder of an OpenVINO model or of shards"))
        dialog.setFileMode(QFileDialog.FileMode.Directory)
        self._open(dialog)

    def _open(self, dialog: QFileDialog) -> None:
        chosen = self._recent.currentData()
        if isinstance(chosen, str):
            dialog.setDirectory(str(Path(chosen).parent))
        dialog.fileSelected.connect(self.path_chosen)
        dialog.finished.connect(dialog.deleteLater)
        dialog.open()

    def _on_recent(self, index: int) -> None:
        path = self._recent.itemData(index)
        if isinstance(path, str):
            self.path_chosen.emit(path)

    def _spin(self, name: str, least: int, greatest: int, value: int) -> QSpinBox:
        spin = QSpinBox(self)
        spin.setRange(least, greatest)
        spin.setValue(value)
        spin.setGroupSeparatorShown(True)
        spin.setAccessibleName(name)
        spin.setToolTip(name)
        spin.setKeyboardTracking(False)
        spin.valueChanged.connect(lambda _value: self.demand_changed.emit())
        return spin
