"""``paceline shard formats``: what a model's weights would take in each format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.command import command, print_json

if TYPE_CHECKING:
    from fleet.build_messages import WeightChoice

_MEBIBYTE = 1 << 20

WeightFormatOption = Annotated[
    Literal["fp16", "int8", "int4"] | None,
    typer.Option("--weight-format", metavar="F", help="Keep weights in fp16, int8 or int4; else as they are."),
]
GroupSizeOption = Annotated[
    int | None,
    typer.Option("--group-size", metavar="N", help="Weights per int4 scale, 32 to 1024; -1: one per channel.", min=-1),
]
SymmetricOption = Annotated[bool, typer.Option("--symmetric", help="int4 without zero points, as the NPU needs it.")]
DeviceOption = Annotated[
    Literal["CPU", "GPU", "NPU"] | None,
    typer.Option("--for", metavar="DEVICE", help="Store weights as it suits CPU, GPU or NPU."),
]


def weight_choice(
    weight_format: Literal["fp16", "int8", "int4"] | None, group_size: int | None, symmetric: bool, device: str | None
) -> WeightChoice | None:
    """The choice that the options make.

    Raises:
        BadParameter: they contradict each other.
    """
    from fleet.build_messages import WeightChoice

    if weight_format is not None and device is not None:
        raise typer.BadParameter("give either --weight-format or --for.")
    if weight_format != "int4" and (group_size is not None or symmetric):
        raise typer.BadParameter("--group-size and --symmetric belong to --weight-format int4.")
    if group_size is not None and group_size != -1 and not 32 <= group_size <= 1024:
        raise typer.BadParameter("--group-size must be -1 or lie between 32 and 1024.")
    if weight_format is None:
        return None
    return WeightChoice(weight_format, group_size=128 if group_size is None else group_size, symmetric=symmetric)


def register(shard: typer.Typer) -> None:
    """Add the subcommand."""

    @command(shard, "formats")
    def formats(
        model: Annotated[
            Path, typer.Argument(metavar="MODEL", help="An OpenVINO IR or checkpoint folder, or a GGUF file.")
        ],
        json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    ) -> None:
        """Show what a model's weights take in each format, before any is made."""
        import msgspec

        from shard_builder.sources.formats import list_formats

        found = list_formats(model)
        if json:
            print_json(msgspec.json.encode(found))
            return
        from rich.table import Table

        from paceline.terminal import PlainConsole

        console = PlainConsole()
        console.print(f"{found.name}: {found.parameters:,} parameters", highlight=False)
        table = Table("weights", "MiB", "suggested for")
        for cost in found.formats:
            table.add_row(cost.words, f"{cost.bytes / _MEBIBYTE:,.1f}", ", ".join(cost.suggested_for))
        console.print(table)
        if found.is_compressed:
            console.print("The weights are compressed already and stay as they are.", highlight=False)
