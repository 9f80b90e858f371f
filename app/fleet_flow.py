"""Carries out what the Fleet and Deploy pages ask for."""

from __future__ import annotations

from PySide6.QtCore import QObject

from app.fleet_bridge import FleetBridge
from app.looks.widgets import Banner
from app.main_window import MainWindow
from app.nodes.token_dialog import TokenDialog
from app.task_group import TaskGroup
from fleet.control_messages import DeploymentId
from fleet.errors import PacelineError

TOKEN_USES = 10
TOKEN_HOURS = 24


class FleetFlow(QObject):
    """Enrolment tokens, cancelling and undeploying. Faults are shown on the page that asked."""

    def __init__(self, window: MainWindow, bridge: FleetBridge, tasks: TaskGroup) -> None:
        super().__init__(window)
        self._window = window
        self._bridge = bridge
        self._tasks = tasks
        window.fleet_page.token_wanted.connect(lambda: self._tasks.start(self._show_token(), "token"))
        window.deploy_page.cancel_wanted.connect(lambda one: self._tasks.start(self._cancel(one), "cancel"))
        window.deploy_page.undeploy_wanted.connect(lambda one: self._tasks.start(self._undeploy(one), "undeploy"))
        window.deploy_page.chat_wanted.connect(self._chat)

    async def _show_token(self) -> None:
        banner = self._window.fleet_page.banner
        banner.clear()
        try:
            token = await self._bridge.create_token(TOKEN_USES, TOKEN_HOURS * 3600)
        except PacelineError as error:
            banner.show_message(str(error))
            return
        TokenDialog(token, TOKEN_USES, TOKEN_HOURS, self._window).open()

    async def _cancel(self, deployment: DeploymentId) -> None:
        banner = self._clear_banner()
        try:
            await self._bridge.cancel(deployment)
        except PacelineError as error:
            banner.show_message(str(error))

    async def _undeploy(self, deployment: DeploymentId) -> None:
        banner = self._clear_banner()
        try:
            await self._bridge.undeploy(deployment)
        except PacelineError as error:
            banner.show_message(str(error))

    def _clear_banner(self) -> Banner:
        self._window.deploy_page.banner.clear()
        return self._window.deploy_page.banner

    def _chat(self, deployment: DeploymentId) -> None:
        self._window.chat_page.choose(deployment)
        self._window.show_page("chat")
