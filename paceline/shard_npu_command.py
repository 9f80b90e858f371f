"""``paceline shard npu``: adds graphs of static shape to a shard folder, for an NPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.command import command, print_json


def register(shard: typer.Typer) -> None:
    """Add the subcommand."""

    @command(shard, "npu")
    def npu(
        folder: Annotated[Path, typer.Argument(metavar="DIR", help="A shard folder.")],
        context: Annotated[
            int | None,
            typer.Option(
                "--context",
                metavar="N",
                min=1,
                max=1 << 20,
                help="Tokens that the caches have room for; by default 1,024, or the model's own context if less.",
            ),
        ] = None,
        chunk: Annotated[
            int | None,
            typer.Option(
                "--chunk",
                metavar="N",
                min=1,
                max=1 << 16,
                help="Tokens of a prompt taken at a time; by default 128, or half of a smaller context.",
            ),
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
    ) -> None:
        """Add graphs of static shape for an NPU, and check them on the CPU."""
        import msgspec

        from paceline.build_bar import build_bar
        from paceline.terminal import printable
        from shard_builder import prepare_npu

        with build_bar() as progress:
            manifest = prepare_npu(folder, context_tokens=context, chunk_tokens=chunk, progress=progress)
        form = manifest.npu
        assert form is not None
        if json:
            stages = [{"stage": stage.stage, "graphs": stage.npu} for stage in manifest.stages]
            print_json(msgspec.json.encode({**msgspec.to_builtins(form), "stages": stages}))
            return
        lines = [
            f"stage {stage.stage}: {stage.npu.chunk.name}, {stage.npu.step.name}"
            for stage in manifest.stages
            if stage.npu is not None
        ]
        lines.append(
            f"Against the shards on this PC's CPU in f32: largest difference of a logit {form.max_abs_diff:.3g} in a "
            f"range of {form.logit_range:.3g}, same greedy token at {form.greedy_match:.1%} of positions. "
            "Not run on an NPU."
        )
        print(printable("\n".join(lines)))  # noqa: T201
