"""The supervisor with real processes: small scripts that speak the children's protocol."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agent import child_machine
from agent.supervisor import ChildSpec, ChildView, Supervisor

CHILD = """
import json, os, sys
config = json.loads(sys.stdin.readline())
print("noise of a driver", flush=True)
print(json.dumps({"state": "starting"}), flush=True)
if config["how"] == "refuse":
    print(json.dumps({"state": "failed", "detail": "There is no device GPU."}), flush=True)
    sys.exit(1)
if config["how"] == "crash":
    sys.stderr.write("first\\nout of memory\\n")
    sys.exit(7)
print(json.dumps({"state": "ready", "port": config["port"] or 5123}), flush=True)
if config["how"] == "deaf":
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
sys.stdin.read()
"""
DEADLINE_S = 20.0


def start(module: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", module], stdin=pipe, stdout=pipe, stderr=pipe)


def spec(how: str) -> ChildSpec:
    return ChildSpec(f"test child ({how})", CHILD, lambda port, _: json.dumps({"how": how, "port": port}).encode())


class Watch:
    """Waits for a state of a child, woken by its changes."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.supervisor: Supervisor[str] = Supervisor(lambda key: self.changed.set(), start)

    async def until(self, key: str, wanted: Callable[[ChildView], bool]) -> ChildView:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                self.changed.clear()
                view = self.supervisor.view(key)
                if view is not None and wanted(view):
                    return view
                await self.changed.wait()


def run(test: Callable[[Watch], object]) -> None:
    async def main() -> None:
        watch = Watch()
        try:
            await test(watch)  # type: ignore[misc]
        finally:
            await watch.supervisor.close()

    asyncio.run(main())


def test_a_killed_child_comes_back_on_its_port() -> None:
    async def test(watch: Watch) -> None:
        watch.supervisor.start("a", spec("well"))
        view = await watch.until("a", lambda view: view.state == "ready")
        assert view.port == 5123
        assert view.memory_bytes > 0
        assert view.process_id is not None
        psutil.Process(view.process_id).kill()
        await watch.until("a", lambda view: view.state == "restarting")
        again = await watch.until("a", lambda view: view.state == "ready")
        assert again.process_id != view.process_id
        assert again.port == 5123
        assert again.restarts == 1
        watch.supervisor.start("a", spec("well"))
        there = watch.supervisor.view("a")
        assert there is not None
        assert there.process_id == again.process_id
        await watch.supervisor.stop("a")
        assert watch.supervisor.view("a") is None
        assert not psutil.pid_exists(again.process_id or 0)

    run(test)


def test_a_refusal_and_a_crash_are_told_in_words() -> None:
    async def test(watch: Watch) -> None:
        watch.supervisor.start("refuse", spec("refuse"))
        view = await watch.until("refuse", lambda view: view.state == "failed")
        assert view.detail == "There is no device GPU."
        watch.supervisor.start("crash", spec("crash"))
        view = await watch.until("crash", lambda view: view.state == "restarting")
        assert "exit code 7" in view.detail
        assert "out of memory" in view.detail

    run(test)


def test_a_child_that_cannot_be_started() -> None:
    def refuse(module: str) -> subprocess.Popen[bytes]:
        raise OSError(8, "no memory")

    async def main() -> None:
        changed = asyncio.Event()
        supervisor: Supervisor[str] = Supervisor(lambda key: changed.set(), refuse)
        supervisor.start("a", spec("well"))
        await asyncio.wait_for(changed.wait(), DEADLINE_S)
        await asyncio.sleep(0)
        view = supervisor.view("a")
        assert view is not None
        assert view.state == "restarting"
        assert "no memory" in view.detail
        await supervisor.close()

    asyncio.run(main())


def test_a_deaf_child_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_machine, "INPUT_CLOSED_GRACE_S", 0.3)
    monkeypatch.setattr(child_machine, "TERMINATE_GRACE_S", 0.3)

    async def test(watch: Watch) -> None:
        watch.supervisor.start("deaf", spec("deaf"))
        view = await watch.until("deaf", lambda view: view.state == "ready")
        await asyncio.wait_for(watch.supervisor.stop("deaf"), DEADLINE_S)
        assert not psutil.pid_exists(view.process_id or 0)

    run(test)


def test_children_end_when_the_parent_is_killed() -> None:
    parent = f"""
import asyncio, sys
sys.path.insert(0, {str(Path.cwd())!r})
from agent.supervisor import ChildSpec, Supervisor
import json, subprocess
def start(code):
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe)
async def main():
    children = Supervisor(lambda key: None, start)
    children.start("a", ChildSpec("a", {CHILD!r}, lambda port, _: json.dumps({{"how": "well", "port": port}}).encode()))
    while children.view("a").state != "ready":
        await asyncio.sleep(0.05)
    print(children.view("a").process_id, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        assert child.is_running()
        process.kill()
    assert child.wait(DEADLINE_S) in (0, None)
