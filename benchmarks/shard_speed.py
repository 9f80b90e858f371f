"""Decoding by the whole model, by its shards in a chain, and by shards without the Gather by beam_idx, side by side.

    python -m benchmarks.shard_speed MODEL SHARDS [--contexts 64,512,2000] [--rounds 7] [--steps 16]
        [--inference-precision f32] [--json]

MODEL is the IR folder that SHARDS were cut from. All three live in one process on one processor and take turns step by
step, so that whatever else the PC does slows all alike. Per round and context the tokens per second of each, by its
median step, are divided by the whole model's; the median of the rounds is shown with the lowest and highest. Without
the Gather the CPU plugin does not fuse the attention with its cache; a graph that does not run so (those of OpenVINO's
GGUF reader) is left out. A CPU with AMX computes in bf16 by itself: there the hidden states of all shards but the last
stay in f32 up to their output, which takes conversions that the whole model does without.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from benchmarks.running import Runner, chain_model, whole_model_of, without_gather
from fleet.errors import PacelineError
from fleet.manifest import load_manifest
from paceline.parsing import parse_numbers

WHOLE, CHAIN, NO_GATHER = "whole", "chain", "no Gather"
CHUNK_TOKENS = 256


class Figures(msgspec.Struct, frozen=True):
    """At one context: the whole model's tokens per second, and the others' share of it in every round."""

    context_tokens: int
    whole_tokens_per_second: tuple[float, ...]
    chain_ratios: tuple[float, ...]
    no_gather_ratios: tuple[float, ...]
    """Empty where the graph does not run so."""


def make_runners(model_folder: Path, shard_folder: Path, inference_precision: str = "") -> dict[str, Runner]:
    """All that are compared, on one thread."""
    stages = range(len(load_manifest(shard_folder).stages))
    runners = {
        WHOLE: Runner([whole_model_of(model_folder)], 1, inference_precision),
        CHAIN: Runner([chain_model(shard_folder, stage) for stage in stages], 1, inference_precision),
    }
    try:
        shards = [without_gather(chain_model(shard_folder, stage)) for stage in stages]
        bare = Runner(shards, 1, inference_precision)
        bare.step(2)
        bare.step(1)
        runners[NO_GATHER] = bare
    except RuntimeError as error:
        print(f"Without the Gather this model does not run: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
    return runners


def compare(runners: dict[str, Runner], context_tokens: int, rounds: int, steps: int) -> Figures:
    """Takes turns, the order changing from step to step."""
    names = list(runners)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for runner in runners.values():
            runner.restart()
            for start in range(0, context_tokens, CHUNK_TOKENS):
                runner.step(min(CHUNK_TOKENS, context_tokens - start))
            runner.step(1)
        spent_s: dict[str, list[float]] = {name: [] for name in names}
        for step in range(steps):
            for name in names[step % len(names) :] + names[: step % len(names)]:
                start_s = time.perf_counter()
                runners[name].step(1)
                spent_s[name].append(time.perf_counter() - start_s)
        for name in names:
            rates[name].append(1 / statistics.median(spent_s[name]))
    ratios = {
        name: tuple(rate / whole for rate, whole in zip(rates[name], rates[WHOLE], strict=True)) for name in names
    }
    return Figures(context_tokens, tuple(rates[WHOLE]), ratios[CHAIN], ratios.get(NO_GATHER, ()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the ratios at every context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the whole model's IR folder")
    parser.add_argument("shards", type=Path, help="its shard folder")
    parser.add_argument("--contexts", default="64,512,2000", help="tokens before the measured steps")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=16, help="single steps per round")
    parser.add_argument("--inference-precision", choices=["f32", "bf16"], default="", help="the device's by default")
    parser.add_argument("--json", action="store_true", help="one JSON document and nothing else")
    chosen = parser.parse_args(arguments)
    if sys.platform != "darwin":
        process = psutil.Process()
        process.cpu_affinity(process.cpu_affinity()[:1])
    try:
        runners = make_runners(chosen.model, chosen.shards, chosen.inference_precision)
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 1
    contexts = parse_numbers(chosen.contexts, "numbers of tokens", lowest=1)
    figures = [compare(runners, context, chosen.rounds, chosen.steps) for context in contexts]
    if chosen.json:
        print(msgspec.json.encode(figures).decode())
        return 0
    print(f"{'context':>8} {'whole, tokens/s':>16} {'chain / whole':>22} {'no Gather / whole':>22}")
    for one in figures:
        rate = f"{statistics.median(one.whole_tokens_per_second):.1f}"
        print(
            f"{one.context_tokens:>8,} {rate:>16} {_spread(one.chain_ratios):>22} {_spread(one.no_gather_ratios):>22}"
        )
    return 0


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "does not run"
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


if __name__ == "__main__":
    sys.exit(main())
