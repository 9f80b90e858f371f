"""The demo as a newcomer runs it: real agents, mDNS, shards, and an answer; and nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

QUESTION = "What is the capital of France?"
DEADLINE_S = 240


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A demo whose temporary files go to ``folder``; killed with all that it started if the test leaves it running."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "PACELINE_HOME": str(folder / "home")}
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "demo", "--headless", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=sys.platform != "win32",
    )
    try:
        yield process
    finally:
        for left in running_in(folder):
            left.kill()
        process.kill()
        process.communicate()


def running_in(folder: Path) -> list[psutil.Process]:
    """Processes that were started with ``folder`` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_left(folder: Path) -> None:
    deadline_s = time.monotonic() + 15
    while running_in(folder) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert [process.cmdline() for process in running_in(folder)] == []
    assert [path.name for path in folder.iterdir() if path.name.startswith("paceline-")] == []


def test_two_demos_at_once_answer_and_leave_nothing(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    with demo(folders[0], "--prompt", QUESTION) as first, demo(folders[1], "--prompt", QUESTION) as second:
        for process in (first, second):
            answer, progress = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, progress
            assert "Paris" in answer
            assert "found demo-pc-1" in progress
            assert "found demo-pc-2" in progress
    for folder in folders:
        assert_nothing_left(folder)


@pytest.mark.parametrize("word", ["Writing the shards", "found demo-pc-1", "stage 1", "answers over"])
def test_an_interrupt_at_any_moment_leaves_nothing(tmp_path: Path, word: str) -> None:
    if sys.platform == "win32":
        pytest.skip("a console's Ctrl-C cannot be sent to one process on Windows")
    with demo(tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if word in line:
                break
        process.send_signal(signal.SIGINT)
        answer, progress = process.communicate(timeout=60)
        assert answer == ""
        assert process.returncode == 130, progress
        assert "Traceback" not in progress
    assert_nothing_left(tmp_path)


def test_an_impatient_person_leaves_nothing_either(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("a console's Ctrl-C cannot be sent to one process on Windows")
    with demo(tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "found demo-pc-1" in line:
                break
        deadline_s = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline_s:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        # The last interrupt may come when Python itself is ending and lets it end the process.
        assert process.returncode in (130, -signal.SIGINT)
    assert_nothing_left(tmp_path)


def test_a_conversation_is_read_from_the_terminal(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        answer, progress = process.communicate(f"{QUESTION}\n/quit\n", timeout=DEADLINE_S)
        assert process.returncode == 0, progress
        assert "Paris" in answer
        assert "tokens/s" in progress
    assert_nothing_left(tmp_path)
