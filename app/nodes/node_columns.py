"""The columns of the node table: what each shows, sorts by and explains."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple

from PySide6.QtCore import QCoreApplication

from app.looks import words
from fleet.node import Device
from fleet.views import NodeView

_NAME_NOISE = re.compile(r"\((?:R|TM|r|tm|iGPU|dGPU)\)|\bCPU @.*$|\bProcessor\b|\bIntel\b")


def short_device_name(name: str) -> str:
    """A device's name without maker, trademark signs and clock: 'Intel(R) Core(TM) Ultra 7' is 'Core Ultra 7'."""
    return " ".join(_NAME_NOISE.sub(" ", name).split()) or name


def devices_of(node: NodeView, kind: str) -> tuple[Device, ...]:
    """The node's OpenVINO devices of a kind: ``GPU`` finds ``GPU``, ``GPU.0`` and ``GPU.1``."""
    if node.inventory is None:
        return ()
    return tuple(device for device in node.inventory.devices if device.device.split(".")[0] == kind)


class MemoryShare(NamedTuple):
    """Memory of a node now, in bytes. ``free_bytes`` is None while the node has not said."""

    total_bytes: int
    free_bytes: int | None
    budget_bytes: int

    @property
    def used_bytes(self) -> int:
        return 0 if self.free_bytes is None else max(self.total_bytes - self.free_bytes, 0)


def memory_of(node: NodeView) -> MemoryShare | None:
    """None while the node's inventory is unknown."""
    if node.inventory is None:
        return None
    free = None if node.load is None else min(node.load.memory_free_bytes, node.inventory.memory_total_bytes)
    return MemoryShare(node.inventory.memory_total_bytes, free, node.inventory.memory_budget_bytes)


@dataclass(frozen=True)
class NodeColumn:
    """One column. ``sort_key`` values of a column compare with each other.

    Numbers to sort by are floats: Qt compares two integers as 32-bit ones where the left one fits.
    """

    key: str
    title: Callable[[], str]
    text: Callable[[NodeView], str]
    sort_key: Callable[[NodeView], str | float]
    tooltip: Callable[[NodeView], str]


def _device_text(kind: str) -> Callable[[NodeView], str]:
    def text(node: NodeView) -> str:
        names = []
        for device in devices_of(node, kind):
            name = short_device_name(device.name)
            if kind == "GPU" and not device.integrated:
                name = QCoreApplication.translate("NodeTable", "{name} (discrete)").format(name=name)
            names.append(name)
        if names:
            return ", ".join(names)
        return "" if node.inventory is None else "–"  # noqa: RUF001 - an en dash reads as "none" in a table

    return text


def _device_tooltip(kind: str) -> Callable[[NodeView], str]:
    def tooltip(node: NodeView) -> str:
        lines = []
        for device in devices_of(node, kind):
            parts = [device.name, device.architecture, device.driver and f"driver {device.driver}"]
            if device.memory_bytes:
                parts.append(words.size(device.memory_bytes))
            lines.append(", ".join(part for part in parts if part))
        return "\n".join(lines)

    return tooltip


def _memory_text(node: NodeView) -> str:
    memory = memory_of(node)
    if memory is None:
        return ""
    if memory.free_bytes is None:
        return words.size(memory.total_bytes)
    return QCoreApplication.translate("NodeTable", "{free} of {total} free").format(
        free=words.size(memory.free_bytes), total=words.size(memory.total_bytes)
    )


def _memory_tooltip(node: NodeView) -> str:
    memory = memory_of(node)
    if memory is None:
        return ""
    return QCoreApplication.translate("NodeTable", "Used: {used}\nOf {total}\nMost for stages: {budget}").format(
        used=words.size(memory.used_bytes), total=words.size(memory.total_bytes), budget=words.size(memory.budget_bytes)
    )


def _address_key(node: NodeView) -> str:
    """Addresses sort by number, IPv4 before IPv6, and names after both."""
    if not node.addresses:
        return "9"
    try:
        address = ip_address(node.addresses[0].split("%")[0])
    except ValueError:
        return "8" + node.addresses[0]
    return f"{address.version}{int(address):039d}"


def _cpu_text(node: NodeView) -> str:
    return short_device_name(node.inventory.cpu) if node.inventory is not None else ""


def _cpu_tooltip(node: NodeView) -> str:
    if node.inventory is None:
        return ""
    return QCoreApplication.translate("NodeTable", "{cpu}\n{cores} cores").format(
        cpu=node.inventory.cpu, cores=node.inventory.cores
    )


_STATE_ORDER = ("ready", "paused", "suspect", "connecting", "found", "refused", "foreign", "lost")

COLUMNS: tuple[NodeColumn, ...] = (
    NodeColumn(
        "name",
        lambda: QCoreApplication.translate("NodeTable", "Name"),
        lambda node: node.name,
        lambda node: node.name.casefold(),
        lambda node: QCoreApplication.translate("NodeTable", "Identity {identity}").format(identity=node.id),
    ),
    NodeColumn(
        "state",
        lambda: QCoreApplication.translate("NodeTable", "State"),
        lambda node: words.node_state(node.state).text,
        lambda node: float(_STATE_ORDER.index(node.state)),
        lambda node: node.detail,
    ),
    NodeColumn(
        "address",
        lambda: QCoreApplication.translate("NodeTable", "Address"),
        lambda node: node.addresses[0] if node.addresses else "",
        _address_key,
        lambda node: "\n".join(node.addresses),
    ),
    NodeColumn(
        "memory",
        lambda: QCoreApplication.translate("NodeTable", "Memory"),
        _memory_text,
        lambda node: float(memory.free_bytes or 0) if (memory := memory_of(node)) is not None else -1.0,
        _memory_tooltip,
    ),
    NodeColumn(
        "cpu",
        lambda: QCoreApplication.translate("NodeTable", "CPU"),
        _cpu_text,
        lambda node: _cpu_text(node).casefold(),
        _cpu_tooltip,
    ),
    NodeColumn(
        "gpu",
        lambda: QCoreApplication.translate("NodeTable", "iGPU"),
        _device_text("GPU"),
        lambda node: _device_text("GPU")(node).casefold(),
        _device_tooltip("GPU"),
    ),
    NodeColumn(
        "npu",
        lambda: QCoreApplication.translate("NodeTable", "NPU"),
        _device_text("NPU"),
        lambda node: _device_text("NPU")(node).casefold(),
        _device_tooltip("NPU"),
    ),
)
