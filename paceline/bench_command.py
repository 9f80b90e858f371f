"""``paceline bench``: throughput and latency of a pipeline on this PC, each stage on a core of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.command import command, print_json
from paceline.parsing import parse_numbers

_SEED = 20260101
_MOST_USERS = 256


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @command(app, "bench")
    def bench(
        shards: Annotated[
            Path | None, typer.Argument(metavar="DIR", help="A shard folder; without it the bundled small model.")
        ] = None,
        users: Annotated[
            str, typer.Option("--users", metavar="N,N", help="How many chat at once, a run for each number.")
        ] = "1,2,8",
        prompt_tokens: Annotated[
            int, typer.Option("--prompt-tokens", metavar="N", min=1, max=100_000, help="Tokens of each question.")
        ] = 64,
        output_tokens: Annotated[
            int, typer.Option("--output-tokens", metavar="N", min=2, max=100_000, help="Tokens of each answer.")
        ] = 64,
        stages: Annotated[
            int,
            typer.Option("--stages", metavar="N", min=1, max=64, help="Into how many stages the bundled model is cut."),
        ] = 2,
        kv_precision: Annotated[
            Literal["f32", "f16", "bf16", "u8"],
            typer.Option("--kv-precision", metavar="P", help="f32, f16, bf16 or u8."),
        ] = "f16",
        rounds: Annotated[
            int,
            typer.Option(
                "--rounds", metavar="N", min=1, max=1000, help="How often each run is made; the median is told."
            ),
        ] = 5,
        json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    ) -> None:
        """Measure tokens per second, time to first token and time between tokens."""
        from paceline.bench import BenchPlan, run_bench
        from paceline.temporary import temporary_folder

        plan = BenchPlan(
            users=parse_numbers(users, "users", 1, _MOST_USERS),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            kv_precision=kv_precision,
            rounds=rounds,
            seed=_SEED,
        )
        with temporary_folder() as folder:
            report = run_bench(shards if shards is not None else _bundled(folder, stages), plan)
        if json:
            import msgspec

            print_json(msgspec.json.encode(report))
        else:
            _show(report)


def _bundled(folder: Path, stages: int) -> Path:
    from paceline.build_shards import build_shards
    from paceline.small_model import small_model_path

    build_shards(small_model_path(), folder / "shards", stages=stages)
    return folder / "shards"


def _show(report: Any) -> None:
    from rich.table import Table

    from paceline.terminal import PlainConsole

    table = Table(title=f"{report.model}, {report.stages} stages, KV {report.kv_precision}")
    for title in (
        "users",
        "tokens/s (median)",
        "lowest to highest",
        "first token p50 / p95",
        "between tokens p50 / p95",
    ):
        table.add_column(title, justify="right")
    for run in report.runs:
        first, between = run.time_to_first_token_s, run.inter_token_s
        table.add_row(
            str(run.users),
            f"{run.tokens_per_second:.1f}",
            f"{run.tokens_per_second_lowest:.1f} to {run.tokens_per_second_highest:.1f}",
            f"{first.p50 * 1000:.0f} / {first.p95 * 1000:.0f} ms",
            f"{between.p50 * 1000:.1f} / {between.p95 * 1000:.1f} ms",
        )
    PlainConsole().print(table)
