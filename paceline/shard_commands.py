"""``paceline shard build``, ``inspect`` and ``verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fleet.manifest import KvPrecision
from paceline.command import command, print_json
from paceline.parsing import parse_numbers

if TYPE_CHECKING:
    from fleet.build_messages import BuildProgress
    from shard_builder import Check, Inspection

_MEBIBYTE = 1 << 20

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
PrecisionOption = Annotated[
    Literal["f32", "f16", "bf16", "u8"] | None,
    typer.Option("--kv-precision", metavar="P", help="f32, f16, bf16 or u8; else the manifest's."),
]


def register(app: typer.Typer) -> None:
    """Add the subcommands."""
    shard = typer.Typer(help="Cut a model into shards, look at them, check them.", no_args_is_help=True)
    app.add_typer(shard, name="shard")
    _register_build(shard)
    _register_inspect(shard)
    _register_verify(shard)


def _register_build(shard: typer.Typer) -> None:
    @command(shard, "build")
    def build(
        model: Annotated[Path, typer.Argument(metavar="MODEL", help="An OpenVINO IR folder or a GGUF file.")],
        output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The shard folder to make.")],
        stages: Annotated[
            int | None, typer.Option("--stages", metavar="N", min=1, help="How many stages of about equal size.")
        ] = None,
        cuts: Annotated[
            str | None, typer.Option("--cuts", metavar="A,B", help="First layers of the stages after the first.")
        ] = None,
        kv_precision: Annotated[
            Literal["f32", "f16", "bf16", "u8"],
            typer.Option("--kv-precision", metavar="P", help="KV cache to plan and check with: f32, f16, bf16 or u8."),
        ] = "f16",
        json: JsonOption = False,
    ) -> None:
        """Cut a model into shards and check them against the whole model."""
        if (stages is None) == (cuts is None):
            raise typer.BadParameter("give either --stages or --cuts.")
        numbers = parse_numbers(cuts, "layer numbers", lowest=1) if cuts is not None else None

        from shard_builder import build as build_shards
        from shard_builder.inspection import inspect_manifest

        with _progress() as progress:
            manifest = build_shards(
                model, output, stages=stages, cuts=numbers, kv_precision=kv_precision, progress=progress
            )
        _show_inspection(inspect_manifest(manifest), json)


def _register_inspect(shard: typer.Typer) -> None:
    @command(shard, "inspect")
    def inspect(
        path: Annotated[Path, typer.Argument(metavar="MODEL_OR_DIR", help="A model, or a shard folder.")],
        kv_precision: PrecisionOption = None,
        json: JsonOption = False,
    ) -> None:
        """Show layers, sizes and stages, and what the last check found."""
        from shard_builder import inspect as inspect_path

        _show_inspection(inspect_path(path, kv_precision=kv_precision), json)


def _register_verify(shard: typer.Typer) -> None:
    @command(shard, "verify")
    def verify(
        folder: Annotated[Path, typer.Argument(metavar="DIR", help="A shard folder.")],
        device: Annotated[str, typer.Option("--device", metavar="D", help="The OpenVINO device to check on.")] = "CPU",
        kv_precision: PrecisionOption = None,
        reference: Annotated[
            Path | None,
            typer.Option(
                "--reference",
                metavar="DIR",
                help="The whole model's stored logits (made there if it is a new folder), or the whole model.",
            ),
        ] = None,
        json: JsonOption = False,
    ) -> None:
        """Run the shards against the whole model again."""
        from shard_builder import verify as verify_shards

        with _progress() as progress:
            check = verify_shards(
                folder, device=device, kv_precision=kv_precision, reference=reference, progress=progress
            )
        _show_check(check, json)


@contextmanager
def _progress() -> Iterator[Callable[[BuildProgress], None]]:
    """A progress bar on standard error, gone when it is over."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

    from paceline.build_shards import PHASE_WORDS

    console = Console(stderr=True)
    texts = TextColumn("{task.description}"), TextColumn("{task.fields[bytes]}")
    columns = (SpinnerColumn(), texts[0], BarColumn(), TaskProgressColumn(), texts[1])
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0, bytes="")

        def show(progress: BuildProgress) -> None:
            done = ""
            if progress.bytes_total:
                done = f"{progress.bytes_done / _MEBIBYTE:,.0f} of {progress.bytes_total / _MEBIBYTE:,.0f} MiB"
            bar.update(task, completed=progress.fraction, description=PHASE_WORDS[progress.phase], bytes=done)

        yield show


def _show_inspection(inspection: Inspection, as_json: bool) -> None:
    import msgspec

    if as_json:
        print_json(msgspec.json.encode(inspection))
        return
    from rich.table import Table

    from paceline.terminal import PlainConsole

    console = PlainConsole()
    layers = inspection.layers
    context = f", trained for {inspection.context_tokens:,} tokens" if inspection.context_tokens else ""
    console.print(
        f"{inspection.name}: {inspection.architecture}, {len(layers)} layers, hidden size {inspection.hidden_size:,}, "
        f"vocabulary {inspection.vocabulary_size:,}{context}",
        highlight=False,
    )
    if not inspection.stages:
        table = Table("layer", "MiB", f"KV bytes/token ({inspection.kv_precision})")
        for layer in layers:
            table.add_row(str(layer.index), f"{layer.bytes / _MEBIBYTE:,.1f}", f"{layer.kv_bytes_per_token:,}")
        console.print(table)
        console.print(
            f"Embedding {inspection.embedding_bytes / _MEBIBYTE:,.1f} MiB, head "
            f"{inspection.head_bytes / _MEBIBYTE:,.1f} MiB. Not cut yet.",
            highlight=False,
        )
        return
    table = Table("stage", "layers", "MiB", f"KV bytes/token ({inspection.kv_precision})", "fused attention", "files")
    for stage in inspection.stages:
        kept = sum(layer.kv_bytes_per_token for layer in layers[stage.first_layer : stage.end_layer])
        fused = stage.fused_attention
        table.add_row(
            str(stage.stage),
            f"{stage.first_layer} to {stage.end_layer - 1}",
            f"{stage.bytes / _MEBIBYTE:,.1f}",
            f"{kept:,}",
            f"{fused.fused} of {fused.expected}",
            ", ".join(file.name for file in stage.files),
        )
    console.print(table)
    found = inspection.verification
    if found is not None:
        console.print(_finding(found.max_abs_diff, found.greedy_match, found.device, found.kv_precision))


def _show_check(check: Check, as_json: bool) -> None:
    import msgspec

    if as_json:
        print_json(msgspec.json.encode(check))
        return
    from rich.table import Table

    from paceline.terminal import PlainConsole

    console = PlainConsole()
    table = Table("stage", "fused attention")
    for stage in check.fused_attention:
        table.add_row(str(stage.stage), f"{stage.fused} of {stage.expected}")
    console.print(table)
    console.print(_finding(check.max_abs_diff, check.greedy_match, check.device, check.kv_precision))


def _finding(max_abs_diff: float, greedy_match: float, device: str, kv_precision: KvPrecision) -> str:
    return (
        f"Against the whole model on {device} with a KV cache in {kv_precision}: largest difference of a logit "
        f"{max_abs_diff:.3g}, same greedy token at {greedy_match:.1%} of positions."
    )
