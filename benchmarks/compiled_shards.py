"""How long a stage takes to load, and what memory it holds, compiled here and imported.

    python -m benchmarks.compiled_shards DIR [--stage 0] [--runs 7] [--kv-precision f16] [--json]

DIR is a shard folder that was compiled for the CPU (``paceline shard compile DIR --device CPU``). Each run is a process
of its own; the two ways alternate. Given are the median and the range of the seconds, from the manifest to the compiled
model, and the anonymous memory of the process after a prompt of 20 tokens, in MB, less what it held before the shard.
Linux only, as benchmarks.shard_memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

from benchmarks.shard_memory import process_memory
from fleet.compiled_shards import COMPILED_FOLDER
from fleet.errors import ModelError, PacelineError
from fleet.manifest import MANIFEST_NAME, KvPrecision, load_manifest

PROMPT_TOKENS = 20
WAYS = ("compiled", "imported")
_MB = 1_000_000


def measure(folder: Path, stage: int, kv_precision: KvPrecision) -> dict[str, Any]:
    """Loads a stage in this process: seconds, anonymous bytes, and whether it was imported."""
    import numpy as np

    from pipeline.stage.runtime import ShardRuntime
    from pipeline.stage.shard import DeviceOptions, load_shard

    before = process_memory(os.getpid()).anonymous_bytes
    begin = time.perf_counter()
    shard = load_shard(folder, stage, DeviceOptions("CPU", kv_precision))
    seconds = time.perf_counter() - begin
    runtime = ShardRuntime(shard)
    if stage:
        runtime.run_hidden(0, 0, np.zeros((PROMPT_TOKENS, shard.stage.input_width), np.float32), 1)
    else:
        runtime.run_tokens(0, 0, tuple(range(PROMPT_TOKENS)), 1)
    imported = not shard.loaded.why_compiled
    return {"seconds": seconds, "bytes": process_memory(os.getpid()).anonymous_bytes - before, "imported": imported}


def compare(folder: Path, stage: int, runs: int, kv_precision: KvPrecision) -> dict[str, dict[str, list[float]]]:
    """Runs both ways in turn.

    Raises:
        ModelError: no blob of use is there.
    """
    found: dict[str, dict[str, list[float]]] = {way: {"seconds": [], "megabytes": []} for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        without_blobs = Path(scratch) / "shards"
        without_blobs.mkdir()
        parts = load_manifest(folder).stages[stage]
        for name in (MANIFEST_NAME, parts.graph.name, parts.weights.name):
            (without_blobs / name).symlink_to((folder / name).absolute())
        for _ in range(runs):
            for way, place in zip(WAYS, (without_blobs, folder), strict=True):
                command = [sys.executable, "-m", "benchmarks.compiled_shards", str(place), "--stage", str(stage)]
                output = subprocess.run(
                    [*command, "--kv-precision", kv_precision, "--measure"], stdout=subprocess.PIPE, check=True
                ).stdout
                result = json.loads(output)
                if result["imported"] != (way == "imported"):
                    raise ModelError(
                        f"{folder / COMPILED_FOLDER} has no blob of use for stage {stage} with a KV cache in "
                        f"{kv_precision}; make one with 'paceline shard compile'."
                    )
                found[way]["seconds"].append(result["seconds"])
                found[way]["megabytes"].append(result["bytes"] / _MB)
    return found


def main() -> int:
    """Prints the comparison; 1 where it cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled_shards")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--kv-precision", choices=get_args(KvPrecision), default="f16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.measure:
            print(json.dumps(measure(options.folder, options.stage, options.kv_precision)))
            return 0
        found = compare(options.folder, options.stage, options.runs, options.kv_precision)
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found))
        return 0
    for way, values in found.items():
        parts = [
            f"{statistics.median(numbers):.2f} {unit} ({min(numbers):.2f} to {max(numbers):.2f})"
            for unit, numbers in (("s", values["seconds"]), ("MB", values["megabytes"]))
        ]
        print(f"{way}: {', '.join(parts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
