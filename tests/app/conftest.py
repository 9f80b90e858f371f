"""Window tests run without a screen; where Qt's system libraries are missing they are skipped by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["QT_QPA_PLATFORM"] = "offscreen"

from app.display import qt_fault

_FAULT = qt_fault("offscreen")
_FREE_OF_QT = {"test_display.py", "test_tokens.py"}


class _SkippedModule(pytest.Module):
    """A module that cannot even be imported without Qt."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        pytest.skip(_FAULT or "")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if _FAULT is None or module_path.name in _FREE_OF_QT:
        return None
    module: pytest.Module = _SkippedModule.from_parent(parent, path=module_path)
    return module
