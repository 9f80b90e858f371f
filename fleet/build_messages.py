"""How a process asks the shard builder: one JSON line in, JSON lines of progress and one of the outcome back.

``python -m shard_builder`` reads a ``BuildRequest`` from standard input and writes ``BuilderLine`` values to standard
output. Closing its standard input cancels the build; nothing half-written stays behind.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fleet.manifest import Count, KvPrecision, Manifest

BuildPhase = Literal["convert", "analyse", "write", "verify"]


class BuildRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="build"):
    """Cut ``model`` and put the shard folder at ``output``. Exactly one of ``stages`` and ``cuts`` is given."""

    model: str
    """An OpenVINO IR folder or a GGUF file."""
    output: str
    stages: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    cuts: tuple[Count, ...] | None = None
    """The first layer of every stage but stage 0."""
    kv_precision: KvPrecision = "f16"
    work_folder: str = ""
    """Where converted models are kept for the next build; empty for the place in the data folder."""


class BuildProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="progress"):
    """How far a build is. ``fraction`` (0 to 1) is of the whole build and never falls."""

    phase: BuildPhase
    fraction: float
    bytes_done: int = 0
    """Weight bytes written so far, in the phase ``write``; 0 elsewhere."""
    bytes_total: int = 0


class BuildDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="done"):
    """The shard folder is complete."""

    output: str
    manifest: Manifest


class BuildFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="failed"):
    """The build ended without a shard folder; ``message`` is one plain sentence."""

    message: str
    cancelled: bool = False


BuilderLine = BuildProgress | BuildDone | BuildFailed
