"""A command that works with the fleet lets go of it in order, however often the person presses Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEADLINE_S = 120.0
INTERRUPTED_TWICE = """
import asyncio, pathlib, signal, sys

from fleet.controller import FleetController
from paceline.with_controller import run_with_controller

close = FleetController.close


async def close_while_interrupted(controller):
    signal.raise_signal(signal.SIGINT)
    await close(controller)
    print("closed")


async def interrupted(controller):
    signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(600)


FleetController.close = close_while_interrupted
try:
    run_with_controller(interrupted, pathlib.Path(sys.argv[1]))
except KeyboardInterrupt:
    print("interrupted")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_a_second_interrupt_lets_the_controller_close(tmp_path: Path) -> None:
    """In a process of its own, because a Ctrl-C that went astray would end the tests."""
    command = [sys.executable, "-c", INTERRUPTED_TWICE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=DEADLINE_S)
    assert (result.returncode, result.stdout.split()) == (0, ["closed", "interrupted"]), result.stderr
