"""Builds through ``python -m shard_builder``, as the control panel does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from fleet.build_messages import BuildDone, BuilderLine, BuildFailed, BuildProgress, BuildRequest
from fleet.manifest import load_manifest

Writer = Callable[..., Path]
WAIT_S = 60


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "shard_builder"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def ask(process: subprocess.Popen[bytes], request: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(request + b"\n")
    process.stdin.flush()


def read_lines(process: subprocess.Popen[bytes]) -> list[BuilderLine]:
    """All lines up to the end of the process."""
    assert process.stdout is not None
    with process.stdout:
        lines = [msgspec.json.decode(line, type=BuilderLine) for line in process.stdout]
    process.wait(WAIT_S)
    return lines


def test_a_request_brings_progress_and_a_manifest(tiny_model: Writer, tmp_path: Path) -> None:
    request = BuildRequest(model=str(tiny_model()), output=str(tmp_path / "shards"), cuts=(1, 2), kv_precision="f32")
    process = start()
    ask(process, msgspec.json.encode(request))
    *progress, done = read_lines(process)
    assert process.stdin is not None
    process.stdin.close()
    assert process.returncode == 0
    assert isinstance(done, BuildDone)
    assert done.manifest == load_manifest(tmp_path / "shards")
    assert all(isinstance(line, BuildProgress) for line in progress)


def test_a_fault_is_one_sentence(tmp_path: Path) -> None:
    process = start()
    ask(process, msgspec.json.encode(BuildRequest(model=str(tmp_path), output=str(tmp_path / "shards"), stages=2)))
    *_, failed = read_lines(process)
    assert process.stdin is not None
    process.stdin.close()
    assert process.returncode == 1
    assert isinstance(failed, BuildFailed)
    assert "it has no openvino_model.xml" in failed.message
    assert not failed.cancelled


def test_a_request_that_cannot_be_read_is_refused() -> None:
    process = start()
    ask(process, b'{"type": "build", "model": 3}')
    (failed,) = read_lines(process)
    assert process.stdin is not None
    process.stdin.close()
    assert process.returncode == 1
    assert isinstance(failed, BuildFailed)


def test_closing_the_pipe_cancels(smollm2_gguf: Path, tmp_path: Path) -> None:
    request = BuildRequest(
        model=str(smollm2_gguf), output=str(tmp_path / "shards"), stages=2, work_folder=str(tmp_path / "work")
    )
    process = start()
    ask(process, msgspec.json.encode(request))
    assert process.stdin is not None
    assert process.stdout is not None
    remark = ""
    while not remark:  # what the conversion will need, told right before it begins
        line = msgspec.json.decode(process.stdout.readline(), type=BuilderLine)
        assert isinstance(line, BuildProgress)
        remark = line.remark
    process.stdin.close()
    *_, failed = read_lines(process)
    assert isinstance(failed, BuildFailed)
    assert failed.cancelled
    assert not list(tmp_path.rglob("*"))
