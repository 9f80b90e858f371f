"""The node table: correct as a model, and quiet where nothing has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import QModelIndex, Qt
from PySide6.QtWidgets import QLabel
from pytestqt.modeltest import ModelTester
from pytestqt.qtbot import QtBot

from agent.inventory import describe_devices
from app.nodes.fleet_page import FleetPage
from app.nodes.node_columns import COLUMNS, short_device_name
from app.nodes.node_details import node_facts
from app.nodes.node_filter import NodeFilter
from app.nodes.node_table_model import NodeTableModel
from fleet.node import Device
from fleet.views import FleetView, NodeView

MakeNode = Callable[..., NodeView]
PROPERTIES = Path(__file__).parent.parent / "agent" / "device_properties"
COLUMN = {column.key: number for number, column in enumerate(COLUMNS)}


def recorded_devices(name: str) -> tuple[Device, ...]:
    recorded = json.loads((PROPERTIES / f"{name}.json").read_text(encoding="utf-8"))
    return describe_devices(recorded["devices"], recorded["memory_total_bytes"])


def text(model: NodeTableModel | NodeFilter, row: int, key: str) -> str:
    return str(model.index(row, COLUMN[key]).data())


def test_markup_in_names_is_shown_and_not_drawn(qtbot: QtBot, make_node: MakeNode) -> None:
    """Anybody on the LAN may announce a node of any name."""
    name = '<img src="file:///etc/passwd"><b>PC</b>'
    page = FleetPage()
    qtbot.addWidget(page)
    page.set_view(FleetView(nodes=(msgspec.structs.replace(make_node(1), name=name, detail=name),)))
    model = NodeTableModel()
    model.set_nodes([msgspec.structs.replace(make_node(1), name=name, detail=name, addresses=(name,))])
    tooltips = [str(model.index(0, column).data(Qt.ItemDataRole.ToolTipRole)) for column in COLUMN.values()]
    assert not any("<img" in tooltip for tooltip in tooltips)
    assert any("&lt;img" in tooltip for tooltip in tooltips)
    showing = [label for label in page.findChildren(QLabel) if "<img" in label.text()]
    assert showing
    assert all(label.textFormat() is Qt.TextFormat.PlainText for label in showing)


def test_the_model_keeps_qts_rules(qtbot: QtBot, qtmodeltester: ModelTester, make_node: MakeNode) -> None:
    model = NodeTableModel()
    qtmodeltester.check(model)
    model.set_nodes([make_node(1), make_node(2), make_node(3, "lost")])
    model.set_nodes([make_node(3), make_node(4, "found", known=False)])
    model.set_nodes([])
    model.set_nodes([make_node(5)])
    qtmodeltester.check(model)
    assert model.rowCount() == 1
    assert model.rowCount(model.index(0, 0)) == 0


def test_rows_come_and_go_one_by_one_and_the_model_is_never_reset(qtbot: QtBot, make_node: MakeNode) -> None:
    model = NodeTableModel()
    model.set_nodes([make_node(1), make_node(2), make_node(3)])
    inserted: list[tuple[int, int]] = []
    removed: list[tuple[int, int]] = []
    resets: list[bool] = []
    model.rowsInserted.connect(lambda _parent, first, last: inserted.append((first, last)))
    model.rowsRemoved.connect(lambda _parent, first, last: removed.append((first, last)))
    model.modelReset.connect(lambda: resets.append(True))
    model.set_nodes([make_node(3), make_node(1), make_node(9)])
    assert (inserted, removed, resets) == ([(2, 2)], [(1, 1)], [])
    assert [text(model, row, "name") for row in range(3)] == ["pc-1", "pc-3", "pc-9"]


def test_only_changed_cells_are_announced(qtbot: QtBot, make_node: MakeNode) -> None:
    model = NodeTableModel()
    model.set_nodes([make_node(1), make_node(2)])
    changes: list[tuple[int, int, int]] = []

    def note(first: QModelIndex, last: QModelIndex) -> None:
        changes.append((first.row(), first.column(), last.column()))

    model.dataChanged.connect(note)
    model.set_nodes([make_node(1), make_node(2)])
    assert changes == []
    model.set_nodes([make_node(1), make_node(2, free_bytes=3 << 30)])
    assert changes == [(1, COLUMN["memory"], COLUMN["memory"])]


def test_recorded_igpus_and_npus_are_shown_apart(qtbot: QtBot, make_node: MakeNode) -> None:
    """Property sets of real machines as public sources give them; test data."""
    model = NodeTableModel()
    model.set_nodes(
        [
            make_node(1, devices=recorded_devices("lunar_lake_core_ultra_9_288v")),
            make_node(2, devices=recorded_devices("meteor_lake_core_ultra_7_155h")),
            make_node(3, devices=recorded_devices("arrow_lake_core_ultra_7_270k")),
            make_node(4),
            make_node(5, known=False),
        ]
    )
    assert text(model, 0, "gpu") == "Arc 140V GPU (16GB)"
    assert "Arc" in text(model, 1, "gpu")
    assert text(model, 1, "npu") == "AI Boost"
    assert text(model, 2, "gpu").startswith("Graphics, ")
    assert "(discrete)" in text(model, 2, "gpu")
    assert text(model, 3, "npu") not in ("", "AI Boost")
    assert text(model, 4, "npu") == ""
    assert "driver" in str(model.index(1, COLUMN["npu"]).data(Qt.ItemDataRole.ToolTipRole))


def test_a_state_has_a_word_and_an_icon_besides_its_colour(qtbot: QtBot, make_node: MakeNode) -> None:
    model = NodeTableModel()
    states = ("found", "connecting", "ready", "paused", "suspect", "lost", "refused", "foreign")
    model.set_nodes([make_node(number, state) for number, state in enumerate(states)])
    shown = {text(model, row, "state") for row in range(len(states))}
    assert len(shown) == len(states)
    for row in range(len(states)):
        assert not model.index(row, COLUMN["state"]).data(Qt.ItemDataRole.DecorationRole).isNull()


def test_sorting_by_address_and_memory_is_by_number(qtbot: QtBot, make_node: MakeNode) -> None:
    model = NodeTableModel()
    proxy = NodeFilter()
    proxy.setSourceModel(model)
    model.set_nodes(
        [make_node(10, free_bytes=9 << 30), make_node(9, free_bytes=12 << 30), make_node(100, free_bytes=1)]
    )
    proxy.sort(COLUMN["address"])
    assert [text(proxy, row, "name") for row in range(3)] == ["pc-9", "pc-10", "pc-100"]
    proxy.sort(COLUMN["memory"])
    assert [text(proxy, row, "name") for row in range(3)] == ["pc-100", "pc-10", "pc-9"]


@pytest.mark.parametrize(
    ("words", "found"), [("", 3), ("PC-1", 1), ("192.168", 3), ("lost", 1), ("ultra ready", 2), ("nothing", 0)]
)
def test_every_word_of_the_filter_must_be_found(qtbot: QtBot, make_node: MakeNode, words: str, found: int) -> None:
    model = NodeTableModel()
    proxy = NodeFilter()
    proxy.setSourceModel(model)
    model.set_nodes([make_node(1), make_node(2), make_node(3, "lost")])
    proxy.set_filter_text(words)
    assert proxy.rowCount() == found


def test_device_names_lose_what_nobody_reads() -> None:
    assert short_device_name("Intel(R) Core(TM) i7-1260P CPU @ 2.10GHz") == "Core i7-1260P"
    assert short_device_name("Intel(R) Arc(TM) Graphics (iGPU)") == "Arc Graphics"
    assert short_device_name("AMD EPYC 9R14") == "AMD EPYC 9R14"
    assert short_device_name("Intel(R)") == "Intel(R)"


def test_the_page_shows_help_while_nobody_is_there_and_keeps_the_choice(qtbot: QtBot, make_node: MakeNode) -> None:
    page = FleetPage()
    qtbot.addWidget(page)
    page.show()
    with qtbot.waitSignal(page.token_wanted):
        page.findChild(type(page._token_button), options=Qt.FindChildOption.FindDirectChildrenOnly).click()
    page.set_view(FleetView(nodes=(make_node(1), make_node(2))))
    chosen = page.selected_node()
    assert chosen is not None
    page.set_view(FleetView(nodes=(make_node(0), make_node(1, free_bytes=1 << 30), make_node(2))))
    still = page.selected_node()
    assert still is not None
    assert still.id == chosen.id
    assert still.load != chosen.load


def test_details_name_devices_drivers_disk_and_versions(qtbot: QtBot, make_node: MakeNode) -> None:
    node = make_node(1, devices=recorded_devices("meteor_lake_core_ultra_7_155h"), faults=("NPU: no answer",))
    facts = {key: value for key, _title, value in node_facts(node)}
    assert {"CPU", "GPU", "NPU", "memory", "disk", "system", "versions", "identity", "addresses"} <= set(facts)
    assert "driver" in facts["NPU"]
    assert "shared with the processor" in facts["GPU"]
    assert facts["versions"] == "agent 0.1.0, OpenVINO 2026.4.1"
