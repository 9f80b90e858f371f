"""The window as a whole: names for everything, keys, an orderly end, and quick while the fleet is busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import qasync
from PySide6.QtCore import Qt, QTimer
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractScrollArea,
    QApplication,
    QDialog,
    QLabel,
    QLineEdit,
    QWidget,
)
from pytestqt.qtbot import QtBot

from app.fleet_bridge import FleetBridge
from app.looks.theme import theme
from app.main_window import PAGES, MainWindow
from app.settings import Settings
from fleet.control_messages import Progress
from fleet.views import DeploymentView, FleetView, NodeView

MakeNode = Callable[..., NodeView]
MakeDeployment = Callable[..., DeploymentView]


@pytest.fixture
def window(qtbot: QtBot, tmp_path: Path) -> Iterator[MainWindow]:
    window = MainWindow(Settings(tmp_path))
    qtbot.addWidget(window, before_close_func=lambda widget: widget.close_now())
    window.show()
    yield window
    theme().set_choice("light")


def full_view(make_node: MakeNode, make_deployment: MakeDeployment) -> FleetView:
    return FleetView(
        nodes=tuple(make_node(number) for number in range(3)),
        deployments=(
            make_deployment(1),
            make_deployment(2, "sending", stage_state="receiving", progress=Progress(10, 100)),
            make_deployment(3, "failed", detail="pc-1 has too little disk."),
        ),
    )


def test_everything_that_takes_the_focus_has_a_name(
    window: MainWindow, make_node: MakeNode, make_deployment: MakeDeployment
) -> None:
    window.set_view(full_view(make_node, make_deployment))
    window.chat_page.ask("Hi")
    nameless = []
    for widget in window.findChildren(QWidget):
        if widget.focusPolicy() == Qt.FocusPolicy.NoFocus or widget.objectName().startswith("qt_"):
            continue
        inside_of_another = (
            isinstance(widget, QLineEdit)
            and widget.parent() is not None
            and bool(widget.parentWidget().metaObject().className() in ("QSpinBox", "QDoubleSpinBox", "QComboBox"))
        )
        parent = widget.parentWidget()
        is_viewport = isinstance(parent, QAbstractScrollArea) and widget is parent.viewport()
        if is_viewport or (isinstance(widget, QLabel) and not widget.text()):
            continue
        text = widget.text() if isinstance(widget, QAbstractButton | QLabel) else ""
        if not inside_of_another and not widget.accessibleName() and not text.strip():
            nameless.append(f"{type(widget).__name__} in {type(widget.parent()).__name__}")
    assert nameless == []


def test_every_page_can_be_reached_with_the_keyboard(window: MainWindow, qtbot: QtBot) -> None:
    for number, page in enumerate(("fleet", "placement", "deploy", "chat"), 1):
        qtbot.keyClick(window, Qt.Key(Qt.Key.Key_0.value + number), Qt.KeyboardModifier.ControlModifier)
        assert window.page == page


def test_the_focus_goes_round_the_window(window: MainWindow, qtbot: QtBot) -> None:
    window.show_page("placement")
    window.activateWindow()
    seen: set[int] = set()
    for _ in range(80):
        focused = QApplication.focusWidget()
        if focused is not None:
            seen.add(id(focused))
        qtbot.keyClick(focused or window, Qt.Key.Key_Tab)
    assert len(seen) > 8


def test_the_theme_goes_round_and_is_remembered(window: MainWindow, tmp_path: Path) -> None:
    theme().set_choice("auto")
    seen = []
    for _ in range(3):
        window.next_scheme()
        seen.append(theme().choice)
    assert seen == ["light", "dark", "auto"]
    window.next_scheme()
    window._settings.save()
    assert Settings(tmp_path).scheme == "light"


def test_the_list_of_keys_names_them_all(window: MainWindow, qtbot: QtBot) -> None:
    window.show_shortcuts()
    (dialog,) = window.findChildren(QDialog)
    text = " ".join(label.text() for label in dialog.findChildren(QLabel))
    for keys in ("Ctrl+1", "Ctrl+4", "Ctrl+N", "Ctrl+Z", "F1"):
        assert keys in text
    dialog.close()


def test_the_window_stays_until_everything_has_ended(window: MainWindow, qtbot: QtBot) -> None:
    with qtbot.waitSignal(window.close_wanted):
        window.close()
    assert window.isVisible()
    window.close_now()
    assert not window.isVisible()


def test_a_deployment_card_shows_rate_and_fault(
    window: MainWindow, qtbot: QtBot, make_deployment: MakeDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr("app.deploy.deploy_page.time.monotonic", lambda: clock)
    page = window.deploy_page
    one = make_deployment(2, "sending", stage_state="receiving", progress=Progress(100 << 20, 900 << 20))
    page.set_view(FleetView(deployments=(one,)))
    clock = 102.0
    one = make_deployment(2, "sending", stage_state="receiving", progress=Progress(300 << 20, 900 << 20))
    page.set_view(FleetView(deployments=(one,)))
    card = page.card(one.id)
    assert card is not None
    assert card.rows()[0].figures_text() == "300.0 MiB of 900.0 MiB · 100.0 MiB/s · 6 s left"
    with qtbot.waitSignal(page.cancel_wanted) as wanted:
        card._cancel.click()
    assert wanted.args == [one.id]
    failed = make_deployment(2, "failed", stage_state="failed", detail="pc-1 has too little disk.")
    page.set_view(FleetView(deployments=(failed,)))
    assert page.card(one.id) is card
    assert card.banner().message() == "pc-1 has too little disk."
    assert "stage 1 on pc-1" in card.banner().details()
    page.set_view(FleetView())
    assert page.card(one.id) is None


def test_the_openai_snippet_names_address_and_model(window: MainWindow, make_deployment: MakeDeployment) -> None:
    one = make_deployment(1)
    window.deploy_page.set_view(FleetView(deployments=(one,)))
    card = window.deploy_page.card(one.id)
    assert card is not None
    assert card._url.text() == "http://127.0.0.1:8642/v1"


def storm_of(make_node: MakeNode, make_deployment: MakeDeployment, count: int) -> list[FleetView]:
    """Snapshots of 40 nodes and 4 transfers, all of which change every time."""
    nodes = tuple(make_node(number) for number in range(40))
    views = []
    for step in range(count):
        progress = Progress(step << 20, count << 20)
        changed = []
        for node in nodes:
            assert node.load is not None
            load = msgspec.structs.replace(node.load, memory_free_bytes=(step + 40) << 27)
            changed.append(msgspec.structs.replace(node, load=load))
        deployments = tuple(
            make_deployment(number, "sending", stage_state="receiving", progress=progress) for number in range(4)
        )
        views.append(FleetView(nodes=tuple(changed), deployments=deployments))
    return views


def test_the_window_works_for_less_than_100_ms_at_a_time_while_shards_arrive(
    window: MainWindow, qapp: QApplication, network: Any, make_node: MakeNode, make_deployment: MakeDeployment
) -> None:
    """200 snapshots a second, on every page in turn.

    What is measured is the longest time for which the window's thread worked without getting round to a timer. Time
    in which it had no processor does not count, because other tests run on the same machine; the best of three rounds
    does, because they share its caches too.
    """
    views = storm_of(make_node, make_deployment, 300)
    loop = qasync.QEventLoop(qapp)
    gaps: list[float] = []
    last_s = 0.0

    def beat() -> None:
        nonlocal last_s
        now_s = time.thread_time()
        gaps.append(now_s - last_s)
        last_s = now_s

    timer = QTimer()
    timer.setTimerType(Qt.TimerType.PreciseTimer)
    timer.timeout.connect(beat)

    async def storm() -> None:
        for view in views:
            network.controller.publish(view)
            await asyncio.sleep(0.005)

    async def one_round() -> float:
        nonlocal last_s
        gaps.clear()
        last_s = time.thread_time()
        timer.start(5)
        storming = asyncio.wrap_future(network.call(storm()))
        for page in PAGES:
            window.show_page(page)
            await asyncio.sleep(0.4)
        await storming
        timer.stop()
        assert len(gaps) > 10
        return max(gaps)

    async def story() -> float:
        bridge = FleetBridge(network)
        bridge.view_changed.connect(window.set_view)
        await bridge.start()
        longest_s = 1.0
        for _ in range(3):
            longest_s = min(longest_s, await one_round())
            if longest_s < 0.1:
                break
        await bridge.close()
        return longest_s

    try:
        longest_s: float = loop.run_until_complete(asyncio.wait_for(story(), 60))
    finally:
        loop.close()
    print(f"longest work without an answer: {longest_s * 1000:.0f} ms")
    assert longest_s < 0.1
    assert window.deploy_page.card(views[-1].deployments[0].id) is not None
