"""The local chain of processes: what it leaves behind, and what it says when something does not start."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from fleet.errors import ModelError, PacelineError, UnreachableError
from pipeline import local
from pipeline.local import ChildProcess, LocalPipeline

DEADLINE_S = 60.0
PARENT = """
import sys, time
from pathlib import Path
from pipeline.local import LocalPipeline
with LocalPipeline(Path(sys.argv[1]), pin=True) as pipeline:
    print(*(child.pid for child in pipeline.stage_processes), flush=True)
    time.sleep(600)
"""


class NoConfig(msgspec.Struct):
    pass


def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> ChildProcess:
    (tmp_path / "some_child.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return ChildProcess("some_child", "The child", NoConfig())


def test_children_end_when_their_parent_is_killed(smollm2_two_stages: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(smollm2_two_stages)], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        stages = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(stages) == 2
        if sys.platform != "darwin":
            assert [len(stage.cpu_affinity()) for stage in stages] == [1, 1]
        parent.kill()
        gone, alive = psutil.wait_procs(stages, DEADLINE_S)
        assert (len(gone), alive) == (2, [])
    finally:
        parent.kill()
        parent.communicate()


def test_closing_leaves_no_process(smollm2_two_stages: Path) -> None:
    pipeline = LocalPipeline(smollm2_two_stages, threads=1)
    with pipeline:
        stages = [psutil.Process(process.pid) for process in pipeline.stage_processes]
        assert [address.node_name for address in pipeline.stage_addresses] == ["stage-0", "stage-1"]
        with pytest.raises(PacelineError, match="no gateway"):
            _ = pipeline.gateway_address
    assert not any(stage.is_running() for stage in stages)
    pipeline.close()


def test_a_child_that_dies_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = child(tmp_path, monkeypatch, "import sys\nprint('the last words', file=sys.stderr)\nsys.exit(7)\n")
    with pytest.raises(ModelError, match=r"(?s)The child ended with exit code 7.*the last words"):
        process.wait_until_ready(time.monotonic() + DEADLINE_S)
    process.stop(time.monotonic() + DEADLINE_S)


def test_a_child_that_is_not_ready_in_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'import sys, time\nprint(\'{"state": "starting"}\', flush=True)\ntime.sleep(600)\n'
    process = child(tmp_path, monkeypatch, body)
    with pytest.raises(UnreachableError, match="The child did not get ready in time"):
        process.wait_until_ready(time.monotonic() + 0.5)
    process.stop(time.monotonic() + 0.2)
    assert process.exit_code is not None


def test_nothing_is_left_when_a_stage_does_not_start(smollm2_two_stages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ChildProcess] = []

    class Recorded(ChildProcess):
        def __init__(self, module: str, name: str, config: msgspec.Struct) -> None:
            super().__init__(module, name, config)
            started.append(self)

    monkeypatch.setattr(local, "ChildProcess", Recorded)
    pipeline = LocalPipeline(smollm2_two_stages, device="NOTHING")
    with pytest.raises(ModelError, match="The device NOTHING does not take stage"):
        pipeline.start()
    assert len(started) == 2
    assert all(process.exit_code is not None for process in started)
