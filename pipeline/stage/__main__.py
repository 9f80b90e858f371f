"""``python -m pipeline.stage``: one stage, run by an agent. See :class:`fleet.process.StageConfig`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from fleet.errors import ModelError
from fleet.process import StageConfig
from pipeline.child import ChildContext, ignore_interrupts, pin_to, run_child
from pipeline.stage.allocation import return_freed_blocks

_log = logging.getLogger(__name__)


def serve(config: StageConfig, context: ChildContext) -> None:
    """Load the shard, say so, and serve until the parent is gone."""
    if config.cpus:
        pin_to(config.cpus)
    return_freed_blocks()
    # Imported here: threads inherit priority and processors from the moment they start, and OpenVINO starts its own.
    from fleet.identity import Identity
    from fleet.sockets import AllowList
    from pipeline.stage.execution import StepExecutor
    from pipeline.stage.machine import StageFacts, StageMachine
    from pipeline.stage.server import StageServer
    from pipeline.stage.shard import DeviceOptions, load_shard

    options = DeviceOptions(
        device=config.device,
        kv_precision=config.kv_precision,
        threads=config.threads,
        inference_precision=config.inference_precision,
        dynamic_quantization_group_size=config.dynamic_quantization_group_size,
    )
    shard = load_shard(
        Path(config.shard_folder),
        config.stage,
        options,
        compiled_folders=(Path(config.compiled_folder),) if config.compiled_folder else (),
        keep_compiled=config.keep_compiled,
    )
    _log.info("stage %d: %s", config.stage, shard.loaded.words)
    executor = StepExecutor(shard, config.device)
    executor.warm_up()
    try:
        identity = Identity.of_secret_key(config.secret_key)
    except ValueError:
        raise ModelError("The key given to this stage is not a CURVE key.") from None
    manifest = shard.manifest
    facts = StageFacts(
        node=config.node_name,
        device=config.device,
        model_id=manifest.model_id,
        stage=config.stage,
        stages=len(manifest.stages),
        first_layer=shard.stage.first_layer,
        end_layer=shard.stage.end_layer,
        input_width=manifest.width_into(config.stage),
        output_width=manifest.width_into(config.stage + 1),
        vocabulary_size=manifest.vocabulary_size,
        context_tokens=manifest.context_tokens,
    )

    def report(fault: str) -> None:
        if fault:
            context.status("degraded", f"Stage {config.stage}: {fault}.", port=server.port, loaded=shard.loaded.words)
        else:
            context.status("ready", port=server.port, loaded=shard.loaded.words)

    server = StageServer(
        StageMachine(facts),
        executor,
        identity,
        AllowList(config.allowed_keys),
        context.stopping,
        bind_address=config.bind_address,
        port=config.port,
        on_device_state=report,
    )
    context.status("ready", port=server.port, loaded=shard.loaded.words)
    server.run()


if __name__ == "__main__":
    ignore_interrupts()
    sys.exit(run_child(StageConfig, serve))
