"""``python -m shard_builder``: builds for another process, see ``fleet.build_messages``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from fleet.build_messages import BuildDone, BuildFailed, BuildRequest
from fleet.child_process import lower_priority
from fleet.errors import CancelledError, PacelineError
from shard_builder.building import build


def main() -> int:
    """Reads one request, writes progress and the outcome; 0 where the shard folder is complete."""
    # A terminal sends Ctrl-C to the whole group; the parent decides, by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lower_priority()
    line = sys.stdin.buffer.readline()
    try:
        request = msgspec.json.decode(line, type=BuildRequest)
    except msgspec.MsgspecError as error:
        _write(BuildFailed(message=f"The request to the shard builder cannot be read: {error}."))
        return 1
    stop = threading.Event()
    threading.Thread(target=_wait_for_end_of_input, args=(stop,), daemon=True).start()
    outcome: BuildDone | BuildFailed
    try:
        manifest = build(
            request.model,
            Path(request.output),
            stages=request.stages,
            cuts=request.cuts,
            kv_precision=request.kv_precision,
            check=request.check,
            progress=_write,
            cancelled=stop.is_set,
            work_folder=Path(request.work_folder) if request.work_folder else None,
            weights=request.weights,
            target_device=request.target_device,
        )
        outcome = BuildDone(output=request.output, manifest=manifest)
    except PacelineError as error:
        outcome = BuildFailed(message=str(error), cancelled=isinstance(error, CancelledError))
    try:
        _write(outcome)
    except CancelledError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if isinstance(outcome, BuildDone) else 1


def _wait_for_end_of_input(stop: threading.Event) -> None:
    # Not through sys.stdin: a thread that waits in it holds its lock, which Python needs to end.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop.set()


def _write(line: msgspec.Struct) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise CancelledError("The process that asked for the shards is gone; nothing was written.") from None


if __name__ == "__main__":
    sys.exit(main())
