"""OpenVINO is used without a word to its maker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "first", ["import shard_builder", "import pipeline.stage.shard", "import pipeline.gateway.tokenizer"]
)
def test_what_imports_openvino_sends_nothing_and_leaves_no_client_number(first: str, tmp_path: Path) -> None:
    script = f"{first}\nimport sys, openvino\nassert sys.modules['openvino_telemetry'] is None"
    home = {name: str(tmp_path) for name in ("HOME", "LOCALAPPDATA", "USERPROFILE")}
    subprocess.run([sys.executable, "-c", script], env=os.environ | home, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_the_inventory_probe_leaves_no_client_number(tmp_path: Path) -> None:
    home = {name: str(tmp_path) for name in ("HOME", "LOCALAPPDATA", "USERPROFILE")}
    probe = [sys.executable, "-m", "agent.inventory_probe"]
    found = subprocess.run(
        probe, env=os.environ | home, stdin=subprocess.PIPE, capture_output=True, check=True, timeout=60
    )
    assert b"CPU" in found.stdout
    assert list(tmp_path.iterdir()) == []
