"""Agents of this PC get their token where nobody else can read it."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from fleet.enrolment import create_token
from fleet.identity import load_or_create_identity
from fleet.trust import TrustStore
from paceline.local_agents import LocalAgents

DEADLINE_S = 60.0


def test_the_enrolment_token_reaches_the_agents_and_is_in_no_argument(tmp_path: Path) -> None:
    controller = load_or_create_identity(tmp_path / "controller")
    token = create_token(tmp_path / "controller", controller, 2, 3600)
    with LocalAgents(tmp_path, ["one", "two"], token) as agents:
        deadline = time.monotonic() + DEADLINE_S
        for name in ("one", "two"):
            while controller.public_key not in TrustStore(tmp_path / name).controllers():
                agents.check()
                assert time.monotonic() < deadline
                time.sleep(0.05)
        for child in psutil.Process().children(recursive=True):
            assert not any(token in argument for argument in child.cmdline())
            assert token not in child.environ().values()
