"""Carries questions from the Chat page to the gateway and the answers back."""

from __future__ import annotations

import asyncio
import contextlib
import time

from PySide6.QtCore import QObject

from app.chat.chat_page import ChatPage
from app.chat.conversation import Turn
from app.fleet_bridge import FleetBridge
from app.task_group import TaskGroup
from fleet.control_messages import DeploymentId
from fleet.errors import PacelineError
from fleet.gateway_messages import Generate


class ChatFlow(QObject):
    """One answer at a time. Every fault ends in the answer that it hit, in words."""

    def __init__(self, page: ChatPage, bridge: FleetBridge, tasks: TaskGroup) -> None:
        super().__init__(page)
        self._page = page
        self._bridge = bridge
        self._tasks = tasks
        self._running: asyncio.Task[object] | None = None
        page.question_asked.connect(self._ask)
        page.stop_wanted.connect(self.stop)

    def stop(self) -> None:
        """End the answer that is being written; what has been written stays."""
        if self._page.conversation.turns:
            self._page.conversation.turns[-1].answer.stop()
        if self._running is not None:
            self._running.cancel()
        self._page.refresh()

    def _ask(self, turn: Turn) -> None:
        deployment = self._page.deployment
        if deployment is None:
            turn.answer.fail(self.tr("This model is not ready any more; choose another one."))
            self._page.refresh()
            return
        request = Generate(
            number=0,
            messages=self._page.conversation.messages(self._page.options.system_prompt()),
            sampling=self._page.options.sampling(),
            max_tokens=self._page.options.max_tokens(),
            plain_without_template=True,
        )
        self._running = self._tasks.start(self._answer(deployment.id, request, turn), "answer")

    async def _answer(self, deployment: DeploymentId, request: Generate, turn: Turn) -> None:
        answer = turn.answer
        try:
            async with contextlib.aclosing(self._bridge.answer(deployment, request)) as batches:
                async for batch in batches:
                    if not answer.running:
                        break
                    now_s = time.monotonic()
                    for message in batch:
                        answer.take(message, now_s)
                    self._page.refresh()
            if answer.running:
                answer.fail(self.tr("The answer ended without a word why. Try again."))
        except PacelineError as error:
            if answer.running:
                answer.fail(str(error))
        finally:
            answer.stop()
            self._page.refresh()
