"""How an agent and its child processes talk: a configuration on standard input, status lines on standard output.

The parent writes one JSON line and keeps the pipe open; a child that reads end-of-file knows that its parent is gone
and ends. The child writes one JSON line per change of state to standard output; its log goes to standard error.
The parent stops a child by closing the pipe. This works the same on Linux and Windows.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fleet.control_messages import LongText
from fleet.manifest import KvPrecision
from fleet.node import PeerAddress, Port, PublicKey


class StageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``python -m pipeline.stage`` reads."""

    node_name: str
    shard_folder: str
    """Folder with the manifest and the stage's graph and weight files."""
    stage: int
    device: str
    kv_precision: KvPrecision
    secret_key: str
    """The node's CURVE secret key, Z85; only ever sent through this pipe."""
    public_key: PublicKey
    allowed_keys: tuple[PublicKey, ...]
    bind_address: str = "0.0.0.0"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0 takes a free one; a restarted stage is given the port it had."""
    threads: int = 0
    cpus: tuple[int, ...] = ()
    inference_precision: Literal["", "f32"] = ""
    """Empty: the device's own choice."""
    dynamic_quantization_group_size: int | None = None
    """None: the device's own choice; 0: off, for comparisons that must be exact."""
    compiled_folder: str = ""
    """Where compiled shards may lie besides the shard folder; empty: nowhere."""
    keep_compiled: bool = False
    """Whether a shard that had to be compiled is kept in the shard folder, to be imported at the next start."""
    low_priority: bool = True


class CompileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``python -m pipeline.stage.compile`` reads.

    Its last status is ``ready``: ``detail`` names the blob's folder among the compiled shards, ``loaded`` says whether
    it was there.
    """

    shard_folder: str
    stage: int
    device: str
    kv_precision: KvPrecision
    low_priority: bool = False


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ``python -m pipeline.gateway`` reads."""

    node_name: str
    shard_folder: str
    """Folder with the manifest and the tokenizer files; no weights are needed."""
    stages: tuple[PeerAddress, ...]
    kv_precision: KvPrecision
    secret_key: str
    public_key: PublicKey
    allowed_keys: tuple[PublicKey, ...]
    bind_address: str = "0.0.0.0"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    http_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    max_sequences: int = 32
    """Requests beyond this many wait."""
    prefill_chunk_tokens: int = 256
    context_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """Longest prompt and answer together; 0: the model's own context."""
    kv_capacity_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 0
    """Tokens that all sequences together may hold on the stages; 0: ``max_sequences`` is limit enough."""
    low_priority: bool = True


class ChildStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of a child's standard output."""

    state: Literal["starting", "ready", "degraded", "failed"]
    detail: LongText = ""
    port: Port | None = None
    http_port: Port | None = None
    loaded: LongText = ""
    """A stage: whether it was imported or compiled here, and then why."""
