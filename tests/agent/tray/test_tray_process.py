"""The tray beside a real agent: it follows it, pauses it, quits it, and ends with it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.agent_state import load_state
from agent.tray import __main__ as tray_main
from agent.tray.agent_link import AgentLink
from agent.tray.words import Face
from agent.tray_process import TrayProcess

DEADLINE_S = 40.0


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "agent", "--data-dir", str(tmp_path), "--name", "pc"], stderr=subprocess.DEVNULL
    )
    yield process
    process.kill()
    process.wait()


class Faces:
    def __init__(self) -> None:
        self.queue: queue.Queue[Face] = queue.Queue()

    def until(self, wanted: Callable[[Face], bool]) -> Face:
        while True:
            face = self.queue.get(timeout=DEADLINE_S)
            if wanted(face):
                return face


def test_it_follows_pauses_and_quits_the_agent(agent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    faces = Faces()
    link = AgentLink(tmp_path, faces.queue.put)
    link.start()
    try:
        faces.until(lambda face: face.mood == "idle")
        link.set_paused(True)
        faces.until(lambda face: face.paused)
        assert load_state(tmp_path).paused
        link.set_paused(False)
        faces.until(lambda face: face.mood == "idle")
        link.quit_agent()
        assert agent.wait(DEADLINE_S) == 0
        assert not faces.until(lambda face: not face.reachable).paused
    finally:
        link.close()
    link.close()


def test_its_process_ends_with_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QT_QPA_PLATFORM", "offscreen")
    tray = TrayProcess(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        tray.wait(1.0)
    tray.close()
    assert tray.wait(0) == 0


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="there is always a display")
def test_without_a_display_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    assert tray_main.main(["--data-dir", os.fspath(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tray_main.NO_DISPLAY}\n"
