"""Runs the control panel: application, theme, network thread, window, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import qasync
from PySide6.QtCore import QMessageLogContext, QTimer, QtMsgType, qInstallMessageHandler
from PySide6.QtWidgets import QApplication

from app.background import BackgroundWork, WindowGuide, run_background
from app.chat.chat_flow import ChatFlow
from app.fleet_bridge import FleetBridge
from app.fleet_flow import FleetFlow
from app.garbage_collector import GarbageCollector
from app.looks.theme import Theme
from app.main_window import MainWindow, PageName
from app.placement.placement_flow import PlacementFlow
from app.settings import Settings
from app.task_group import TaskGroup
from fleet.controller_thread import ControllerThread
from fleet.data_dir import create_data_dir
from fleet.errors import PacelineError

_SIGNAL_INTERVAL_MS = 300
_log = logging.getLogger("paceline.app")


def run_app(
    data_dir: Path,
    *,
    initial_page: PageName = "fleet",
    background: BackgroundWork | None = None,
    on_ready: Callable[[MainWindow], None] | None = None,
) -> int:
    """Open the control panel and return when it has been closed and everything behind it has ended.

    Args:
        data_dir: identity, trust, settings and built shards.
        initial_page: the page that is shown first.
        background: work that is done in the network thread while the window is open, such as the demo's fleet. It is
            given the controller and what it may do with the window; it is cancelled when the window closes, and its
            failure is shown in words.
        on_ready: called with the window when it is shown.

    Returns:
        The exit code: 0, or 1 where the network could not be started.
    """
    create_data_dir(data_dir)
    qInstallMessageHandler(_log_qt_message)
    application = QApplication.instance() or QApplication(sys.argv[:1])
    assert isinstance(application, QApplication)
    application.setApplicationName("Paceline")
    application.setDesktopFileName("paceline")
    # Closing the window begins the end; the loop ends when all behind it has ended too.
    application.setQuitOnLastWindowClosed(False)
    collector = GarbageCollector(application)
    loop = qasync.QEventLoop(application)
    try:
        code: int = loop.run_until_complete(_main(application, data_dir, initial_page, background, on_ready))
        return code
    finally:
        loop.close()
        collector.stop()


async def _main(
    application: QApplication,
    data_dir: Path,
    initial_page: PageName,
    background: BackgroundWork | None,
    on_ready: Callable[[MainWindow], None] | None,
) -> int:
    settings = Settings(data_dir)
    Theme(application, settings.scheme)
    window = MainWindow(settings)
    closing = asyncio.Event()
    window.close_wanted.connect(closing.set)
    tasks = TaskGroup(lambda name, error: _show_fault(window, name, error))
    remove_hooks = _install_hooks(window, closing)
    window.show_page(initial_page)
    window.show()
    thread = ControllerThread(data_dir, socket.gethostname())
    code = 0
    bridge: FleetBridge | None = None
    try:
        await asyncio.wrap_future(thread.start())
        bridge = FleetBridge(thread, window)
        bridge.view_changed.connect(window.set_view)
        FleetFlow(window, bridge, tasks)
        ChatFlow(window.chat_page, bridge, tasks)
        placement = PlacementFlow(window.placement_page, bridge, tasks, settings, data_dir)
        placement.deployed.connect(lambda _deployment: window.show_page("deploy"))
        await bridge.start()
        if background is not None:
            guide = WindowGuide(window, placement.open_path)
            tasks.start(run_background(window, bridge, background, guide), "background work")
    except PacelineError as error:
        code = 1
        window.banner.show_message(str(error))
    if on_ready is not None:
        on_ready(window)
    await closing.wait()
    window.hide()
    await tasks.close()
    if bridge is not None:
        await bridge.close()
    else:
        await asyncio.get_running_loop().run_in_executor(None, thread.close)
    window.close_now()
    remove_hooks()
    return code


def _show_fault(window: MainWindow, name: str, error: BaseException) -> None:
    _log.error("%s failed", name, exc_info=error)
    pattern = window.tr("Something went wrong in this program: {error}")
    text = str(error) if isinstance(error, PacelineError) else pattern.format(error=repr(error))
    window.banner.show_message(text, f"{name}: {error!r}")


def _install_hooks(window: MainWindow, closing: asyncio.Event) -> Callable[[], None]:
    """Faults in slots are shown instead of lost, and Ctrl-C in the terminal closes the window.

    Returns:
        What puts everything back as it was.
    """
    previous_hook = sys.excepthook
    previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def on_exception(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            closing.set()
            return
        _log.error("uncaught exception", exc_info=(kind, value, trace))
        if threading.current_thread() is threading.main_thread():
            _show_fault(window, "uncaught exception", value)

    sys.excepthook = on_exception
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda _loop, context: _show_fault(
            window, str(context.get("message", "")), context.get("exception") or RuntimeError(context.get("message"))
        )
    )
    # Python looks at signals only when it runs: wake it now and then while Qt waits.
    waking = QTimer(window)
    waking.timeout.connect(lambda: None)
    waking.start(_SIGNAL_INTERVAL_MS)
    for number in previous_handlers:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(closing.set))

    def remove() -> None:
        waking.stop()
        sys.excepthook = previous_hook
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)

    return remove


def _log_qt_message(kind: QtMsgType, context: QMessageLogContext, text: str) -> None:
    levels = {
        QtMsgType.QtDebugMsg: logging.DEBUG,
        QtMsgType.QtInfoMsg: logging.INFO,
        QtMsgType.QtWarningMsg: logging.WARNING,
        QtMsgType.QtCriticalMsg: logging.ERROR,
        QtMsgType.QtFatalMsg: logging.CRITICAL,
    }
    logging.getLogger("paceline.qt").log(levels.get(kind, logging.WARNING), "%s", text)
