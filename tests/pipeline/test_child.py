"""The harness of child processes, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from pipeline.child import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_INTERNAL, STOP_GRACE_S

DEADLINE_S = 30.0
HEAD = """
import os, sys, time
import msgspec
from fleet.errors import ModelError
from pipeline.child import ignore_interrupts, run_child

class Config(msgspec.Struct, forbid_unknown_fields=True):
    secret: str
    low_priority: bool = False

ignore_interrupts()
"""
CONFIG = b'{"secret": "do-not-show"}\n'
StartChild = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[StartChild]:
    children: list[subprocess.Popen[bytes]] = []

    def begin(body: str) -> subprocess.Popen[bytes]:
        script = HEAD + body + "\nsys.exit(run_child(Config, main))\n"
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        children.append(child)
        return child

    yield begin
    for child in children:
        if child.poll() is None:
            child.kill()
        child.communicate()


def statuses(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def until_ready(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(CONFIG)
    child.stdin.flush()
    while json.loads(child.stdout.readline())["state"] != "ready":
        pass


def test_a_child_reads_its_configuration_and_tells_its_state(start: StartChild) -> None:
    child = start("def main(config, context):\n    context.status('ready', config.secret[:2], port=7, http_port=8)")
    output, _ = child.communicate(CONFIG, DEADLINE_S)
    assert child.returncode == 0
    first, second = statuses(output)
    assert first["state"] == "starting"
    assert (second["state"], second["detail"], second["port"], second["http_port"]) == ("ready", "do", 7, 8)


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"nonsense\n", b'{"secret": 3}\n', b'{"secret": "do-not-show", "x": 1}\n']
)
def test_a_configuration_that_cannot_be_read_is_named_and_not_repeated(start: StartChild, line: bytes) -> None:
    child = start("def main(config, context):\n    raise AssertionError")
    output, log = child.communicate(line, DEADLINE_S)
    assert child.returncode == EXIT_BAD_CONFIG
    [status] = statuses(output)
    assert status["state"] == "failed"
    assert b"do-not-show" not in output + log


def test_an_error_for_people_is_the_last_status(start: StartChild) -> None:
    child = start("def main(config, context):\n    raise ModelError('The weights are gone.')")
    output, log = child.communicate(CONFIG, DEADLINE_S)
    assert child.returncode == EXIT_FAILED
    last = statuses(output)[-1]
    assert (last["state"], last["detail"]) == ("failed", "The weights are gone.")
    assert b"Traceback" not in log


def test_an_unexpected_error_leaves_its_traceback_in_the_log(start: StartChild) -> None:
    child = start("def main(config, context):\n    1 / 0")
    output, log = child.communicate(CONFIG, DEADLINE_S)
    assert child.returncode == EXIT_INTERNAL
    assert statuses(output)[-1]["state"] == "failed"
    assert b"ZeroDivisionError" in log


def test_what_is_printed_goes_to_the_log(start: StartChild) -> None:
    child = start("def main(config, context):\n    print('hello', flush=True)\n    os.write(1, b'from a library')")
    output, log = child.communicate(CONFIG, DEADLINE_S)
    assert [status["state"] for status in statuses(output)] == ["starting"]
    assert b"hello" in log
    assert b"from a library" in log


def test_the_end_of_the_input_asks_the_child_to_stop(start: StartChild) -> None:
    body = """
def main(config, context):
    context.on_stop(lambda: print("heard", flush=True))
    context.status("ready")
    context.stopping.wait()
    context.status("degraded", "ended well")
"""
    child = start(body)
    until_ready(child)
    output, log = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0
    assert statuses(output)[-1]["detail"] == "ended well"
    assert b"heard" in log


def test_a_child_in_the_middle_of_its_work_ends_with_its_input(start: StartChild) -> None:
    child = start("def main(config, context):\n    context.status('ready')\n    time.sleep(600)")
    until_ready(child)
    child.communicate(timeout=STOP_GRACE_S + DEADLINE_S)
    assert child.returncode == 0


def test_a_parent_that_reads_no_more_stops_the_child(start: StartChild) -> None:
    body = """
def main(config, context):
    context.status("ready")
    while not context.stopping.is_set():
        context.status("ready", "x" * 1000)
"""
    child = start(body)
    until_ready(child)
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(DEADLINE_S) == 0
    child.stdout = None


@pytest.mark.skipif(sys.platform == "win32", reason="a console event reaches the whole console there")
def test_ctrl_c_in_the_terminal_is_left_to_the_parent(start: StartChild) -> None:
    child = start("def main(config, context):\n    context.status('ready')\n    context.stopping.wait()")
    until_ready(child)
    os.kill(child.pid, signal.SIGINT)
    _, log = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == 0
    assert log == b""


def test_low_priority_is_lower_than_ours(start: StartChild) -> None:
    child = start("def main(config, context):\n    context.status('ready')\n    context.stopping.wait()")
    assert child.stdin is not None
    child.stdin.write(b'{"secret": "", "low_priority": true}\n')
    child.stdin.flush()
    assert child.stdout is not None
    while json.loads(child.stdout.readline())["state"] != "ready":
        pass
    niceness = psutil.Process(child.pid).nice()
    if sys.platform == "win32":
        assert niceness == psutil.BELOW_NORMAL_PRIORITY_CLASS
    else:
        assert niceness >= 10
