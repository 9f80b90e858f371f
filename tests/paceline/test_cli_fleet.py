"""A scripted admin's session with two agents: the documents that scripts read, and what is told of faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet.data_dir import HOME_VARIABLE

DEADLINE_S = 120
BUDGET_BYTES = 2_000_000_000
NODE_KEYS = {"id", "name", "state", "addresses", "cpu", "devices", "memory", "stages"}
STAGE_INTEGERS = ("stage", "first_layer", "end_layer", "weight_bytes", "kv_bytes", "runtime_bytes", "budget_bytes")
Done = subprocess.CompletedProcess[str]


def paceline(home: Path, *words: str | Path) -> Done:
    """Run the console command as a script does."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", *map(str, words)],
        env=os.environ | {HOME_VARIABLE: str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=DEADLINE_S,
    )


def document(done: Done) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sentence(done: Done) -> str:
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "unexpected fault" not in done.stderr
    return done.stderr


@contextmanager
def running(home: Path, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *map(str, words)],
        env=os.environ | {HOME_VARIABLE: str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The data folder of an admin whose fleet has two agents that are ready."""
    folder = tmp_path_factory.mktemp("admin's folder")
    token = paceline(folder, "fleet", "token", "--uses", "2").stdout.strip()
    agents = [
        ("agent", "--name", f"pc-{number}", "--enrol", token, "--memory", "2GB", "--data-dir", folder / f"pc-{number}")
        for number in (1, 2)
    ]
    with running(folder, *agents[0]), running(folder, *agents[1]):
        deadline_s = time.monotonic() + DEADLINE_S
        while sum(node["state"] == "ready" for node in nodes(folder)) < 2:
            assert time.monotonic() < deadline_s
        yield folder


@pytest.fixture(scope="module")
def asked(home: Path, smollm2_gguf: Path, smollm2_two_stages: Path) -> dict[str, Done]:
    """Commands that only look, all at once: most of their time is spent on listening."""
    shards = smollm2_two_stages
    questions: dict[str, tuple[str | Path, ...]] = {
        "nodes": ("nodes", "--json"),
        "plan of shards": ("plan", shards, "--json", "--context", "1024", "--users", "1"),
        "plan of a model": ("plan", smollm2_gguf, "--json", "--context", "1024", "--users", "1"),
        "too long": ("plan", shards, "--context", "1000000", "--users", "8"),
        "no deployment": ("undeploy", "nothing"),
        "nothing to chat with": ("chat", "--prompt", "Hello"),
        "another admin's nodes": ("nodes", "--json", "--data-dir", home / "stranger"),
    }
    with ThreadPoolExecutor(len(questions)) as pool:
        done = pool.map(lambda words: paceline(home, *words), questions.values())
        return dict(zip(questions, done, strict=True))


def own_nodes(found: Any) -> list[dict[str, Any]]:
    """Those of the fleet; other fleets' agents may run on this machine and this LAN."""
    assert set(found) == {"nodes"}
    return [node for node in found["nodes"] if node["state"] not in ("foreign", "found")]


def nodes(home: Path) -> list[dict[str, Any]]:
    return own_nodes(document(paceline(home, "nodes", "--json", "--wait", "2")))


def test_nodes_are_told_with_their_hardware(asked: dict[str, Done]) -> None:
    found = own_nodes(document(asked["nodes"]))
    assert [node["name"] for node in found] == ["pc-1", "pc-2"]
    for node in found:
        assert set(node) >= NODE_KEYS
        assert node["state"] == "ready"
        assert node["stages"] == []
        assert len(node["id"]) == 16
        assert node["addresses"]
        assert all(type(address) is str for address in node["addresses"])
        assert {"CPU"} <= {device["device"] for device in node["devices"]}
        for device in node["devices"]:
            assert {name: type(value) for name, value in device.items()} == {
                "device": str,
                "name": str,
                "driver": str,
                "memory_bytes": int,
            }
        assert node["memory"]["budget_bytes"] == BUDGET_BYTES
        assert 0 < node["memory"]["free_bytes"] <= node["memory"]["total_bytes"]


def test_nodes_of_another_fleet_are_seen_as_such(asked: dict[str, Done]) -> None:
    strange = document(asked["another admin's nodes"])["nodes"]
    assert {(node["name"], node["state"], node["cpu"]) for node in strange} >= {
        ("pc-1", "foreign", None),
        ("pc-2", "foreign", None),
    }


@pytest.mark.parametrize("question", ["plan of shards", "plan of a model"])
def test_a_plan_covers_all_layers_within_the_budgets(asked: dict[str, Done], question: str) -> None:
    plan = document(asked[question])
    assert (plan["context_tokens"], plan["users"], plan["left_out"]) == (1024, 1, [])
    identities = {node["id"] for node in document(asked["nodes"])["nodes"]}
    reached = 0
    for number, stage in enumerate(plan["stages"]):
        assert set(stage) >= {*STAGE_INTEGERS, "node", "device"}
        assert all(type(stage[key]) is int for key in STAGE_INTEGERS)
        assert (stage["stage"], stage["first_layer"], stage["device"]) == (number, reached, "CPU")
        assert stage["node"] in identities
        assert stage["weight_bytes"] + stage["kv_bytes"] + stage["runtime_bytes"] <= stage["budget_bytes"]
        reached = stage["end_layer"]
    assert reached == 30


def test_shards_are_planned_as_they_are_cut_and_known_as_the_model_that_they_were(asked: dict[str, Done]) -> None:
    assert document(asked["plan of shards"])["model_id"] == document(asked["plan of a model"])["model_id"]
    assert [stage["first_layer"] for stage in document(asked["plan of shards"])["stages"]] == [0, 15]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("too long", ["does not fit", "needs", "pc-1 has 2,000 MB", "are missing"]),
        ("no deployment", ["'nothing'", "running: none"]),
        ("nothing to chat with", ["no model is deployed", "2 nodes ready", "paceline deploy"]),
    ],
)
def test_what_cannot_be_done_is_told_in_one_sentence(asked: dict[str, Done], question: str, words: list[str]) -> None:
    told = sentence(asked[question])
    assert [word for word in words if word not in told] == []


def test_a_planned_deployment_answers_and_goes_from_all_nodes(
    home: Path, asked: dict[str, Done], smollm2_two_stages: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(asked["plan of shards"].stdout)
    deployed = document(paceline(home, "deploy", smollm2_two_stages, "--plan", plan, "--json"))
    assert deployed["state"] == "ready"
    assert type(deployed["http_port"]) is int
    assert [stage["node"] for stage in deployed["stages"]] == [
        stage["node"] for stage in document(asked["plan of shards"])["stages"]
    ]
    answer = paceline(home, "chat", "--prompt", "What is the capital of France?")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "Paris" in answer.stdout
    undeployed = paceline(home, "undeploy", deployed["id"])
    assert (undeployed.returncode, undeployed.stdout, undeployed.stderr) == (0, "", "")
    assert [node["stages"] for node in nodes(home)] == [[], []]


def test_serve_prints_its_address_alone_and_ends_on_request(home: Path, smollm2_two_stages: Path) -> None:
    with running(home, "serve", smollm2_two_stages) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert httpx.get(f"{address}/models", timeout=DEADLINE_S).json()["data"][0]["id"].startswith("SmolLM2")
        if sys.platform != "win32":
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == ""
            assert process.wait(DEADLINE_S) == 130


def test_bench_tells_each_number_of_users(home: Path, smollm2_two_stages: Path) -> None:
    words = ("--users", "1,2", "--prompt-tokens", "8", "--output-tokens", "4", "--rounds", "1", "--json")
    report = document(paceline(home, "bench", smollm2_two_stages, *words))
    assert [run["users"] for run in report["runs"]] == [1, 2]
    for run in report["runs"]:
        assert run["tokens_per_second"] > 0
        for figure in ("time_to_first_token_s", "inter_token_s"):
            assert set(run[figure]) == {"p50", "p95"}
            assert 0 < run[figure]["p50"] <= run[figure]["p95"]
