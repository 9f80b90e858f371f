"""The Chat page: choose a model, ask, read."""

from __future__ import annotations

import time
from collections.abc import Sequence

from PySide6.QtCore import Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import (
    QComboBox,
    QHBoxLayout,
    QLabel,
    QMessageBox,
    QPushButton,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from app.chat.chat_options import ChatOptions
from app.chat.conversation import Conversation, Turn
from app.chat.conversation_view import ConversationView
from app.chat.message_widgets import AnswerWidget, QuestionWidget
from app.chat.prompt_field import PromptField
from app.looks import words
from app.looks.widgets import EmptyState, StateLabel, ThemedButton, heading, plain_tooltip, primary_button
from fleet.control_messages import DeploymentId
from fleet.views import DeploymentView, FleetView

PAINT_INTERVAL_MS = 66
"""A growing answer is painted at most 15 times a second."""

_CHATTABLE = ("ready", "degraded")


class ChatPage(QWidget):
    """Shows a conversation. What is asked goes out as a signal; the answer grows through ``refresh``.

    Signals:
        question_asked: a turn (``Turn``) of ``conversation`` waits for its answer from ``deployment``.
        stop_wanted: end the answer that is being written.
        placement_wanted: the person wants to go to the Placement page.
    """

    question_asked = Signal(object)
    stop_wanted = Signal()
    placement_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.conversation = Conversation()
        self.options = ChatOptions(self)
        self._deployments: dict[DeploymentId, DeploymentView] = {}
        self._last_answer: AnswerWidget | None = None
        self._chooser = QComboBox(self)
        self._chooser.setAccessibleName(self.tr("Model to talk to"))
        self._chooser.view().setAccessibleName(self.tr("Models that are ready"))
        self._chooser.setMinimumWidth(self.fontMetrics().averageCharWidth() * 34)
        self._chooser.currentIndexChanged.connect(self._show_state)
        self._state = StateLabel(self)
        self._new = ThemedButton("add", self.tr("New chat"), self, clicked=self.new_chat, with_text=True)
        self._new.setToolTip(self.tr("New chat (Ctrl+N)"))
        self._options_button = ThemedButton("settings", self.tr("How to answer"), self)
        self._options_button.setCheckable(True)
        self._options_button.toggled.connect(self.options.setVisible)
        self.options.hide()
        self._view = ConversationView(self)
        self._field = PromptField(self)
        self._field.submitted.connect(self.send)
        self._send = primary_button(self.tr("Send"), self)
        self._send.setToolTip(self.tr("Send (Enter)"))
        self._send.clicked.connect(self.send)
        self._stop = QPushButton(self.tr("Stop"), self)
        self._stop.setToolTip(self.tr("Stop the answer (Esc)"))
        self._stop.clicked.connect(self.stop_wanted)
        self._stop.hide()
        self._greeting = self._make_greeting()
        self._nothing_ready = self._make_nothing_ready()
        self._stack = QStackedWidget(self)
        for page in (self._view, self._greeting, self._nothing_ready):
            self._stack.addWidget(page)
        self._paint = QTimer(self)
        self._paint.setSingleShot(True)
        self._paint.setInterval(PAINT_INTERVAL_MS)
        self._paint.timeout.connect(self._paint_answer)
        self._arrange()
        self.set_view(FleetView())

    @property
    def deployment(self) -> DeploymentView | None:
        """The deployment that the next question goes to."""
        return self._deployments.get(self._chooser.currentData())

    @property
    def answering(self) -> bool:
        return bool(self.conversation.turns) and self.conversation.turns[-1].answer.running

    def set_view(self, view: FleetView) -> None:
        """Take a snapshot of the fleet: which models can be talked to."""
        chattable = [one for one in view.deployments if one.state in _CHATTABLE]
        chattable.sort(key=lambda one: _CHATTABLE.index(one.state))
        if [one.id for one in chattable] != list(self._deployments):
            self._fill_chooser(chattable)
        self._deployments = {one.id: one for one in chattable}
        self._show_state()

    def choose(self, deployment: DeploymentId) -> None:
        """Talk to this deployment from now on, if it can be talked to."""
        index = self._chooser.findData(deployment)
        if index >= 0 and not self.answering:
            self._chooser.setCurrentIndex(index)

    def focus_prompt(self) -> None:
        self._field.setFocus(Qt.FocusReason.OtherFocusReason)

    def new_chat(self) -> None:
        """Forget the conversation; an answer that is being written is stopped."""
        if self.answering:
            self.stop_wanted.emit()
        self.conversation = Conversation()
        self._last_answer = None
        self._view.clear()
        self._show_state()
        self.focus_prompt()

    def send(self) -> None:
        """Ask what is in the field."""
        text = self._field.toPlainText().strip()
        if not text or self.answering or self.deployment is None:
            return
        self._field.clear()
        self.ask(text)

    def ask(self, text: str) -> None:
        """Ask this question."""
        deployment = self.deployment
        if deployment is None or self.answering:
            return
        if self._last_answer is not None:
            self._last_answer.show_answer(self.conversation.turns[-1].answer, last=False)
        turn = self.conversation.ask(text, time.monotonic())
        self._view.add_message(QuestionWidget(text))
        widget = AnswerWidget(deployment.model)
        widget.retry_wanted.connect(self._retry)
        widget.link_wanted.connect(self._confirm_link)
        self._view.add_message(widget)
        self._last_answer = widget
        self._view.scroll_to_end()
        self._begin(turn)

    def refresh(self) -> None:
        """The last answer has changed: paint it soon, or at once where it has ended."""
        if not self.answering:
            self._paint.stop()
            self._paint_answer()
        elif not self._paint.isActive():
            self._paint.start()

    def last_answer(self) -> AnswerWidget | None:
        return self._last_answer

    def conversation_view(self) -> ConversationView:
        return self._view

    def _begin(self, turn: Turn) -> None:
        self._paint_answer()
        self._show_state()
        self.question_asked.emit(turn)

    def _retry(self) -> None:
        if self.answering or self.deployment is None or not self.conversation.turns:
            return
        self._begin(self.conversation.ask_again(time.monotonic()))

    def _paint_answer(self) -> None:
        if self._last_answer is not None and self.conversation.turns:
            self._last_answer.show_answer(self.conversation.turns[-1].answer, last=True)
        self._show_state()

    def _show_state(self) -> None:
        deployment = self.deployment
        if self.conversation.turns:
            self._stack.setCurrentWidget(self._view)
        elif deployment is not None:
            self._greeting.set_title(self.tr("Talk to {model}").format(model=deployment.model))
            self._stack.setCurrentWidget(self._greeting)
        else:
            self._stack.setCurrentWidget(self._nothing_ready)
        self._state.setVisible(deployment is not None)
        if deployment is not None:
            self._state.set_wording(words.deployment_state(deployment.state))
            self._state.setToolTip(plain_tooltip(deployment.detail))
        answering = self.answering
        self._send.setVisible(not answering)
        self._stop.setVisible(answering)
        self._send.setEnabled(deployment is not None)
        self._chooser.setEnabled(bool(self._deployments) and not answering)
        self._new.setEnabled(bool(self.conversation.turns))

    def _fill_chooser(self, deployments: Sequence[DeploymentView]) -> None:
        """Offer these; what was chosen stays chosen while it is there, else the first ready one is."""
        chosen = self._chooser.currentData()
        self._chooser.blockSignals(True)
        self._chooser.clear()
        for one in deployments:
            nodes = ", ".join(dict.fromkeys(stage.node_name for stage in one.stages))
            self._chooser.addItem(self.tr("{model} on {nodes}").format(model=one.model, nodes=nodes), one.id)
        if not deployments:
            self._chooser.addItem(self.tr("No model is ready"), None)
        self._chooser.setCurrentIndex(max(self._chooser.findData(chosen), 0))
        self._chooser.blockSignals(False)

    def _confirm_link(self, link: QUrl) -> None:
        """Ask before a link that a model wrote is opened in the browser; files and other schemes never are."""
        if link.scheme() not in ("http", "https", "mailto"):
            return
        box = QMessageBox(self)
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        box.setWindowTitle(self.tr("Open this link?"))
        box.setTextFormat(Qt.TextFormat.PlainText)
        box.setText(self.tr("The model's answer links to this address. Open it in the browser?"))
        box.setInformativeText(link.toString(QUrl.ComponentFormattingOption.FullyEncoded))
        box.setStandardButtons(QMessageBox.StandardButton.Open | QMessageBox.StandardButton.Cancel)
        box.setDefaultButton(QMessageBox.StandardButton.Cancel)
        box.button(QMessageBox.StandardButton.Open).clicked.connect(lambda: QDesktopServices.openUrl(link))
        box.open()

    def _make_greeting(self) -> EmptyState:
        greeting = EmptyState(
            "chat", "", self.tr("The answer is made by all PCs of the deployment, a few layers on each."), self
        )
        for question in (
            self.tr("What is the capital of France?"),
            self.tr("Explain in three sentences why the sky is blue."),
            self.tr("Write a Python function that reverses a string."),
        ):
            button = QPushButton(question, greeting)
            button.clicked.connect(lambda _checked=False, text=question: self.ask(text))
            greeting.add_widget(button)
        return greeting

    def _make_nothing_ready(self) -> EmptyState:
        empty = EmptyState(
            "chat",
            self.tr("No model is ready yet"),
            self.tr("Place a model on the PCs and deploy it; as soon as it answers, you can talk to it here."),
            self,
        )
        button = primary_button(self.tr("Go to Placement"), empty)
        button.clicked.connect(self.placement_wanted)
        empty.add_widget(button)
        return empty

    def _arrange(self) -> None:
        title = QHBoxLayout()
        title.setSpacing(12)
        title.addWidget(heading(self.tr("Chat")))
        label = QLabel(self.tr("&Model"), self)
        label.setBuddy(self._chooser)
        title.addSpacing(8)
        title.addWidget(label)
        title.addWidget(self._chooser)
        title.addWidget(self._state)
        title.addStretch(1)
        title.addWidget(self._new)
        title.addWidget(self._options_button)
        prompt = QHBoxLayout()
        prompt.setSpacing(8)
        prompt.addWidget(self._field, 1)
        prompt.addWidget(self._send, 0, Qt.AlignmentFlag.AlignBottom)
        prompt.addWidget(self._stop, 0, Qt.AlignmentFlag.AlignBottom)
        left = QVBoxLayout()
        left.setSpacing(10)
        left.addWidget(self._stack, 1)
        left.addLayout(prompt)
        middle = QHBoxLayout()
        middle.setSpacing(14)
        middle.addLayout(left, 1)
        middle.addWidget(self.options)
        column = QVBoxLayout(self)
        column.setContentsMargins(20, 16, 20, 16)
        column.setSpacing(12)
        column.addLayout(title)
        column.addLayout(middle, 1)
