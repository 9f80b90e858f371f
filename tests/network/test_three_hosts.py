"""A fleet of PCs that are not one machine: found through the bridge, deployed to, and chatted with over a slow link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.network.conftest import Host

pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def fleet(lan: list[Host]) -> list[Host]:
    """The LAN with an agent on the second and third host, enrolled with the first."""
    admin, *others = lan
    token = admin.paceline("fleet", "token", "--uses", "2").strip()
    for number, host in enumerate(others, start=1):
        host.start("paceline", "agent", "--name", f"pc-{number}", "--enrol", token)
    return lan


def test_agents_are_found_across_the_bridge_at_their_own_addresses(fleet: list[Host]) -> None:
    admin, first, second = fleet
    document = json.loads(admin.paceline("nodes", "--wait", "15", "--json"))
    found = {node["name"]: (node["state"], node["addresses"]) for node in document["nodes"]}
    assert found == {"pc-1": ("ready", [first.address]), "pc-2": ("ready", [second.address])}


def test_a_model_is_deployed_and_answers_over_a_slow_link(fleet: list[Host], smollm2_two_stages: Path) -> None:
    admin, first, second = fleet
    admin.limit_rate(300)
    first.limit_rate(20)
    second.limit_rate(20)
    deployment = json.loads(
        admin.paceline("deploy", str(smollm2_two_stages), "--nodes", "pc-1,pc-2", "--json", timeout_s=240)
    )
    assert deployment["state"] == "ready"
    assert "Paris" in admin.paceline("chat", "--prompt", "What is the capital of France?")


def test_a_host_that_falls_off_the_lan_is_told_as_lost(fleet: list[Host]) -> None:
    admin, _, second = fleet
    second.cut_off()
    document = json.loads(admin.paceline("nodes", "--wait", "12", "--json"))
    states = {node["name"]: node["state"] for node in document["nodes"]}
    assert states["pc-1"] == "ready"
    assert states["pc-2"] != "ready"
