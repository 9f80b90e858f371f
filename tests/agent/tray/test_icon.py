"""The tray's widgets, without a screen."""

from __future__ import annotations

import pytest

pytest.importorskip("PySide6.QtWidgets", reason="Qt's system libraries are missing", exc_type=ImportError)

from PySide6.QtWidgets import QMessageBox
from pytestqt.qtbot import QtBot

from agent.tray.icon import Tray, mood_icon
from agent.tray.words import UNREACHABLE, Face

IDLE = Face("idle", "Ready for the fleet")
SERVING = Face("serving", "Computes for the fleet", ("Runs layers 0 to 15 of Llama 8B on CPU",))
PAUSED = Face("paused", "Paused: takes no new work", paused=True)


@pytest.fixture
def tray(qtbot: QtBot) -> Tray:
    tray = Tray(has_tray=False)
    qtbot.addWidget(tray.window)
    return tray


@pytest.mark.parametrize("face", [IDLE, SERVING, PAUSED, UNREACHABLE, Face("busy", "")])
def test_every_mood_has_an_icon(face: Face, qtbot: QtBot) -> None:
    icon = mood_icon(face)
    image = icon.pixmap(32, 32).toImage()
    assert any(image.pixelColor(x, y).alpha() > 0 for x in range(32) for y in range(32))


def test_it_shows_what_the_agent_does_and_offers_what_can_be_done(tray: Tray) -> None:
    tray.show_face(UNREACHABLE)
    assert not tray.pause_action.isEnabled()
    assert not tray.window.quit_button.isEnabled()
    tray.show_face(SERVING)
    assert tray.window.title.text() == "Computes for the fleet"
    assert tray.window.lines.text() == "Runs layers 0 to 15 of Llama 8B on CPU"
    assert tray.pause_action.isEnabled()
    assert tray.pause_action.text() == "Pause"
    tray.show_face(PAUSED)
    assert tray.pause_action.text() == tray.window.pause_button.text() == "Resume"


def test_pause_and_resume_are_asked_for(tray: Tray, qtbot: QtBot) -> None:
    tray.show_face(IDLE)
    with qtbot.waitSignal(tray.pause_wanted, check_params_cb=lambda paused: paused is True):
        tray.pause_action.trigger()
    tray.show_face(PAUSED)
    with qtbot.waitSignal(tray.pause_wanted, check_params_cb=lambda paused: paused is False):
        tray.window.pause_button.click()


def test_quitting_asks_first_when_somebody_would_be_interrupted(
    tray: Tray, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [QMessageBox.StandardButton.No, QMessageBox.StandardButton.Yes]
    monkeypatch.setattr(QMessageBox, "question", lambda *_: answers.pop(0))
    tray.show_face(SERVING)
    with qtbot.assertNotEmitted(tray.quit_wanted):
        tray.quit_action.trigger()
    with qtbot.waitSignal(tray.quit_wanted):
        tray.quit_action.trigger()
    tray.show_face(IDLE)
    with qtbot.waitSignal(tray.quit_wanted):
        tray.window.quit_button.click()
    assert answers == []


@pytest.mark.qt_log_ignore("This plugin does not support")
def test_without_a_tray_the_window_stands_in(tray: Tray, qtbot: QtBot) -> None:
    tray.show()
    assert tray.window.isVisible()
    with qtbot.waitSignal(tray.hidden):
        tray.window.close()


@pytest.mark.qt_log_ignore("This plugin does not support")
def test_with_a_tray_the_window_may_be_closed(qtbot: QtBot) -> None:
    tray = Tray(has_tray=True)
    qtbot.addWidget(tray.window)
    assert tray.icon is not None
    tray.show_face(SERVING)
    assert "Computes for the fleet" in tray.icon.toolTip()
    tray.title_action.trigger()
    assert tray.window.isVisible()
    with qtbot.assertNotEmitted(tray.hidden):
        tray.window.close()
