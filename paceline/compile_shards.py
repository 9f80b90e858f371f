"""Compiles the stages of a shard folder beforehand, each in a process of its own, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from fleet.compiled_shards import COMPILED_FOLDER, CompiledShard, locked_for_compiling, read_record, remove_unfinished
from fleet.errors import ModelError
from fleet.manifest import KvPrecision
from fleet.process import CompileConfig

TIMEOUT_S = 3600.0
"""For one stage: a compilation for an NPU takes minutes."""


class CompiledStage(msgspec.Struct, frozen=True):
    """What came of one stage."""

    stage: int
    outcome: str
    """Whether it was compiled, or was compiled already, in words."""
    seconds: float
    folder: str
    """Of the blob and its record."""
    record: CompiledShard


def compile_shards(
    folder: Path, stages: Sequence[int], device: str, kv_precision: KvPrecision, on_stage: Callable[[int], None]
) -> list[CompiledStage]:
    """Compile stages for a device of this PC and keep their blobs in the shard folder.

    Args:
        folder: the shard folder.
        stages: numbers of stages.
        device: OpenVINO's name of the device.
        kv_precision: of the KV caches.
        on_stage: hears which stage begins.

    Raises:
        ModelError: a stage does not compile, or its blob cannot be kept; the text has the process's words.
    """
    done = []
    for number in stages:
        on_stage(number)
        done.append(_compile_stage(folder, number, device, kv_precision))
    return done


def _compile_stage(folder: Path, number: int, device: str, kv_precision: KvPrecision) -> CompiledStage:
    from pipeline.local import STOP_TIMEOUT_S, ChildProcess

    config = CompileConfig(shard_folder=str(folder), stage=number, device=device, kv_precision=kv_precision)
    compiled = folder / COMPILED_FOLDER
    begin = time.monotonic()
    process = ChildProcess("pipeline.stage.compile", f"The compilation of stage {number}", config)
    try:
        status = process.wait_until_ready(begin + TIMEOUT_S)
    except BaseException:
        process.kill()
        if compiled.is_dir():
            with locked_for_compiling(compiled):
                remove_unfinished(compiled)
        raise
    finally:
        process.stop(time.monotonic() + STOP_TIMEOUT_S)
    entry = compiled / status.detail
    record = read_record(entry)
    if record is None:
        raise ModelError(f"The compiled shard in {entry} is gone; did another process build the shards again?")
    return CompiledStage(number, status.loaded, time.monotonic() - begin, str(entry), record)
