"""``python -m pipeline.gateway``: the gateway of a model, run by an agent. See :class:`fleet.process.GatewayConfig`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from fleet.errors import ModelError
from fleet.process import GatewayConfig
from pipeline.child import ChildContext, ignore_interrupts, run_child

CONTEXT_TOKENS_GUESS = 4096
"""For models that do not say how long a context they were trained for."""
SWITCH_INTERVAL_S = 0.0005
"""The HTTP thread must not keep the data thread waiting for the interpreter's lock for the usual 5 ms."""

_log = logging.getLogger(__name__)


def serve(config: GatewayConfig, context: ChildContext) -> None:
    """Connect the stages and serve until the parent is gone."""
    # Imported here: threads inherit the priority from the moment they start, and OpenVINO starts its own.
    from fleet.identity import Identity
    from fleet.manifest import load_manifest
    from fleet.sockets import AllowList
    from pipeline.gateway.http_server import HttpServer, listen
    from pipeline.gateway.scheduler import SchedulerLimits
    from pipeline.gateway.service import Gateway, State
    from pipeline.gateway.tokenizer import ModelTokenizer

    folder = Path(config.shard_folder)
    manifest = load_manifest(folder)
    if len(config.stages) != len(manifest.stages):
        raise ModelError(
            f"The gateway was given {len(config.stages)} stages, but {manifest.name} is cut into "
            f"{len(manifest.stages)}; deploy it again."
        )
    try:
        identity = Identity.of_secret_key(config.secret_key)
    except ValueError:
        raise ModelError("The key given to this gateway is not a CURVE key.") from None
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    trained_tokens = manifest.context_tokens or CONTEXT_TOKENS_GUESS
    context_tokens = min(config.context_tokens or trained_tokens, trained_tokens)
    most_step_tokens = _most_step_tokens(manifest.widest_cut)
    prefill_chunk_tokens = min(config.prefill_chunk_tokens, most_step_tokens)
    switch = manifest.step_switch_tokens
    if switch and switch + prefill_chunk_tokens >= most_step_tokens:
        # The first step of a longer prompt, with chunks of others beside it, would not fit a message.
        context_tokens = min(context_tokens, switch)
    tokenizer = ModelTokenizer(folder, context_tokens)
    limits = SchedulerLimits(
        stages=len(manifest.stages),
        context_tokens=min(context_tokens, tokenizer.longest_prompt_tokens),
        max_sequences=config.max_sequences,
        prefill_chunk_tokens=prefill_chunk_tokens,
        step_switch_tokens=switch,
        kv_capacity_tokens=config.kv_capacity_tokens or None,
    )
    http_identity = Identity.generate()
    http_socket = listen(config.http_port)
    http_port = http_socket.getsockname()[1]

    def say(state: State, detail: str) -> None:
        _log.info("%s %s", state, detail)
        context.status(state, detail, port=gateway.port, http_port=http_port)

    try:
        gateway = Gateway(
            manifest,
            tokenizer,
            limits,
            config.stages,
            identity,
            AllowList((*config.allowed_keys, http_identity.public_key)),
            context.stopping,
            kv_precision=config.kv_precision,
            bind_address=config.bind_address,
            port=config.port,
            on_state=say,
        )

        def fail(reason: str) -> None:
            context.status("failed", reason)
            context.stop()

        with HttpServer(http_socket, http_identity, gateway.address, folder, fail):
            gateway.run()
    finally:
        http_socket.close()


def _most_step_tokens(width: int) -> int:
    """Tokens whose hidden states fit a message."""
    from fleet.codec import MAX_TENSOR_BYTES
    from pipeline.messages import MAX_STEP_TOKENS

    return min(MAX_STEP_TOKENS, MAX_TENSOR_BYTES // (4 * max(1, width)))


if __name__ == "__main__":
    ignore_interrupts()
    sys.exit(run_child(GatewayConfig, serve))
