"""A command that works with the fleet lets go of it in order, however often the person presses Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.controller import FleetController
from paceline.with_controller import run_with_controller


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    """Ctrl-C as a command finds it, whatever the tests before left behind; asyncio takes over no other handler."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_a_second_interrupt_lets_the_controller_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[FleetController] = []
    close = FleetController.close

    async def close_while_interrupted(controller: FleetController) -> None:
        signal.raise_signal(signal.SIGINT)
        await close(controller)
        closed.append(controller)

    async def interrupted(controller: FleetController) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr(FleetController, "close", close_while_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_with_controller(interrupted, tmp_path)
    assert len(closed) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
