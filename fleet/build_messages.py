"""How a process asks the shard builder: one JSON line in, JSON lines of progress and one of the outcome back.

``python -m shard_builder`` reads a ``BuildRequest`` from standard input and writes ``BuilderLine`` values to standard
output. Closing its standard input cancels the build; nothing half-written stays behind.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fleet.manifest import Count, KvPrecision, Manifest

BuildPhase = Literal["download", "convert", "compress", "analyse", "write", "verify"]
WeightFormatName = Literal["fp16", "int8", "int4"]
TargetDevice = Literal["CPU", "GPU", "NPU"]
CheckLevel = Literal["full", "sample", "none"]
"""How much of the check against the whole model is run."""


class WeightChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a model's weights are to be stored. Group size and symmetry are those of ``int4``.

    ``fp16`` halves what is f32 and changes nothing else. ``int8`` has one scale per output channel. ``int4`` has one
    per group of ``group_size`` weights of a channel, or with -1 per channel; embeddings and head stay ``int8``.
    """

    format: WeightFormatName
    group_size: Annotated[int, msgspec.Meta(ge=-1, le=1 << 16)] = 128
    symmetric: bool = False
    """Without zero points, as the NPU needs it."""


class BuildRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="build"):
    """Cut ``model`` and put the shard folder at ``output``. Exactly one of ``stages`` and ``cuts`` is given."""

    model: str
    """An OpenVINO IR folder, a GGUF file, a Hugging Face checkpoint folder, or an id on the Hugging Face hub, which may
    name a revision: ``organisation/name@revision``. A path that exists comes before an id."""
    output: str
    stages: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    cuts: tuple[Count, ...] | None = None
    """The first layer of every stage but stage 0."""
    kv_precision: KvPrecision = "f16"
    check: CheckLevel = "full"
    weights: WeightChoice | None = None
    """None: as ``target_device`` suggests, and without one as the model has them (a checkpoint in f16)."""
    target_device: TargetDevice | None = None
    work_folder: str = ""
    """Where converted models are kept for the next build; empty for the place in the data folder."""


class BuildProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="progress"):
    """How far a build is. ``fraction`` (0 to 1) is of the whole build and never falls."""

    phase: BuildPhase
    fraction: float
    bytes_done: int = 0
    """Bytes that have arrived in the phase ``download``, weight bytes written in ``write``; 0 elsewhere."""
    bytes_total: int = 0
    bytes_per_second: float = 0.0
    """Since the phase began; 0 where no bytes are counted or it has just begun."""
    remark: str = ""
    """What the person should know now, such as what a conversion will need; a sentence, told once."""

    @property
    def seconds_left(self) -> float | None:
        """Of the phase, at the rate so far; None where that is not known."""
        if not self.bytes_per_second:
            return None
        return (self.bytes_total - self.bytes_done) / self.bytes_per_second


class BuildDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="done"):
    """The shard folder is complete."""

    output: str
    manifest: Manifest


class BuildFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="failed"):
    """The build ended without a shard folder; ``message`` is one plain sentence."""

    message: str
    cancelled: bool = False


BuilderLine = BuildProgress | BuildDone | BuildFailed
