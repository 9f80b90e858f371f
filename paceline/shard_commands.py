"""``paceline shard``: its subcommands are here and in modules of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fleet.errors import ModelError
from paceline import shard_compile_command, shard_diff_command, shard_formats_command, shard_npu_command
from paceline.command import command
from paceline.parsing import parse_numbers
from paceline.shard_formats_command import (
    DeviceOption,
    GroupSizeOption,
    SymmetricOption,
    WeightFormatOption,
    weight_choice,
)

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
    shard_compile_command.register(shard)
    shard_diff_command.register(shard)
    shard_formats_command.register(shard)
    shard_npu_command.register(shard)


def _register_build(shard: typer.Typer) -> None:
    @command(shard, "build")
    def build(
        model: Annotated[
            str,
            typer.Argument(
                metavar="MODEL", help="An OpenVINO IR or checkpoint folder, a GGUF file, or a hub's organisation/name."
            ),
        ],
        output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The shard folder to make.")],
        stages: Annotated[
            int | None,
            typer.Option("--stages", metavar="N", min=1, help="How many stages; the layers are shared out evenly."),
        ] = None,
        cuts: Annotated[
            str | None, typer.Option("--cuts", metavar="A,B", help="First layers of the stages after the first.")
        ] = None,
        kv_precision: Annotated[
            Literal["f32", "f16", "bf16", "u8"],
            typer.Option("--kv-precision", metavar="P", help="KV cache to plan and check with: f32, f16, bf16 or u8."),
        ] = "f16",
        weight_format: WeightFormatOption = None,
        group_size: GroupSizeOption = None,
        symmetric: SymmetricOption = False,
        target_device: DeviceOption = None,
        check: Annotated[
            Literal["full", "sample", "none"],
            typer.Option("--check", metavar="HOW", help="Against the whole model: full, sample (some cases) or none."),
        ] = "full",
        sample: Annotated[bool, typer.Option("--sample", help="The same as --check sample.")] = False,
        json: JsonOption = False,
    ) -> None:
        """Cut a model into shards and check them against the whole model."""
        if (stages is None) == (cuts is None):
            raise typer.BadParameter("give either --stages or --cuts.")
        if sample and check == "none":
            raise typer.BadParameter("--sample checks a part; leave out --check none.")
        numbers = parse_numbers(cuts, "layer numbers", lowest=1) if cuts is not None else None
        weights = weight_choice(weight_format, group_size, symmetric, target_device)

        from paceline.build_bar import build_bar
        from paceline.shard_tables import show_inspection, show_next_step
        from shard_builder import build as build_shards
        from shard_builder.inspection import inspect_manifest

        with build_bar() as progress:
            manifest = build_shards(
                model,
                output,
                stages=stages,
                cuts=numbers,
                kv_precision=kv_precision,
                check="sample" if sample else check,
                progress=progress,
                weights=weights,
                target_device=target_device,
            )
        show_inspection(inspect_manifest(manifest), json)
        if not json:
            show_next_step(output)


def _register_inspect(shard: typer.Typer) -> None:
    @command(shard, "inspect")
    def inspect(
        path: Annotated[str, typer.Argument(metavar="MODEL_OR_DIR", help="A model, or a shard folder.")],
        kv_precision: PrecisionOption = None,
        every_layer: Annotated[
            bool, typer.Option("--layers", help="A row for every layer, also where they look alike.")
        ] = False,
        json: JsonOption = False,
    ) -> None:
        """Show layers, sizes and stages, and what the last check found."""
        from paceline.shard_tables import show_inspection
        from paceline.unchecked import tell_if_unchecked
        from shard_builder import inspect as inspect_path

        inspection = inspect_path(path, kv_precision=kv_precision)
        tell_if_unchecked(Path(path), inspection)
        show_inspection(inspection, json, every_layer)


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
                help="A folder of stored logits of the whole model (filled if it is new), or the whole model.",
            ),
        ] = None,
        sample: Annotated[
            bool, typer.Option("--sample", help="Run only some of the cases, to bound the time.")
        ] = False,
        json: JsonOption = False,
    ) -> None:
        """Run the shards against the whole model again."""
        from paceline.build_bar import build_bar
        from paceline.shard_tables import show_check
        from shard_builder import verify as verify_shards

        with build_bar() as progress:
            check = verify_shards(
                folder,
                device=device,
                kv_precision=kv_precision,
                reference=reference,
                sample=sample,
                progress=progress,
            )
        show_check(check, json)
        if check.is_wrong:
            worst = max(check.cases, key=lambda case: case.max_abs_diff)
            raise ModelError(
                f"The shards in {folder} give other logits than the whole model (largest difference "
                f"{worst.max_abs_diff:.3g}, in the case '{worst.case}'); build them again."
            )
