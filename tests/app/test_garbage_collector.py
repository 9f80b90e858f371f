"""Cyclic garbage that holds Qt objects is collected in the window's thread only."""

from __future__ import annotations

import gc
import threading
import weakref

from PySide6.QtCore import QObject
from pytestqt.qtbot import QtBot

from app.garbage_collector import GarbageCollector


class Ring:
    """Refers to itself, so that only the cyclic collector frees it."""

    def __init__(self) -> None:
        self.myself = self
        self.qt_object = QObject()


def test_another_thread_that_allocates_collects_nothing_and_the_timer_does(qtbot: QtBot) -> None:
    gc.enable()
    collector = GarbageCollector()
    collected_in: list[threading.Thread] = []
    ring = Ring()
    weakref.finalize(ring, lambda: collected_in.append(threading.current_thread()))
    del ring

    kept: list[list[int]] = []

    def allocate() -> None:
        kept.extend([number] for number in range(20_000))

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    assert collected_in == []
    qtbot.waitUntil(lambda: bool(collected_in), timeout=5000)
    assert collected_in == [threading.main_thread()]
    collector.stop()
    assert gc.isenabled()
