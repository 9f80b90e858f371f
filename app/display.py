"""Can a window be opened here? Asked before Qt is imported, and answered in words. This module is free of Qt.

Qt ends the whole process where its platform plugin cannot be loaded, so the question is put to a child process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from fleet.errors import PacelineError


class DisplayError(PacelineError):
    """No window can be opened here."""


_PROBE = """
import sys
from PySide6 import QtCore, QtGui, QtNetwork, QtSvg, QtWidgets
QtCore.qInstallMessageHandler(lambda kind, context, text: print(text, file=sys.stderr))
application = QtWidgets.QApplication(["probe"])
print("ok", application.platformName())
"""
_PROBE_TIMEOUT_S = 60

_DEBIAN_PACKAGES = {
    "libEGL.so.1": "libegl1",
    "libGL.so.1": "libgl1",
    "libGLX.so.0": "libglx0",
    "libOpenGL.so.0": "libopengl0",
    "libX11-xcb.so.1": "libx11-xcb1",
    "libX11.so.6": "libx11-6",
    "libdbus-1.so.3": "libdbus-1-3",
    "libfontconfig.so.1": "libfontconfig1",
    "libfreetype.so.6": "libfreetype6",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgthread-2.0.so.0": "libglib2.0-0",
    "libxcb-cursor.so.0": "libxcb-cursor0",
    "libxcb-glx.so.0": "libxcb-glx0",
    "libxcb-icccm.so.4": "libxcb-icccm4",
    "libxcb-image.so.0": "libxcb-image0",
    "libxcb-keysyms.so.1": "libxcb-keysyms1",
    "libxcb-randr.so.0": "libxcb-randr0",
    "libxcb-render-util.so.0": "libxcb-render-util0",
    "libxcb-render.so.0": "libxcb-render0",
    "libxcb-shape.so.0": "libxcb-shape0",
    "libxcb-shm.so.0": "libxcb-shm0",
    "libxcb-sync.so.1": "libxcb-sync1",
    "libxcb-util.so.1": "libxcb-util1",
    "libxcb-xfixes.so.0": "libxcb-xfixes0",
    "libxcb-xkb.so.1": "libxcb-xkb1",
    "libxcb.so.1": "libxcb1",
    "libxkbcommon-x11.so.0": "libxkbcommon-x11-0",
    "libxkbcommon.so.0": "libxkbcommon0",
    "libwayland-client.so.0": "libwayland-client0",
    "libwayland-cursor.so.0": "libwayland-cursor0",
    "libwayland-egl.so.1": "libwayland-egl1",
    "libzstd.so.1": "libzstd1",
}
_MISSING_IN_LDD = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
_MISSING_IN_IMPORT = re.compile(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")


def missing_for_display() -> str | None:
    """Why no window can be opened here, as one sentence that says what to do; None where one can."""
    if sys.platform.startswith("linux") and not os.environ.get("QT_QPA_PLATFORM"):
        if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
            missing = missing_libraries("xcb")
            also = f" {_install_sentence(missing)}" if missing else ""
            return f"There is no display here (neither DISPLAY nor WAYLAND_DISPLAY is set).{also}"
        platform = "wayland" if os.environ.get("WAYLAND_DISPLAY") else "xcb"
        return qt_fault(platform, force=False)
    return qt_fault(os.environ.get("QT_QPA_PLATFORM", ""), force=False)


def require_display() -> None:
    """Returns where a window can be opened.

    Raises:
        DisplayError: no window can be opened; the text says what to do.
    """
    fault = missing_for_display()
    if fault is not None:
        raise DisplayError(fault)


def qt_fault(platform: str, *, force: bool = True) -> str | None:
    """Why Qt cannot start on its platform plugin ``platform`` (``xcb``, ``offscreen``, …); None where it can.

    With ``force`` the plugin is prescribed to Qt, else Qt chooses and ``platform`` only says which one's libraries
    to look at when it fails.
    """
    if find_spec("PySide6") is None:
        return "Qt is not installed: install the package PySide6-Essentials."
    environment = dict(os.environ)
    if force:
        environment["QT_QPA_PLATFORM"] = platform
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"Qt did not start within {_PROBE_TIMEOUT_S} s; the display may not answer."
    if probe.returncode == 0 and probe.stdout.startswith("ok"):
        return None
    missing = sorted({*missing_libraries(platform), *libraries_in_import_error(probe.stderr)})
    if missing:
        return _install_sentence(missing)
    lines = [line.strip() for line in probe.stderr.splitlines() if line.strip()]
    reason = next(
        (line for line in lines if "platform plugin" in line or "display" in line), lines[-1] if lines else ""
    )
    return f"Qt cannot open a window here: {reason or f'it ended with code {probe.returncode}'}"


def missing_libraries(platform: str) -> list[str]:
    """System libraries that Qt and its plugin ``platform`` need and this Linux machine lacks, by file name."""
    specification = find_spec("PySide6")
    loader = shutil.which("ldd")
    if not sys.platform.startswith("linux") or loader is None or specification is None or not specification.origin:
        return []
    folder = Path(specification.origin).parent
    names = {"wayland": "libqwayland*.so"}.get(platform, f"libq{platform or 'xcb'}.so")
    objects = [
        *(folder / f"Qt{part}.abi3.so" for part in ("Core", "Gui", "Network", "Svg", "Widgets")),
        *(folder / "Qt" / "plugins" / "platforms").glob(names),
    ]
    found: set[str] = set()
    for path in objects:
        if path.exists():
            listing = subprocess.run([loader, str(path)], capture_output=True, text=True, check=False).stdout
            found.update(libraries_in_ldd(listing))
    return sorted(found)


def libraries_in_ldd(listing: str) -> list[str]:
    """Names of the libraries that a listing of ``ldd`` says are not found."""
    return sorted(set(_MISSING_IN_LDD.findall(listing)))


def libraries_in_import_error(text: str) -> list[str]:
    """Names of the libraries that a failed import could not open."""
    return sorted(set(_MISSING_IN_IMPORT.findall(text)))


def _install_sentence(libraries: list[str]) -> str:
    packages = sorted({_DEBIAN_PACKAGES[name] for name in libraries if name in _DEBIAN_PACKAGES})
    unknown = [name for name in libraries if name not in _DEBIAN_PACKAGES]
    parts = []
    if packages:
        parts.append(f"install them with 'sudo apt-get install {' '.join(packages)}' (names of Debian and Ubuntu)")
    if unknown:
        parts.append(f"find the packages that hold {', '.join(unknown)}")
    return f"Qt needs system libraries that are missing here: {'; '.join(parts)}."
