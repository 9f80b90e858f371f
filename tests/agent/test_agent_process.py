"""``python -m agent`` as its users and its misfortunes treat it: signals, kill -9, two at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agent.agent_state import lock_data_dir
from fleet.control_messages import StageStatus
from fleet.controller import FleetController
from fleet.manifest import load_manifest
from fleet.placement import Placement, PlannedStage
from fleet.views import FleetView, NodeView

DEADLINE_S = 40.0
MB = 1_000_000


class AgentProcess:
    """An agent, and what it wrote to standard error."""

    def __init__(self, data_dir: Path, *arguments: str) -> None:
        creation_flags = 0
        if sys.platform == "win32":
            creation_flags = subprocess.CREATE_NEW_PROCESS_GROUP
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agent", "--data-dir", str(data_dir), *arguments],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            creationflags=creation_flags,
        )
        self.log: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.decode(errors="replace"))
            if "listens on port" in self.log[-1]:
                self._listening.set()
        self._listening.set()

    def wait_until_listening(self) -> None:
        assert self._listening.wait(DEADLINE_S)
        assert self.process.poll() is None, self.log

    def end(self) -> int:
        """Wait for its end, which was asked for, and return the exit code."""
        code = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        for stream in (self.process.stdin, self.process.stderr):
            if stream is not None:
                stream.close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.end()


Start = Callable[..., AgentProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[AgentProcess] = []

    def start_agent(data_dir: Path, *arguments: str) -> AgentProcess:
        started.append(AgentProcess(data_dir, *arguments))
        return started[-1]

    yield start_agent
    for agent in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(agent.process.pid).children(recursive=True):
                child.kill()
        agent.kill()


def ask_to_stop(agent: AgentProcess, how: str) -> None:
    if how == "end of input":
        assert agent.process.stdin is not None
        agent.process.stdin.close()
    elif sys.platform == "win32":
        agent.process.send_signal(signal.CTRL_BREAK_EVENT)
    else:
        agent.process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGTERM)


@pytest.mark.parametrize("how", ["end of input", "interrupt", "terminate"])
def test_it_ends_in_order_when_told(start: Start, tmp_path: Path, how: str) -> None:
    agent = start(tmp_path, "--name", "pc", "--stop-with-stdin")
    agent.wait_until_listening()
    ask_to_stop(agent, how)
    assert agent.end() == 0
    assert any("agent pc ends" in line for line in agent.log)
    assert not any("Traceback" in line for line in agent.log)


def test_a_second_agent_of_the_same_folder_says_so(start: Start, tmp_path: Path) -> None:
    first = start(tmp_path, "--name", "pc")
    first.wait_until_listening()
    second = start(tmp_path, "--name", "pc")
    assert second.end() == 1
    assert len(second.log) == 1
    assert f"An agent runs with the data folder {tmp_path} already" in second.log[0]
    first.kill()
    lock_data_dir(tmp_path).release()


def test_a_mistyped_token_is_told_in_one_sentence(start: Start, tmp_path: Path) -> None:
    agent = start(tmp_path, "--enrol", "paceline-1-abc")
    assert agent.end() == 1
    assert agent.log == ["The enrolment token has a typing mistake or is not complete; copy it again.\n"]


def test_killed_in_the_middle_of_a_transfer_it_goes_on_where_it_was(
    start: Start, tmp_path: Path, make_shards: Callable[..., Path]
) -> None:
    shards = make_shards(tmp_path / "shards", cuts=(), layers=4, layer_bytes=50 * MB)
    total_bytes = 4 * 50 * MB

    async def test() -> None:
        controller = FleetController(tmp_path / "controller", "desk")
        await controller.start()
        data_dir = tmp_path / "pc"
        agent = start(data_dir, "--name", "pc-transfer", "--enrol", controller.create_token(1, 3600))

        def node(view: FleetView) -> NodeView | None:
            return next((node for node in view.nodes if node.name == "pc-transfer"), None)

        def stage(view: FleetView) -> StageStatus | None:
            found = node(view)
            return found.stages[0] if found is not None and found.stages else None

        def arrived_bytes(view: FleetView) -> int:
            status = stage(view)
            return status.progress.done_bytes if status is not None and status.progress is not None else 0

        def is_ready(view: FleetView) -> bool:
            found = node(view)
            return found is not None and found.state == "ready"

        def is_lost(view: FleetView) -> bool:
            found = node(view)
            return found is not None and found.state == "lost"

        def has_received(view: FleetView) -> bool:
            status = stage(view)
            return status is not None and status.state not in ("receiving", "received")

        try:
            target = node(await controller.wait_for(is_ready, DEADLINE_S))
            assert target is not None
            manifest = load_manifest(shards)
            part = manifest.stages[0]
            planned = PlannedStage(0, target.id, target.name, "CPU", part.first_layer, part.end_layer, 1, 1, 1, 1)
            placement = Placement(manifest.model_id, 128, 1, (planned,))
            deployment = await controller.deploy(shards, placement, kv_precision="f16")
            before = arrived_bytes(await controller.wait_for(lambda view: arrived_bytes(view) > 30 * MB, DEADLINE_S))
            assert before < total_bytes
            agent.kill()
            await controller.wait_for(is_lost, DEADLINE_S)
            start(data_dir, "--name", "pc-transfer")
            after = arrived_bytes(await controller.wait_for(lambda view: arrived_bytes(view) > 0, DEADLINE_S))
            # What was on its way to the disk when the process died may have to come again.
            assert after > before - 20 * MB
            await controller.wait_for(has_received, DEADLINE_S)
            failed = await controller.wait_for(
                lambda view: any(one.id == deployment and one.state == "failed" for one in view.deployments),
                DEADLINE_S,
            )
            # Its bytes are random: that the real stage process finds no graph in them is as it should be.
            (view,) = [one for one in failed.deployments if one.id == deployment]
            assert view.detail.startswith("Stage 0 on pc-transfer failed:")
        finally:
            await controller.close()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(test())
