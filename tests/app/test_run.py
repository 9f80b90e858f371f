"""The control panel as a program: it starts, and it ends with nothing left, however it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.identity import IDENTITY_FILE

PROGRAM = """
import sys
from pathlib import Path
from PySide6.QtCore import QTimer
from app.run import run_app
from fleet.errors import DeployError

mode = sys.argv[2]

def on_ready(window):
    if mode == "close":
        QTimer.singleShot(300, window, window.close)
    elif mode in ("work", "afterwards"):
        def look():
            if window.page == "deploy":
                print("now", window.page, flush=True)
                window.close()
                timer.stop()
            if window.banner.message():
                print("banner:", window.banner.message(), flush=True)
                window.close()
        timer = QTimer(window)
        timer.timeout.connect(look)
        timer.start(50)
    print("ready", window.page, flush=True)

async def work(controller, guide):
    guide.tell("working")
    if mode == "afterwards":
        guide.show_page("deploy")
        return
    raise DeployError("The demo's agent is gone.")

code = run_app(
    Path(sys.argv[1]),
    initial_page="chat",
    on_ready=on_ready,
    background=work if mode in ("work", "afterwards") else None,
)
import threading
print("ended", code, [thread.name for thread in threading.enumerate() if not thread.daemon], flush=True)
sys.exit(code)
"""


def start(data_dir: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(data_dir), mode],
        env={**os.environ, "QT_QPA_PLATFORM": "offscreen"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_closing_the_window_ends_the_program(tmp_path: Path) -> None:
    output, errors = start(tmp_path, "close").communicate(timeout=60)
    assert output.splitlines() == ["ready chat", "ended 0 ['MainThread']"], errors
    assert "Traceback" not in errors
    assert (tmp_path / "app.ini").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent to a console there, not to a process")
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_program(tmp_path: Path, how: str) -> None:
    program = start(tmp_path, "signal")
    assert program.stdout is not None
    assert program.stdout.readline() == "ready chat\n"
    program.send_signal(getattr(signal, how))
    output, errors = program.communicate(timeout=60)
    assert output.splitlines() == ["ended 0 ['MainThread']"], errors
    assert "Traceback" not in errors


def test_work_in_the_background_that_fails_is_told_in_the_window(tmp_path: Path) -> None:
    output, errors = start(tmp_path, "work").communicate(timeout=60)
    assert "banner: The demo's agent is gone." in output.splitlines(), errors
    assert output.splitlines()[-1].startswith("ended 0")


def test_the_work_turns_to_a_page(tmp_path: Path) -> None:
    output, errors = start(tmp_path, "afterwards").communicate(timeout=60)
    assert output.splitlines() == ["ready chat", "now deploy", "ended 0 ['MainThread']"], errors


def test_a_network_that_cannot_start_is_told_in_the_window(tmp_path: Path) -> None:
    (tmp_path / IDENTITY_FILE).mkdir()
    output, errors = start(tmp_path, "work").communicate(timeout=60)
    assert any(line.startswith("banner: ") for line in output.splitlines()), errors
    assert output.splitlines()[-1].startswith("ended 1")
