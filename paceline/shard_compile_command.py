"""``paceline shard compile``: compiles shards for a device of this PC before they are served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.command import command, print_json

_MEBIBYTE = 1 << 20


def register(shard: typer.Typer) -> None:
    """Add the subcommand."""

    @command(shard, "compile")
    def compile_(
        folder: Annotated[Path, typer.Argument(metavar="DIR", help="A shard folder.")],
        device: Annotated[
            str, typer.Option("--device", metavar="D", help="The OpenVINO device of this PC, such as CPU or GPU.")
        ],
        stage: Annotated[
            int | None, typer.Option("--stage", metavar="N", min=0, help="One stage; by default all of them.")
        ] = None,
        kv_precision: Annotated[
            Literal["f32", "f16", "bf16", "u8"] | None,
            typer.Option("--kv-precision", metavar="P", help="f32, f16, bf16 or u8; else the manifest's."),
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    ) -> None:
        """Compile shards for a device of this PC, so that serving them need not."""
        import msgspec

        from fleet.errors import ModelError
        from fleet.manifest import load_manifest
        from paceline.compile_shards import compile_shards
        from paceline.local_fleet import tell_on_stderr
        from paceline.terminal import printable

        manifest = load_manifest(folder)
        if stage is not None and stage >= len(manifest.stages):
            raise ModelError(f"{folder} holds {len(manifest.stages)} stages; there is no stage {stage}.")
        numbers = range(len(manifest.stages)) if stage is None else (stage,)
        done = compile_shards(
            folder,
            numbers,
            device,
            kv_precision or manifest.kv_precision,
            lambda number: tell_on_stderr(f"compiling stage {number} of {len(manifest.stages)} for {device}"),
        )
        if json:
            print_json(msgspec.json.encode({"stages": done}))
            return
        for one in done:
            text = (
                f"stage {one.stage}: {one.outcome}; {one.record.blob.bytes / _MEBIBYTE:,.1f} MiB in {one.folder}, "
                f"{one.seconds:.1f} s"
            )
            print(printable(text))  # noqa: T201
        print(printable(f"They are imported where this string is the same: {done[0].record.runtime_requirements}"))  # noqa: T201
