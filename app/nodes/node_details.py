"""Everything about one node, below the table."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, Qt
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QLabel, QScrollArea, QVBoxLayout, QWidget

from app.looks import words
from app.looks.widgets import Banner, CopyButton, StateLabel, heading, muted
from app.nodes.node_columns import short_device_name
from fleet.node import Device
from fleet.views import NodeView

_COLUMNS = 3


class NodeDetails(QScrollArea):
    """Shows one ``NodeView``; labels are reused, so that reading and selecting goes on while values change."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(self.tr("Details of the chosen PC"))
        self._node: NodeView | None = None
        content = QWidget(self)
        content.setProperty("scrolled", True)
        self._name = heading("", 2, content)
        self._state = StateLabel(content)
        self._detail = muted("", content)
        self._faults = Banner(content, tone="warning")
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(24)
        self._grid.setVerticalSpacing(10)
        for column in range(_COLUMNS):
            self._grid.setColumnStretch(column, 1)
        self._facts: dict[str, _Fact] = {}
        self._copy = CopyButton(self.tr("Copy details"), self.as_text, content, with_text=True)
        header = QHBoxLayout()
        header.setSpacing(12)
        header.addWidget(self._name)
        header.addWidget(self._state)
        header.addWidget(self._detail, 1)
        header.addWidget(self._copy)
        column_layout = QVBoxLayout(content)
        column_layout.setContentsMargins(4, 0, 8, 0)
        column_layout.setSpacing(10)
        column_layout.addLayout(header)
        column_layout.addWidget(self._faults)
        column_layout.addLayout(self._grid)
        column_layout.addStretch(1)
        self.setWidget(content)
        self.show_node(None)

    def show_node(self, node: NodeView | None) -> None:
        """Show this node; None: nothing is chosen."""
        if node is not None and node == self._node:
            return
        self._node = node
        self._state.setVisible(node is not None)
        self._copy.setVisible(node is not None)
        self._name.setVisible(node is not None)
        if node is None:
            self._detail.setText(self.tr("Choose a PC in the table to see its devices, drivers, disk and faults."))
            self._faults.clear()
            self._show_facts([])
            return
        self._name.setText(node.name)
        self._state.set_wording(words.node_state(node.state))
        self._detail.setText(node.detail)
        faults = node.inventory.faults if node.inventory is not None else ()
        if faults:
            self._faults.show_message("\n".join(faults), tone="warning")
        else:
            self._faults.clear()
        self._show_facts(node_facts(node))

    def as_text(self) -> str:
        """What the copy button copies."""
        if self._node is None:
            return ""
        lines = [self._node.name, words.node_state(self._node.state).text, self._node.detail]
        lines += [f"{title}: {value}" for _key, title, value in node_facts(self._node)]
        if self._node.inventory is not None:
            lines += self._node.inventory.faults
        return "\n".join(line for line in lines if line)

    def _show_facts(self, facts: list[tuple[str, str, str]]) -> None:
        if [key for key, _title, _value in facts] != list(self._facts):
            for fact in self._facts.values():
                self._grid.removeWidget(fact)
                fact.hide()
                fact.deleteLater()
            self._facts = {key: _Fact() for key, _title, _value in facts}
            for number, fact in enumerate(self._facts.values()):
                self._grid.addWidget(fact, number // _COLUMNS, number % _COLUMNS, Qt.AlignmentFlag.AlignTop)
        for key, title, value in facts:
            self._facts[key].show_fact(title, value)


class _Fact(QWidget):
    """A title and what there is to say."""

    def __init__(self) -> None:
        super().__init__()
        self._title = muted("", self, wrap=False)
        self._value = QLabel(self)
        self._value.setWordWrap(True)
        self._value.setTextFormat(Qt.TextFormat.PlainText)
        self._value.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(1)
        column.addWidget(self._title)
        column.addWidget(self._value)

    def show_fact(self, title: str, value: str) -> None:
        if self._title.text() != title:
            self._title.setText(title)
        if self._value.text() != value:
            self._value.setText(value)


def node_facts(node: NodeView) -> list[tuple[str, str, str]]:
    """(key, title, value) of everything that is known of a node, in the order in which it is read."""
    translate = QCoreApplication.translate
    facts = [("addresses", translate("NodeDetails", "Addresses"), ", ".join(node.addresses))]
    inventory, load = node.inventory, node.load
    if inventory is not None:
        cores = translate("NodeDetails", "{cpu}, {cores} cores")
        facts.append(
            (
                "cpu",
                translate("NodeDetails", "Processor"),
                cores.format(cpu=short_device_name(inventory.cpu), cores=inventory.cores),
            )
        )
        facts += [
            (
                device.device,
                translate("NodeDetails", "OpenVINO device {name}").format(name=device.device),
                describe(device),
            )
            for device in inventory.devices
        ]
        memory = translate("NodeDetails", "{total}, of which stages may take {budget}")
        facts.append(
            (
                "memory",
                translate("NodeDetails", "Memory"),
                memory.format(
                    total=words.size(inventory.memory_total_bytes), budget=words.size(inventory.memory_budget_bytes)
                ),
            )
        )
    if load is not None:
        now = translate("NodeDetails", "{free} of memory free, processor {percent} % busy")
        text = now.format(free=words.size(load.memory_free_bytes), percent=round(load.cpu_percent))
        if load.battery_percent is not None:
            power = (
                translate("NodeDetails", "on battery, {percent} %")
                if load.on_battery
                else translate("NodeDetails", "on mains, battery {percent} %")
            )
            text = f"{text}, {power.format(percent=round(load.battery_percent))}"
        facts.append(("load", translate("NodeDetails", "Now"), text))
    if inventory is not None:
        disk = translate("NodeDetails", "{total}").format(total=words.size(inventory.disk_total_bytes))
        if load is not None:
            disk = translate("NodeDetails", "{free} free of {total}").format(
                free=words.size(load.disk_free_bytes), total=words.size(inventory.disk_total_bytes)
            )
        facts.append(("disk", translate("NodeDetails", "Disk"), disk))
        facts.append(("system", translate("NodeDetails", "Operating system"), inventory.operating_system))
        facts.append(
            (
                "versions",
                translate("NodeDetails", "Versions"),
                translate("NodeDetails", "agent {agent}, OpenVINO {openvino}").format(
                    agent=inventory.agent_version, openvino=inventory.openvino_version
                ),
            )
        )
    for stage in node.stages:
        text = f"{stage.model}, {words.layer_range(stage.first_layer, stage.end_layer)}"
        text = f"{text}: {words.stage_state(stage.state).text}"
        if stage.memory_bytes:
            text = f"{text}, {words.size(stage.memory_bytes)}"
        if stage.detail:
            text = f"{text} ({stage.detail})"
        key = f"stage-{stage.deployment}-{stage.stage}"
        facts.append((key, translate("NodeDetails", "Stage {number}").format(number=stage.stage), text))
    facts.append(("identity", translate("NodeDetails", "Identity"), node.id))
    return facts


def describe(device: Device) -> str:
    """A device in one line: name, architecture, memory, driver, capabilities."""
    translate = QCoreApplication.translate
    parts = [short_device_name(device.name)]
    if device.architecture:
        parts.append(device.architecture)
    if device.memory_bytes:
        shared = translate("NodeDetails", "{size} shared with the processor")
        own = translate("NodeDetails", "{size} of its own")
        parts.append((shared if device.integrated else own).format(size=words.size(device.memory_bytes)))
    if device.driver:
        parts.append(translate("NodeDetails", "driver {version}").format(version=device.driver))
    if device.capabilities:
        parts.append(" ".join(device.capabilities))
    return ", ".join(parts)
