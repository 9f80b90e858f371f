"""The memory that a manifest predicts for each stage against what a running stage process has.

    python -m benchmarks.shard_memory SHARDS... [--prompt 64] [--answer 8] [--threads N] [--exact] [--json]

Each shard folder is served by real stage processes and a gateway on this PC. A stage is measured once it is ready and
once it has answered: its anonymous memory, which is what the prediction is for, and the mapped pages of its files that
happen to be in memory, of which the system may take back any. Linux only, because other systems do not tell the two
apart.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fleet.errors import PacelineError
from fleet.gateway_client import GatewayClient
from fleet.gateway_messages import Failed, Generate, Sampling
from fleet.manifest import Manifest, load_manifest
from fleet.memory_need import CHUNK_TOKENS, stage_memory
from pipeline.local import LocalPipeline

_MB = 1_000_000


class ProcessMemory(msgspec.Struct, frozen=True):
    """Resident bytes of a process: of its own, and of mapped files."""

    anonymous_bytes: int
    mapped_bytes: int


class StageFigures(msgspec.Struct, frozen=True):
    """One stage: what was predicted, and what was found when it was ready and when it had answered."""

    model: str
    stage: int
    first_layer: int
    end_layer: int
    weight_file_bytes: int
    predicted_bytes: int
    ready: ProcessMemory
    answered: ProcessMemory

    @property
    def error(self) -> float:
        """How far the prediction is above what was found, as a share of that."""
        return self.predicted_bytes / self.answered.anonymous_bytes - 1


def process_memory(pid: int) -> ProcessMemory:
    """What a process has in memory now.

    Raises:
        PacelineError: this system does not say, or the process is gone.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        raise PacelineError(f"The memory of process {pid} cannot be read; this needs Linux.") from None
    kilobytes = {
        name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    return ProcessMemory(kilobytes["RssAnon"] * 1024, kilobytes["RssFile"] * 1024)


def measure(
    shard_folder: Path, prompt_tokens: int, answer_tokens: int, threads: int, exact: bool
) -> list[StageFigures]:
    """Serves one shard folder and measures its stages."""
    manifest = load_manifest(shard_folder)
    with (
        LocalPipeline(shard_folder, gateway=True, threads=threads, exact=exact) as pipeline,
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
    ):
        pids = [process.pid for process in pipeline.stage_processes]
        ready = [process_memory(pid) for pid in pids]
        runner.run(_answer(pipeline, manifest, prompt_tokens, answer_tokens))
        answered = [process_memory(pid) for pid in pids]
    found = []
    for stage, one, other in zip(manifest.stages, ready, answered, strict=True):
        predicted = stage_memory(
            manifest, stage, prompt_tokens + answer_tokens, chunk_tokens=min(prompt_tokens, CHUNK_TOKENS)
        )
        found.append(
            StageFigures(
                model=manifest.name,
                stage=stage.stage,
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                weight_file_bytes=stage.bytes,
                predicted_bytes=predicted.anonymous_bytes,
                ready=one,
                answered=other,
            )
        )
    return found


async def _answer(pipeline: LocalPipeline, manifest: Manifest, prompt_tokens: int, answer_tokens: int) -> None:
    chooser = random.Random(1)
    async with GatewayClient(pipeline.identity, pipeline.gateway_address) as client:
        request = Generate(
            number=client.next_number(),
            tokens=tuple(chooser.randrange(manifest.vocabulary_size) for _ in range(prompt_tokens)),
            sampling=Sampling(ignore_stop_ids=True),
            max_tokens=answer_tokens,
        )
        async for message in client.generate(request):
            if isinstance(message, Failed):
                raise PacelineError(message.message)


def show(figures: Sequence[StageFigures]) -> None:
    """Prints a table for people, in MB."""
    print(f"{'model':24} {'stage':>5} {'layers':>7} {'file':>8} {'mapped':>8} {'own':>8} {'predicted':>9} {'error':>7}")
    for one in figures:
        layers = f"{one.first_layer}-{one.end_layer - 1}"
        sizes = [
            f"{size / _MB:,.0f}"
            for size in (
                one.weight_file_bytes,
                one.answered.mapped_bytes,
                one.answered.anonymous_bytes,
                one.predicted_bytes,
            )
        ]
        print(
            f"{one.model[:24]:24} {one.stage:>5} {layers:>7} {sizes[0]:>8} {sizes[1]:>8} {sizes[2]:>8} {sizes[3]:>9} "
            f"{one.error:>+7.1%}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints predicted and measured memory of every stage of the given shard folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path, nargs="+", help="shard folders")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=8, help="tokens of the answer")
    parser.add_argument("--threads", type=int, default=0, help="inference threads of each stage")
    parser.add_argument("--exact", action="store_true", help="infer in f32, without dynamic quantization")
    parser.add_argument("--json", action="store_true", help="one JSON document and nothing else")
    chosen = parser.parse_args(arguments)
    try:
        figures = [
            one
            for folder in chosen.shards
            for one in measure(folder, chosen.prompt, chosen.answer, chosen.threads, chosen.exact)
        ]
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 1
    if chosen.json:
        print(msgspec.json.encode([{**msgspec.to_builtins(one), "error": one.error} for one in figures]).decode())
    else:
        show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
