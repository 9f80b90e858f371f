"""``python -m pipeline.stage.compile``: compiles one stage beforehand. See :class:`fleet.process.CompileConfig`."""

from __future__ import annotations

import sys
from pathlib import Path

from fleet.errors import ModelError
from fleet.process import CompileConfig
from pipeline.child import ChildContext, ignore_interrupts, run_child


def compile_stage(config: CompileConfig, context: ChildContext) -> None:
    """Compile the stage and keep its blob in the shard folder, unless a blob of use is there."""
    from fleet.compiled_shards import COMPILED_FOLDER, locked_for_compiling
    from pipeline.stage import compilation
    from pipeline.stage.shard import DeviceOptions, load_shard, stage_of

    folder = Path(config.shard_folder)
    stage_of(folder, config.stage)
    options = DeviceOptions(device=config.device, kv_precision=config.kv_precision)
    with locked_for_compiling(folder / COMPILED_FOLDER):
        shard = load_shard(folder, config.stage, options, keep_compiled=True)
    if shard.loaded.why_not_kept:
        raise ModelError(
            f"Stage {config.stage} compiles for {config.device}, but its blob is not kept: {shard.loaded.why_not_kept}."
        )
    key = compilation.made_from(shard.stage, config.device, options.properties()).key
    match shard.loaded.why_compiled:
        case "":
            words = "compiled already"
        case compilation.NO_BLOB:
            words = "compiled"
        case why:
            words = f"compiled anew: {why}"
    context.status("ready", key, loaded=words)


if __name__ == "__main__":
    ignore_interrupts()
    sys.exit(run_child(CompileConfig, compile_stage))
