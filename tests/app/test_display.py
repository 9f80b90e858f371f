"""Whether a window can be opened is answered in words."""

from __future__ import annotations

import sys

import pytest

from app.display import (
    DisplayError,
    libraries_in_import_error,
    libraries_in_ldd,
    missing_for_display,
    qt_fault,
    require_display,
)

LDD = """
\tlinux-vdso.so.1 (0x00007ffd2a5d5000)
\tlibxcb-cursor.so.0 => not found
\tlibEGL.so.1 => not found
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f1c2a000000)
\tlibxcb-cursor.so.0 => not found
"""


def test_missing_libraries_are_read_from_ldd() -> None:
    assert libraries_in_ldd(LDD) == ["libEGL.so.1", "libxcb-cursor.so.0"]


def test_missing_libraries_are_read_from_a_failed_import() -> None:
    text = "ImportError: libGL.so.1: cannot open shared object file: No such file or directory"
    assert libraries_in_import_error(text) == ["libGL.so.1"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux runs without a display server")
def test_without_a_display_the_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    fault = missing_for_display()
    assert fault is not None
    assert "no display" in fault
    with pytest.raises(DisplayError, match="no display"):
        require_display()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux runs without a display server")
def test_a_display_that_does_not_answer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QT_QPA_PLATFORM", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":4711")
    fault = missing_for_display()
    assert fault is not None
    assert fault.startswith("Qt ")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.display.missing_libraries", lambda platform: ["libEGL.so.1", "libodd.so.7"])
    monkeypatch.setattr("app.display._PROBE", "raise SystemExit(1)")
    fault = qt_fault("xcb")
    assert fault is not None
    assert "apt-get install libegl1" in fault
    assert "libodd.so.7" in fault
