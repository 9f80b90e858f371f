"""The Deploy page: every deployment with its progress, newest first."""

from __future__ import annotations

import time

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QScrollArea, QStackedWidget, QVBoxLayout, QWidget

from app.deploy.deployment_card import DeploymentCard
from app.looks.widgets import Banner, EmptyState, heading, muted, primary_button
from fleet.control_messages import DeploymentId
from fleet.views import FleetView


class DeployPage(QWidget):
    """What is being deployed and what runs.

    Signals:
        cancel_wanted, undeploy_wanted, chat_wanted: what the person asks for, with the deployment's id.
        placement_wanted: the person wants to go to the Placement page.
    """

    cancel_wanted = Signal(str)
    undeploy_wanted = Signal(str)
    chat_wanted = Signal(str)
    placement_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._cards: dict[DeploymentId, DeploymentCard] = {}
        self.banner = Banner(self)
        self._summary = muted("", wrap=False)
        scroll = QScrollArea(self)
        scroll.setWidgetResizable(True)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setAccessibleName(self.tr("Deployments"))
        content = QWidget(scroll)
        content.setProperty("scrolled", True)
        self._column = QVBoxLayout(content)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(12)
        self._column.addStretch(1)
        scroll.setWidget(content)
        empty = EmptyState(
            "deploy",
            self.tr("Nothing is deployed"),
            self.tr("Choose a model on the Placement page, look at where its layers go, and deploy it from there."),
            self,
        )
        button = primary_button(self.tr("Go to Placement"), empty)
        button.clicked.connect(self.placement_wanted)
        empty.add_widget(button)
        self._stack = QStackedWidget(self)
        self._stack.addWidget(scroll)
        self._stack.addWidget(empty)
        title = QHBoxLayout()
        title.setSpacing(12)
        title.addWidget(heading(self.tr("Deploy")))
        title.addWidget(self._summary)
        title.addStretch(1)
        page = QVBoxLayout(self)
        page.setContentsMargins(20, 16, 20, 20)
        page.setSpacing(12)
        page.addLayout(title)
        page.addWidget(self.banner)
        page.addWidget(self._stack, 1)
        self.set_view(FleetView())

    def set_view(self, view: FleetView) -> None:
        """Take a snapshot of the fleet."""
        now_s = time.monotonic()
        there = {deployment.id for deployment in view.deployments}
        for identity in [identity for identity in self._cards if identity not in there]:
            card = self._cards.pop(identity)
            self._column.removeWidget(card)
            card.hide()
            card.deleteLater()
        for deployment in view.deployments:
            known = self._cards.get(deployment.id)
            if known is None:
                known = self._cards[deployment.id] = DeploymentCard(deployment)
                known.cancel_wanted.connect(self.cancel_wanted)
                known.undeploy_wanted.connect(self.undeploy_wanted)
                known.chat_wanted.connect(self.chat_wanted)
                self._column.insertWidget(0, known)
            known.show_deployment(deployment, now_s)
        ready = sum(deployment.state == "ready" for deployment in view.deployments)
        self._summary.setText(
            self.tr("{ready} of {count} ready").format(ready=ready, count=len(view.deployments)) if there else ""
        )
        self._stack.setCurrentIndex(0 if there else 1)

    def card(self, deployment: DeploymentId) -> DeploymentCard | None:
        return self._cards.get(deployment)
