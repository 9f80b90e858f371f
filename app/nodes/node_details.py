"""Everything about one node, beside the table."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, Qt
from PySide6.QtWidgets import QFormLayout, QLabel, QScrollArea, QVBoxLayout, QWidget

from app.looks import words
from app.looks.widgets import Banner, CopyButton, StateLabel, heading, muted
from app.nodes.node_columns import short_device_name
from fleet.node import Device
from fleet.views import NodeView


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
        self._name.setWordWrap(True)
        self._state = StateLabel(content)
        self._detail = muted("", content)
        self._faults = Banner(content, tone="warning")
        self._form = QFormLayout()
        self._form.setHorizontalSpacing(16)
        self._form.setVerticalSpacing(9)
        self._form.setRowWrapPolicy(QFormLayout.RowWrapPolicy.WrapAllRows)
        self._values: dict[str, tuple[QLabel, QLabel]] = {}
        self._copy = CopyButton(self.tr("Copy details"), self.as_text, content, with_text=True)
        column = QVBoxLayout(content)
        column.setContentsMargins(4, 0, 8, 0)
        column.setSpacing(8)
        column.addWidget(self._name)
        column.addWidget(self._state)
        column.addWidget(self._detail)
        column.addWidget(self._faults)
        column.addLayout(self._form)
        column.addWidget(self._copy, 0, Qt.AlignmentFlag.AlignLeft)
        column.addStretch(1)
        self.setWidget(content)
        self.show_node(None)

    def show_node(self, node: NodeView | None) -> None:
        """Show this node; None: nothing is chosen."""
        if node is not None and node == self._node:
            return
        self._node = node
        self._state.setVisible(node is not None)
        self._copy.setVisible(node is not None)
        if node is None:
            self._name.setText("")
            self._detail.setText(self.tr("Choose a PC in the table to see its devices, drivers, disk and faults."))
            self._faults.clear()
            self._show_values([])
            return
        self._name.setText(node.name)
        self._state.set_wording(words.node_state(node.state))
        self._detail.setText(node.detail)
        self._detail.setVisible(bool(node.detail))
        faults = node.inventory.faults if node.inventory is not None else ()
        if faults:
            self._faults.show_message("\n".join(faults), tone="warning")
        else:
            self._faults.clear()
        self._show_values(node_facts(node))

    def as_text(self) -> str:
        """What the copy button copies."""
        if self._node is None:
            return ""
        lines = [self._node.name, words.node_state(self._node.state).text, self._node.detail]
        lines += [f"{title}: {value}" for _key, title, value in node_facts(self._node)]
        if self._node.inventory is not None:
            lines += self._node.inventory.faults
        return "\n".join(line for line in lines if line)

    def _show_values(self, facts: list[tuple[str, str, str]]) -> None:
        keys = [key for key, _title, _value in facts]
        if keys != list(self._values):
            while self._form.rowCount():
                self._form.removeRow(0)
            self._values = {}
            for key, _title, _value in facts:
                title_label, value_label = muted("", wrap=False), QLabel()
                value_label.setWordWrap(True)
                value_label.setTextFormat(Qt.TextFormat.PlainText)
                value_label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
                self._form.addRow(title_label, value_label)
                self._values[key] = (title_label, value_label)
        for key, title, value in facts:
            title_label, value_label = self._values[key]
            if value_label.text() != value:
                value_label.setText(value)
            title_label.setText(title)


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
