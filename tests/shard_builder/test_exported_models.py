"""Cuts tiny random models as Optimum Intel exports them. Needs the ``export`` extra."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "docs" / "make_architectures.py"
TIMEOUT_S = 1500

pytestmark = [
    pytest.mark.export,
    pytest.mark.timeout(TIMEOUT_S + 10),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the export extra (torch) is not installed"),
]


def test_every_named_architecture_is_cut_exactly_and_the_page_says_what_was_found() -> None:
    made = subprocess.run([sys.executable, str(PROGRAM), "--check"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert made.returncode == 0, made.stderr
