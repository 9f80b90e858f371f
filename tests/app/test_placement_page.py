"""The Placement page: boundaries by mouse and keyboard, undo, the table twin, and what does not fit."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPointF, Qt
from pytestqt.modeltest import ModelTester
from pytestqt.qtbot import QtBot

from app.placement.assessment import Assessment
from app.placement.canvas_geometry import CanvasGeometry
from app.placement.draft import PlacementDraft
from app.placement.placement_page import PlacementPage
from app.placement.stage_table_model import StageTableModel
from fleet.node import NodeId
from fleet.placement import Placement, PlacementNode, PlannedStage

LAYERS = 30
LAYER_BYTES = 100 << 20


def nodes(count: int) -> tuple[PlacementNode, ...]:
    return tuple(
        PlacementNode(NodeId(f"{number:016x}"), f"pc-{number}", "CPU", 20 * LAYER_BYTES) for number in range(count)
    )


def assessed(draft: PlacementDraft) -> Assessment:
    """An assessment with easy numbers: each layer takes LAYER_BYTES, and a node has room for 20."""
    stages = []
    for number, node in enumerate(draft.nodes):
        first, end = draft.layers_of(number)
        stages.append(
            PlannedStage(
                stage=number,
                node=node.id,
                node_name=node.name,
                device=node.device,
                first_layer=first,
                end_layer=end,
                weight_bytes=(end - first) * LAYER_BYTES,
                kv_bytes=0,
                runtime_bytes=0,
                budget_bytes=node.budget_bytes,
            )
        )
    return Assessment(draft, Placement("m", 4096, 1, tuple(stages)))


@pytest.fixture
def page(qtbot: QtBot) -> PlacementPage:
    page = PlacementPage()
    qtbot.addWidget(page)
    page.draft_changed.connect(lambda draft: page.show_assessment(None if draft is None else assessed(draft)))
    page.resize(1000, 700)
    page.show()
    page.set_draft(PlacementDraft(LAYERS, nodes(3), (10, 20)))
    return page


def cuts(page: PlacementPage) -> tuple[int, ...]:
    assert page.draft is not None
    return page.draft.cuts


def grip(page: PlacementPage, boundary: int) -> QPointF:
    geometry = page.canvas().canvas_geometry()
    assert geometry is not None
    return QPointF(geometry.x_of_layer(cuts(page)[boundary]), geometry.boundary(boundary).center().y())


def layer_place(page: PlacementPage, layer: int) -> QPointF:
    geometry = page.canvas().canvas_geometry()
    assert geometry is not None
    return QPointF(geometry.x_of_layer(layer), 0)


def test_a_boundary_is_dragged_and_undone_as_one_step(page: PlacementPage) -> None:
    canvas = page.canvas()
    assert canvas.begin_drag(grip(page, 0))
    for layer in (11, 12, 15, 14):
        canvas.drag_to(layer_place(page, layer))
        assert cuts(page) == (layer, 20)
    canvas.end_drag()
    page.undo()
    assert cuts(page) == (10, 20)
    page.redo()
    assert cuts(page) == (14, 20)


def test_a_drag_stops_at_the_next_boundary(page: PlacementPage) -> None:
    canvas = page.canvas()
    assert canvas.begin_drag(grip(page, 1))
    canvas.drag_to(layer_place(page, 2))
    assert cuts(page) == (10, 11)
    canvas.drag_to(layer_place(page, 99))
    assert cuts(page) == (10, 29)
    canvas.end_drag()


def test_a_drag_that_begins_beside_a_boundary_is_none(page: PlacementPage) -> None:
    canvas = page.canvas()
    place = grip(page, 0) + QPointF(200, 0)
    assert not canvas.begin_drag(place)
    canvas.drag_to(layer_place(page, 25))
    canvas.end_drag()
    assert cuts(page) == (10, 20)


def test_the_mouse_drives_the_same_methods(page: PlacementPage, qtbot: QtBot) -> None:
    canvas = page.canvas()
    start = canvas.mapFromScene(grip(page, 0))
    end = canvas.mapFromScene(QPointF(layer_place(page, 13).x(), grip(page, 0).y()))
    qtbot.mousePress(canvas.viewport(), Qt.MouseButton.LeftButton, pos=start)
    qtbot.mouseMove(canvas.viewport(), pos=end)
    qtbot.mouseRelease(canvas.viewport(), Qt.MouseButton.LeftButton, pos=end)
    assert cuts(page) == (13, 20)


@pytest.mark.parametrize(
    ("key", "modifier", "expected"),
    [
        (Qt.Key.Key_Right, Qt.KeyboardModifier.NoModifier, (11, 20)),
        (Qt.Key.Key_Left, Qt.KeyboardModifier.NoModifier, (9, 20)),
        (Qt.Key.Key_Right, Qt.KeyboardModifier.ShiftModifier, (15, 20)),
        (Qt.Key.Key_Left, Qt.KeyboardModifier.ControlModifier, (5, 20)),
    ],
)
def test_arrow_keys_move_the_chosen_boundary(
    page: PlacementPage, qtbot: QtBot, key: Qt.Key, modifier: Qt.KeyboardModifier, expected: tuple[int, int]
) -> None:
    qtbot.keyClick(page.canvas(), key, modifier)
    assert cuts(page) == expected


def test_down_chooses_the_next_boundary(page: PlacementPage, qtbot: QtBot) -> None:
    qtbot.keyClick(page.canvas(), Qt.Key.Key_Down)
    qtbot.keyClick(page.canvas(), Qt.Key.Key_Right)
    assert cuts(page) == (10, 21)


def test_steps_of_one_boundary_are_undone_together(page: PlacementPage, qtbot: QtBot) -> None:
    for _ in range(4):
        qtbot.keyClick(page.canvas(), Qt.Key.Key_Right)
    assert cuts(page) == (14, 20)
    page.undo()
    assert cuts(page) == (10, 20)


def test_alt_and_arrows_change_the_order(page: PlacementPage, qtbot: QtBot) -> None:
    qtbot.keyClick(page.canvas(), Qt.Key.Key_Down, Qt.KeyboardModifier.AltModifier)
    assert page.draft is not None
    assert [node.name for node in page.draft.nodes] == ["pc-1", "pc-0", "pc-2"]
    assert page.canvas().chosen_stage == 1


def test_the_table_edits_the_same_draft(page: PlacementPage) -> None:
    model = page.table().model()
    index = model.index(0, 3)
    assert index.flags() & Qt.ItemFlag.ItemIsEditable
    assert model.setData(index, 12)
    assert cuts(page) == (12, 20)
    assert model.index(1, 2).data() == "12"
    assert model.setData(model.index(2, 3), 4)
    assert cuts(page) == (12, 26)
    page.undo()
    page.undo()
    assert cuts(page) == (10, 20)


def test_leaving_a_pc_out_and_using_it_again(page: PlacementPage) -> None:
    page._leave_out()
    assert page.draft is not None
    assert [node.name for node in page.draft.nodes] == ["pc-1", "pc-2"]
    assert page.canvas().canvas_geometry() is not None
    page._fill_add_menu()
    (action,) = page._add_menu.actions()
    assert action.text() == "pc-0"
    action.trigger()
    assert len(page.draft.nodes) == 3
    page.undo()
    page.undo()
    assert [node.name for node in page.draft.nodes] == ["pc-0", "pc-1", "pc-2"]


def test_what_does_not_fit_is_said_in_words_and_marked_in_the_table(page: PlacementPage, qtbot: QtBot) -> None:
    page.set_draft(PlacementDraft(LAYERS, nodes(2), (5,)))
    assert page._reason.text().startswith("pc-1 needs 2.4 GiB for layers 5 to 29 and has 2.0 GiB: 500.0 MiB too much.")
    assert page._verdict.text() == "Does not fit"
    needs = page.table().model().index(1, 7)
    assert "over the budget" in str(needs.data(Qt.ItemDataRole.AccessibleTextRole))
    assert not needs.data(Qt.ItemDataRole.DecorationRole).isNull()
    page.move_boundary(0, 5)
    assert page._verdict.text() == "Fits"
    assert page.table().model().index(1, 7).data(Qt.ItemDataRole.DecorationRole) is None


def test_the_stage_table_keeps_qts_rules(qtmodeltester: ModelTester, page: PlacementPage) -> None:
    model = StageTableModel()
    qtmodeltester.check(model)
    for count in (3, 1, 2, 2):
        model.set_assessment(assessed(PlacementDraft.even(LAYERS, nodes(count))))
        assert model.rowCount() == count
    model.set_assessment(None)
    assert model.rowCount() == 0


@pytest.mark.parametrize("layers", [1, 7, 30, 126])
@pytest.mark.parametrize("width", [480.0, 1000.0, 2400.0])
def test_the_layer_under_the_mouse_is_the_one_that_is_drawn_there(layers: int, width: float) -> None:
    geometry = CanvasGeometry(width, 17.0, layers, 3)
    for layer in range(layers + 1):
        assert geometry.layer_at(geometry.x_of_layer(layer)) == layer
    assert geometry.layer_at(-50) == 0
    assert geometry.layer_at(width * 2) == layers
    assert geometry.memory(0).right() <= width
    assert geometry.block(0, layers - 1).right() <= geometry.memory(0).left()
