"""Each shard answers in a memory group in which the whole model is killed.

    python -m benchmarks.memory_group MODEL SHARDS [--limit-mb 3000] [--prompt 64] [--answer 4] [--threads N] [--json]

MODEL is the IR folder that SHARDS were cut from. Every stage, and then the whole model, is loaded and run by a process
of its own in a Linux memory group (cgroup v1) with that limit; the kernel ends a process that needs more and finds
nothing to give back. Mapped weights count too, but the kernel gives those pages back first. Needs the right to make
memory groups.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fleet.errors import PacelineError
from fleet.manifest import load_manifest

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
WHOLE = -1
"""The whole model, where a stage is asked for."""


class Outcome(msgspec.Struct, frozen=True):
    """How a process ended: ``answered``, ``killed`` by the kernel, or ``failed``."""

    what: str
    ending: str
    peak_bytes: int
    """Highest use of its memory group, the mapped files included."""


def can_make_groups() -> bool:
    """Whether this process may make memory groups here."""
    return (MEMORY_GROUPS / "memory.limit_in_bytes").is_file() and os.access(MEMORY_GROUPS, os.W_OK)


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A new memory group with a limit.

    Raises:
        PacelineError: this system has none, or this user may not make one.
    """
    folder = MEMORY_GROUPS / f"paceline-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        raise PacelineError(f"The memory group {folder} cannot be made: {error.strerror}.") from None
    try:
        yield folder
    finally:
        folder.rmdir()


def run_in_group(
    model_folder: Path, shard_folder: Path, stage: int, limit_bytes: int, prompt: int, answer: int, threads: int
) -> Outcome:
    """Loads and runs one stage, or the whole model, in a group of its own."""
    what = "whole model" if stage == WHOLE else f"stage {stage}"
    with memory_group(limit_bytes) as group:
        command = [sys.executable, "-m", "benchmarks.memory_group", str(model_folder), str(shard_folder)]
        command += ["--inside", str(group), "--stage", str(stage)]
        command += ["--prompt", str(prompt), "--answer", str(answer), "--threads", str(threads)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        peak_bytes = int((group / "memory.max_usage_in_bytes").read_text())
    if ended.returncode == 0 and ended.stdout.strip() == b"answered":
        return Outcome(what, "answered", peak_bytes)
    return Outcome(what, "killed" if ended.returncode == -9 else "failed", peak_bytes)


def answer_inside(arguments: argparse.Namespace) -> None:
    """Joins the group, loads, and runs a prompt and single steps."""
    (arguments.inside / "cgroup.procs").write_text(str(os.getpid()))
    # Imported here, so that all that they take is counted in the group.
    from benchmarks.running import Runner, chain_model, whole_model_of
    from pipeline.stage.allocation import return_freed_blocks

    return_freed_blocks()
    if arguments.stage == WHOLE:
        runner = Runner([whole_model_of(arguments.model)], arguments.threads)
    else:
        runner = Runner([chain_model(arguments.shards, arguments.stage)], arguments.threads)
    runner.step(arguments.prompt)
    for _ in range(arguments.answer):
        runner.step(1)
    print("answered", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints how each ended; 0 where all stages answered and the whole model was killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the whole model's IR folder")
    parser.add_argument("shards", type=Path, help="its shard folder")
    parser.add_argument("--limit-mb", type=int, default=3000, help="of the group, in MiB")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="inference threads")
    parser.add_argument("--json", action="store_true", help="one JSON document and nothing else")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, default=WHOLE, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.inside is not None:
        answer_inside(chosen)
        return 0
    try:
        stages = [stage.stage for stage in load_manifest(chosen.shards).stages]
        outcomes = [
            run_in_group(
                chosen.model,
                chosen.shards,
                stage,
                chosen.limit_mb << 20,
                chosen.prompt,
                chosen.answer,
                chosen.threads,
            )
            for stage in (*stages, WHOLE)
        ]
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 1
    if chosen.json:
        print(msgspec.json.encode(outcomes).decode())
    else:
        for one in outcomes:
            print(f"{one.what}: {one.ending} (highest use {one.peak_bytes / 1e6:,.0f} MB of {chosen.limit_mb} MiB)")
    return 0 if [one.ending for one in outcomes] == ["answered"] * len(stages) + ["killed"] else 1


if __name__ == "__main__":
    sys.exit(main())
