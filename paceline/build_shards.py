"""Builds shards in a child process, as the control panel does, with progress and cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from fleet.build_messages import BuildDone, BuilderLine, BuildFailed, BuildPhase, BuildProgress, BuildRequest
from fleet.child_process import describe_exit, start_child
from fleet.errors import CancelledError, ModelError
from fleet.manifest import KvPrecision, Manifest

PHASE_WORDS: dict[BuildPhase, str] = {
    "download": "Downloading the model",
    "convert": "Converting the model",
    "compress": "Compressing the weights",
    "analyse": "Looking for the layers",
    "write": "Writing the shards",
    "verify": "Checking against the whole model",
}


def build_shards(
    model: str | Path,
    output: Path,
    *,
    stages: int,
    kv_precision: KvPrecision = "f16",
    work_folder: Path | None = None,
    on_progress: Callable[[BuildProgress], None] | None = None,
    cancelled: threading.Event | None = None,
) -> Manifest:
    """The manifest of the finished shard folder ``output``. Blocks; ``cancelled`` may be set from another thread.

    ``work_folder`` keeps the converted model for the next build; by default it is the data folder's.

    Raises:
        ModelError: the model cannot be cut; the sentence is the builder's.
        CancelledError: ``cancelled`` was set.
    """
    request = BuildRequest(
        model=str(model),
        output=str(output),
        stages=stages,
        kv_precision=kv_precision,
        work_folder="" if work_folder is None else str(work_folder),
    )
    process = start_child("shard_builder", stderr=None)
    assert process.stdin is not None
    assert process.stdout is not None
    finished = threading.Event()

    def close_when_cancelled(event: threading.Event) -> None:
        while not finished.wait(0.1):
            if event.is_set() and process.stdin is not None:
                process.stdin.close()
                return

    try:
        process.stdin.write(msgspec.json.encode(request) + b"\n")
        process.stdin.flush()
        if cancelled is not None:
            threading.Thread(target=close_when_cancelled, args=(cancelled,), daemon=True).start()
        decoder = msgspec.json.Decoder(BuilderLine)
        for line in process.stdout:
            match decoder.decode(line):
                case BuildProgress() as progress:
                    if on_progress is not None:
                        on_progress(progress)
                case BuildDone(manifest=manifest):
                    return manifest
                case BuildFailed(message=message, cancelled=was_cancelled):
                    raise CancelledError(message) if was_cancelled else ModelError(message)
        if cancelled is not None and cancelled.is_set():
            raise CancelledError("The build was cancelled.")
        raise ModelError(f"{output} was not completed: the shard builder is gone, {describe_exit(process.wait())}.")
    finally:
        finished.set()
        process.stdin.close()
        process.stdout.close()
        process.wait()
