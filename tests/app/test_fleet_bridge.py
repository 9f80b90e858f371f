"""Between the network thread and the window: snapshots come coalesced, wishes go out, and nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import qasync
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat.chat_flow import ChatFlow
from app.chat.chat_page import ChatPage
from app.chat_connections import ChatConnections
from app.fleet_bridge import FleetBridge
from app.task_group import TaskGroup
from fleet.errors import UnreachableError
from fleet.gateway_messages import Accepted, Delta, Finished, GatewayMessage, Generate
from fleet.identity import Identity
from fleet.node import PeerAddress
from fleet.views import DeploymentView, FleetView, NodeView

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class PlayedGateway:
    """Plays a gateway's client: answers every request with the words of the test."""

    def __init__(self, identity: Identity, address: PeerAddress) -> None:
        self.words: tuple[str, ...] = ("Pa", "ris", ".")
        self.error: UnreachableError | None = None
        self.endless = False
        self.cancelled = asyncio.Event()
        self.requests: list[Generate] = []
        self.closed = False

    def next_number(self) -> int:
        return len(self.requests) + 1

    async def generate(self, request: Generate) -> AsyncGenerator[GatewayMessage, None]:
        self.requests.append(request)
        number = request.number
        yield Accepted(number, 5)
        try:
            for word in self.words:
                yield Delta(number, word, (1,))
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            while self.endless:
                yield Delta(number, "more ", (1,))
                await asyncio.sleep(0.005)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled.set()
            raise
        yield Finished(number, "stop", 5, len(self.words), 0.1, 0.2)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(qapp: QApplication) -> Iterator[Run]:
    """Runs a coroutine in the window's loop."""
    loop = qasync.QEventLoop(qapp, already_running=False)

    def run_in_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return loop.run_until_complete(asyncio.wait_for(coroutine, 30))

    yield run_in_loop
    loop.close()


class Setting:
    """A bridge to a played network, with a played gateway behind the chat."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.gateways: list[PlayedGateway] = []
        self.prepare: Callable[[PlayedGateway], None] = lambda gateway: None
        self.bridge = FleetBridge(network, make_connections=self._connections)

    def _connections(self, controller: Any) -> ChatConnections:
        return ChatConnections(controller, self._gateway)

    def _gateway(self, identity: Identity, address: PeerAddress) -> PlayedGateway:
        gateway = PlayedGateway(identity, address)
        self.prepare(gateway)
        self.gateways.append(gateway)
        return gateway


@pytest.fixture
def setting(network: Any) -> Setting:
    return Setting(network)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)


def test_many_snapshots_become_few_and_the_last_one_is_shown(
    run: Run, setting: Setting, make_node: Callable[..., NodeView]
) -> None:
    async def story() -> None:
        await setting.bridge.start()
        shown: list[FleetView] = []
        setting.bridge.view_changed.connect(shown.append)
        controller = setting.network.controller

        async def storm() -> None:
            for number in range(300):
                controller.publish(FleetView(nodes=(make_node(1, free_bytes=number),)))
                await asyncio.sleep(0.002)

        started_s = time.monotonic()
        await asyncio.wrap_future(setting.network.call(storm()))
        await until(lambda: bool(shown) and shown[-1] == controller.view)
        elapsed_s = time.monotonic() - started_s
        assert 2 <= len(shown) <= elapsed_s / 0.25 + 2
        assert setting.bridge.view == controller.view
        await setting.bridge.close()
        assert setting.network.ended

    run(story())


def test_a_failure_in_the_network_thread_comes_out_of_the_call(run: Run, setting: Setting) -> None:
    async def story() -> None:
        assert await setting.bridge.create_token(3, 60) == "paceline-token"
        setting.network.controller.error = UnreachableError("nobody there")
        with pytest.raises(UnreachableError, match="nobody there"):
            await setting.bridge.undeploy("0" * 12)
        await setting.bridge.close()

    run(story())
    assert setting.network.controller.asked == [("token", (3, 60))]


def chat(setting: Setting, qtbot: QtBot, deployment: DeploymentView) -> tuple[ChatPage, TaskGroup]:
    page = ChatPage()
    qtbot.addWidget(page)
    tasks = TaskGroup(lambda name, error: pytest.fail(f"{name}: {error!r}"))
    page.set_view(FleetView(deployments=(deployment,)))
    ChatFlow(page, setting.bridge, tasks)
    return page, tasks


def test_a_question_is_answered(
    run: Run, setting: Setting, qtbot: QtBot, make_deployment: Callable[..., DeploymentView]
) -> None:
    page, _tasks = chat(setting, qtbot, make_deployment())

    async def story() -> None:
        page.ask("What is the capital of France?")
        await until(lambda: not page.answering)
        page.ask("And of Italy?")
        await until(lambda: not page.answering)
        await setting.bridge.close()

    run(story())
    assert [turn.answer.text for turn in page.conversation.turns] == ["Paris.", "Paris."]
    assert page.conversation.turns[0].answer.state == "finished"
    (gateway,) = setting.gateways
    assert gateway.closed
    assert [request.number for request in gateway.requests] == [1, 2]
    assert gateway.requests[1].messages is not None
    assert [message.role for message in gateway.requests[1].messages] == ["user", "assistant", "user"]


def test_stop_cancels_at_the_gateway_and_keeps_what_was_written(
    run: Run, setting: Setting, qtbot: QtBot, make_deployment: Callable[..., DeploymentView]
) -> None:
    page, _tasks = chat(setting, qtbot, make_deployment())
    setting.prepare = lambda gateway: setattr(gateway, "endless", True)

    async def story() -> None:
        page.ask("Go on for ever")
        await until(lambda: "more more" in page.conversation.turns[-1].answer.text)
        page.stop_wanted.emit()
        await asyncio.wrap_future(setting.network.call(asyncio.wait_for(setting.gateways[0].cancelled.wait(), 10)))
        await until(lambda: not page.answering)
        await setting.bridge.close()

    run(story())
    answer = page.conversation.turns[-1].answer
    assert answer.state == "stopped"
    assert answer.text.startswith("Paris.more")


def test_a_lost_gateway_is_told_in_the_answer_and_trying_again_works(
    run: Run, setting: Setting, qtbot: QtBot, make_deployment: Callable[..., DeploymentView]
) -> None:
    page, _tasks = chat(setting, qtbot, make_deployment())
    setting.prepare = lambda gateway: setattr(gateway, "error", UnreachableError("The gateway on pc-0 went away."))

    async def story() -> None:
        page.ask("Hi")
        await until(lambda: not page.answering)
        answer = page.conversation.turns[-1].answer
        assert (answer.state, answer.error, answer.text) == ("failed", "The gateway on pc-0 went away.", "Paris.")
        setting.gateways[0].error = None
        widget = page.last_answer()
        assert widget is not None
        widget.retry_wanted.emit()
        await until(lambda: not page.answering)
        assert page.conversation.turns[-1].answer.state == "finished"
        await setting.bridge.close()

    run(story())


def test_closing_in_the_middle_of_an_answer_ends_everything(
    run: Run, setting: Setting, qtbot: QtBot, make_deployment: Callable[..., DeploymentView]
) -> None:
    page, tasks = chat(setting, qtbot, make_deployment())
    setting.prepare = lambda gateway: setattr(gateway, "endless", True)

    async def story() -> None:
        page.ask("Go on for ever")
        await until(lambda: bool(page.conversation.turns[-1].answer.text))
        await tasks.close()
        await setting.bridge.close()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    run(story())
    assert setting.network.ended
    assert setting.gateways[0].closed
    assert setting.gateways[0].cancelled.is_set()
