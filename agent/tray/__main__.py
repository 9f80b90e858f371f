"""``python -m agent.tray``: the icon for the agent that runs with a data folder."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from fleet.data_dir import default_data_dir

NO_DISPLAY = "There is no display for the tray icon; the agent works without it."


def display_missing() -> bool:
    """Whether Qt would end the process because there is no screen to draw on."""
    if sys.platform in ("win32", "darwin"):
        return False
    return not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"))


def main(arguments: list[str] | None = None) -> int:
    """Show the tray until its agent ends, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m agent.tray", description="The tray icon of this PC's agent.")
    parser.add_argument("--data-dir", type=Path, metavar="D", help="the agent's data folder")
    parser.add_argument("--stop-with-stdin", action="store_true", help="end when standard input ends")
    options = parser.parse_args(arguments)
    if display_missing():
        sys.stderr.write(f"{NO_DISPLAY}\n")
        return 1
    try:
        from PySide6.QtCore import QObject, Signal
        from PySide6.QtWidgets import QApplication

        from agent.tray.icon import Tray
    except ImportError as error:
        sys.stderr.write(f"The tray icon cannot be shown, because Qt cannot be loaded ({error}).\n")
        return 1
    from agent.tray.agent_link import AgentLink

    class Post(QObject):
        """Carries what other threads find into Qt's."""

        face = Signal(object)
        end = Signal()

    application = QApplication(sys.argv[:1])
    application.setQuitOnLastWindowClosed(False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tray, post = Tray(), Post()
    link = AgentLink(options.data_dir or default_data_dir(), post.face.emit)
    post.face.connect(tray.show_face)
    post.end.connect(application.quit)
    tray.pause_wanted.connect(link.set_paused)
    tray.quit_wanted.connect(link.quit_agent)
    tray.hidden.connect(application.quit)
    if options.stop_with_stdin:
        threading.Thread(target=_wait_for_end_of_input, args=(post.end.emit,), name="input", daemon=True).start()
    tray.show()
    link.start()
    code = application.exec()
    link.close()
    return code


def _wait_for_end_of_input(then: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    with contextlib.suppress(RuntimeError):  # Qt has ended already
        then()


if __name__ == "__main__":
    sys.exit(main())
