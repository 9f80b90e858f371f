"""One deployment: its state, its stages, where clients reach it, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QCoreApplication, Signal
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QLabel, QLineEdit, QPushButton, QWidget

from app.deploy.stage_row import StageRow
from app.looks import words
from app.looks.widgets import Banner, Card, CopyButton, StateLabel, heading, muted
from fleet.views import DeploymentState, DeploymentView

BECOMING: frozenset[DeploymentState] = frozenset({"planning", "sending", "starting", "probing"})
SERVING: frozenset[DeploymentState] = frozenset({"ready", "degraded"})


class DeploymentCard(Card):
    """Shows one ``DeploymentView``; widgets stay while values change.

    Signals:
        cancel_wanted, undeploy_wanted, chat_wanted: what the person asks for, with the deployment's id.
    """

    cancel_wanted = Signal(str)
    undeploy_wanted = Signal(str)
    chat_wanted = Signal(str)

    def __init__(self, deployment: DeploymentView, parent: QWidget | None = None) -> None:
        super().__init__(parent, spacing=10)
        self._deployment = deployment
        self._title = heading(deployment.model, 2, self)
        self._state = StateLabel(self)
        self._banner = Banner(self)
        self._cancel = self._button(self.tr("Cancel"), self.cancel_wanted.emit)
        self._undeploy = self._button(self.tr("Undeploy"), self.undeploy_wanted.emit)
        self._chat = self._button(self.tr("Chat"), self.chat_wanted.emit)
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(18)
        self._grid.setVerticalSpacing(8)
        self._grid.setColumnStretch(4, 1)
        for column, characters in enumerate((14, 16, 18)):
            self._grid.setColumnMinimumWidth(column, self.fontMetrics().averageCharWidth() * characters)
        self._rows: list[StageRow] = []
        self._address = QWidget(self)
        self._url = QLineEdit(self._address)
        self._where = muted("", self._address)
        header = QHBoxLayout()
        header.setSpacing(12)
        header.addWidget(self._title)
        header.addWidget(self._state)
        header.addStretch(1)
        for button in (self._chat, self._cancel, self._undeploy):
            header.addWidget(button)
        self.body.addLayout(header)
        self.body.addWidget(self._banner)
        self.body.addLayout(self._grid)
        self._arrange_address()
        self.body.addWidget(self._address)

    def show_deployment(self, deployment: DeploymentView, now_s: float) -> None:
        """Bring the card up to date."""
        self._deployment = deployment
        self._title.setText(deployment.model)
        self._state.set_wording(words.deployment_state(deployment.state))
        while len(self._rows) < len(deployment.stages):
            number = len(self._rows)
            self._rows.append(StageRow(self._grid, number, deployment.stages[number], self))
        for row, stage in zip(self._rows, deployment.stages, strict=False):
            row.show_stage(stage, now_s)
        if deployment.state in ("failed", "degraded"):
            fallback = words.deployment_state(deployment.state).text
            tone: words.Tone = "error" if deployment.state == "failed" else "warning"
            self._banner.show_message(deployment.detail or fallback, details_of(deployment), tone=tone)
        elif deployment.detail and deployment.state in BECOMING:
            self._banner.show_message(deployment.detail, details_of(deployment), tone="planned")
        else:
            self._banner.clear()
        self._cancel.setVisible(deployment.state in BECOMING)
        self._undeploy.setVisible(deployment.state in SERVING or deployment.state == "failed")
        self._chat.setVisible(deployment.state == "ready")
        self._show_address(deployment)

    def banner(self) -> Banner:
        return self._banner

    def rows(self) -> list[StageRow]:
        return self._rows

    def _show_address(self, deployment: DeploymentView) -> None:
        url = base_url(deployment)
        self._address.setVisible(bool(url) and deployment.state in SERVING)
        if url and self._url.text() != url:
            self._url.setText(url)
        gateway = next((stage.node_name for stage in deployment.stages if stage.node == deployment.gateway_node), "")
        self._where.setText(
            self.tr("for OpenAI clients that run on {node} itself").format(node=gateway)
            if gateway
            else self.tr("for OpenAI clients that run on the gateway's PC itself")
        )

    def _arrange_address(self) -> None:
        label = QLabel(self.tr("&OpenAI base URL"), self._address)
        label.setBuddy(self._url)
        self._url.setReadOnly(True)
        self._url.setAccessibleName(self.tr("OpenAI base URL"))
        self._url.setFixedWidth(self.fontMetrics().averageCharWidth() * 36)
        row = QHBoxLayout(self._address)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(8)
        row.addWidget(label)
        row.addWidget(self._url)
        row.addWidget(CopyButton(self.tr("Copy address"), self._url.text, self._address))
        row.addWidget(
            CopyButton(self.tr("Copy Python example"), lambda: snippet(self._deployment), self._address, with_text=True)
        )
        row.addWidget(self._where, 1)

    def _button(self, text: str, wanted: Callable[[str], object]) -> QPushButton:
        button = QPushButton(text, self)
        button.setAccessibleName(self.tr("{action} {model}").format(action=text, model=self._deployment.model))
        button.clicked.connect(lambda _checked=False: wanted(self._deployment.id))
        return button


def base_url(deployment: DeploymentView) -> str:
    """Where an OpenAI client on the gateway's PC reaches the model; empty while it cannot."""
    return "" if deployment.http_port is None else f"http://127.0.0.1:{deployment.http_port}/v1"


def snippet(deployment: DeploymentView) -> str:
    """A Python program that talks to the deployment with the official OpenAI client."""
    return (
        "from openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{base_url(deployment)}", api_key="none")\n'
        "answer = client.chat.completions.create(\n"
        f'    model="{deployment.model}",\n'
        '    messages=[{"role": "user", "content": "What is the capital of France?"}],\n'
        ")\n"
        "print(answer.choices[0].message.content)\n"
    )


def details_of(deployment: DeploymentView) -> str:
    """Everything about a deployment that helps to find a fault, as text."""
    translate = QCoreApplication.translate
    lines = [
        translate("DeploymentCard", "{model}, deployment {id}: {state}").format(
            model=deployment.model, id=deployment.id, state=deployment.state
        ),
        deployment.detail,
    ]
    for stage in deployment.stages:
        status = stage.status
        state = status.state if status is not None else "unknown"
        line = f"stage {stage.stage} on {stage.node_name} ({stage.node}): {state}"
        if status is not None:
            line += f", layers {status.first_layer} to {status.end_layer - 1}, restarts {status.restarts}"
            if status.progress is not None:
                line += f", {status.progress.done_bytes} of {status.progress.total_bytes} bytes"
            if status.detail:
                line += f"\n  {status.detail}"
        lines.append(line)
    return "\n".join(line for line in lines if line)
