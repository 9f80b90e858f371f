"""The Chat page: streaming, hostile Markdown, keys, scrolling, faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import Qt, QUrl
from PySide6.QtGui import QColor, QImage
from PySide6.QtWidgets import QApplication, QMessageBox
from pytestqt.qtbot import QtBot

from app.chat.chat_page import ChatPage
from app.chat.conversation import Turn
from app.chat.markdown_view import MarkdownView
from app.chat.message_widgets import AnswerWidget
from fleet.gateway_messages import Delta, Failed, Finished, PrefillProgress
from fleet.views import DeploymentView, FleetView

MakeDeployment = Callable[..., DeploymentView]


@pytest.fixture
def page(qtbot: QtBot, make_deployment: MakeDeployment) -> ChatPage:
    page = ChatPage()
    qtbot.addWidget(page)
    page.resize(900, 600)
    page.show()
    page.set_view(FleetView(deployments=(make_deployment(),)))
    return page


def ask(page: ChatPage, text: str = "Hi") -> tuple[Turn, AnswerWidget]:
    page.ask(text)
    widget = page.last_answer()
    assert widget is not None
    return page.conversation.turns[-1], widget


def finish(page: ChatPage, turn: Turn, text: str) -> None:
    turn.answer.take(Delta(1, text, (1, 2)), turn.answer.asked_s + 0.5)
    turn.answer.take(Finished(1, "stop", 5, 41, 0.25, 2.0), turn.answer.asked_s + 2.5)
    page.refresh()


def views(widget: AnswerWidget) -> list[MarkdownView]:
    return widget.findChildren(MarkdownView)


def test_enter_sends_and_shift_enter_begins_a_line(page: ChatPage, qtbot: QtBot) -> None:
    field = page._field
    qtbot.keyClicks(field, "one")
    qtbot.keyClick(field, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    qtbot.keyClicks(field, "two")
    with qtbot.waitSignal(page.question_asked) as asked:
        qtbot.keyClick(field, Qt.Key.Key_Return)
    assert asked.args is not None
    assert asked.args[0].question == "one\ntwo"
    assert field.toPlainText() == ""
    qtbot.keyClick(field, Qt.Key.Key_Return)
    assert len(page.conversation.turns) == 1


def test_a_text_typed_during_an_answer_waits(page: ChatPage, qtbot: QtBot) -> None:
    turn, _widget = ask(page)
    qtbot.keyClicks(page._field, "next")
    qtbot.keyClick(page._field, Qt.Key.Key_Return)
    assert (len(page.conversation.turns), page._field.toPlainText()) == (1, "next")
    finish(page, turn, "done")
    qtbot.keyClick(page._field, Qt.Key.Key_Return)
    assert len(page.conversation.turns) == 2


def test_an_answer_grows_and_is_rendered_at_its_end(page: ChatPage, qtbot: QtBot) -> None:
    turn, widget = ask(page)
    for text in ("The *first*", " paragraph.\n\nThe **sec", "ond** one.\n\n```py\nx = 1\n", "```\nEnd."):
        turn.answer.take(Delta(1, text, (1,)), turn.answer.asked_s + 1.0)
        page.refresh()
        qtbot.waitUntil(lambda: not page._paint.isActive(), timeout=10_000)
    assert widget.body().code_blocks() == ["x = 1"]
    finish(page, turn, "")
    assert widget.body().prose() == ["The first paragraph.\nThe second one.", "End."]
    assert "20.0 tokens/s" in widget.status_text()
    assert "0.25 s" in widget.status_text()


def test_the_prompt_that_is_being_read_is_told(page: ChatPage) -> None:
    turn, widget = ask(page)
    turn.answer.take(PrefillProgress(1, 512, 2048), 0.0)
    page._paint_answer()
    assert "512 of 2,048" in widget.status_text()
    assert widget._progress.isVisible()


def test_hostile_markdown_loads_and_opens_nothing(
    page: ChatPage, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = QImage(64, 64, QImage.Format.Format_RGB32)
    picture.fill(QColor("#ff00ff"))
    path = tmp_path / "secret.png"
    assert picture.save(str(path))
    opened: list[QUrl] = []
    monkeypatch.setattr("app.chat.chat_page.QDesktopServices.openUrl", opened.append)
    url = QUrl.fromLocalFile(str(path)).toString()
    turn, widget = ask(page)
    finish(
        page,
        turn,
        f"<img src='{url}'><script>alert(1)</script><style>* {{ color: red }}</style>\n\n"
        f"![a]({url}) ![b]({path}) ![c](http://127.0.0.1:9/x.png) [file]({url}) [web](https://example.org/)\n",
    )
    assert "<script>" in "".join(widget.body().prose())
    image = widget.grab().toImage()
    assert not any(
        image.pixelColor(x, y) == QColor("#ff00ff") for x in range(image.width()) for y in range(image.height())
    )
    view = views(widget)[0]
    view.anchorClicked.emit(QUrl(url))
    assert page.findChildren(QMessageBox) == []
    view.anchorClicked.emit(QUrl("https://example.org/"))
    (question,) = page.findChildren(QMessageBox)
    assert "https://example.org/" in question.informativeText()
    assert opened == []
    question.button(QMessageBox.StandardButton.Open).click()
    assert opened == [QUrl("https://example.org/")]


def test_a_reader_who_scrolled_up_stays_there(page: ChatPage, qtbot: QtBot) -> None:
    turn, _widget = ask(page)
    finish(page, turn, "\n\n".join(f"paragraph {number}" for number in range(80)))
    turn, _widget = ask(page, "more")
    bar = page.conversation_view().verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() > 0 and bar.value() == bar.maximum(), timeout=10_000)
    bar.setValue(100)
    assert not page.conversation_view().follows
    before = bar.maximum()
    finish(page, turn, "\n\n".join(f"line {number}" for number in range(50)))
    qtbot.waitUntil(lambda: bar.maximum() > before, timeout=10_000)
    assert bar.value() == 100
    page.conversation_view().scroll_to_end()
    turn, _widget = ask(page, "and more")
    finish(page, turn, "\n\n".join(f"word {number}" for number in range(50)))
    qtbot.waitUntil(lambda: bar.value() == bar.maximum(), timeout=10_000)


def test_a_fault_is_shown_where_it_happened_and_can_be_tried_again(page: ChatPage, qtbot: QtBot) -> None:
    turn, widget = ask(page)
    turn.answer.take(Delta(1, "Half an ans", (1,)), 0.0)
    turn.answer.take(Failed(1, "stage_lost", "pc-1 went away; try again.", "pc-1"), 0.0)
    page.refresh()
    assert widget.error.isVisible()
    assert widget.error.message() == "pc-1 went away; try again."
    assert "stage_lost" in widget.error.details()
    with qtbot.waitSignal(page.question_asked):
        widget.retry_wanted.emit()
    assert not widget.error.isVisible()
    assert page.conversation.turns[-1].answer.text == ""
    assert len(page.conversation.turns) == 1


def test_a_ready_model_is_chosen_by_itself_and_the_choice_is_kept(
    qtbot: QtBot, make_deployment: MakeDeployment
) -> None:
    page = ChatPage()
    qtbot.addWidget(page)
    assert page.deployment is None
    page.set_view(FleetView(deployments=(make_deployment(1, "sending"),)))
    assert page.deployment is None
    page.set_view(FleetView(deployments=(make_deployment(1, "degraded"), make_deployment(2))))
    assert page.deployment is not None
    assert page.deployment.model == "tiny-2"
    page.choose(make_deployment(1).id)
    page.set_view(FleetView(deployments=(make_deployment(3), make_deployment(1), make_deployment(2))))
    assert page.deployment.model == "tiny-1"


def test_new_chat_stops_the_answer_and_forgets(page: ChatPage, qtbot: QtBot) -> None:
    ask(page)
    with qtbot.waitSignal(page.stop_wanted):
        page.new_chat()
    assert page.conversation.turns == []
    assert page.last_answer() is None


def test_a_selection_survives_while_the_answer_grows(page: ChatPage, qtbot: QtBot) -> None:
    view = MarkdownView()
    qtbot.addWidget(view)
    view.grow_text("one two")
    cursor = view.textCursor()
    cursor.setPosition(0)
    cursor.setPosition(3, cursor.MoveMode.KeepAnchor)
    view.setTextCursor(cursor)
    view.grow_text("one two three\n\nfour")
    assert view.textCursor().selectedText() == "one"


def test_copying_an_answer_gives_its_markdown(page: ChatPage) -> None:
    turn, widget = ask(page)
    finish(page, turn, "**bold**")
    widget._copy.click()
    assert QApplication.clipboard().text() == "**bold**"
