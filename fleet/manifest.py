"""The manifest: what a model is made of, how it was cut, and what the check of the cut found.

Transfer and placement rest on it. The weights of a stage are a concatenation of *runs*. A run holds the constants that
have the same set of readers in the whole model (one layer; the embedding; the head; several of them together), so
that the bytes of a layer are the same wherever the model is cut, and a node that holds a run never fetches it again.
The graph of a stage is a small file of its own, and the few constants that the cut itself brought in are the stage's
``cut`` run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NewType

import msgspec

from fleet.errors import ModelError

MANIFEST_NAME = "manifest.json"
MANIFEST_VERSION = 1
RUN_ALIGNMENT_BYTES = 4096
"""Every run starts at a multiple of this in the stage's weight file."""

_WINDOWS_DEVICES = {"con", "prn", "aux", "nul"} | {f"{device}{n}" for device in ("com", "lpt") for n in range(10)}

Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*\Z", max_length=120)]
ModelId = NewType("ModelId", str)
KvPrecision = Literal["f32", "f16", "bf16", "u8"]
RunKind = Literal["layer", "embedding", "head", "shared", "cut"]
Part = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
RollbackKind = Literal["mask", "trim"]
NpuSlots = Literal["any", "adjacent"]
FusionPlugin = Literal["CPU", "GPU"]
Text = Annotated[str, msgspec.Meta(max_length=2000)]


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the shard folder, named without any folder."""

    name: FileName
    bytes: Bytes
    sha256: Sha256


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of constants. ``layer`` is set for kind ``layer``; ``bytes`` includes the padding inside the run."""

    sha256: Sha256
    bytes: Bytes
    kind: RunKind
    layer: Count | None = None
    parts: tuple[Part, ...] = ()
    """Who reads it: -1 the embedding, k layer k, the number of layers the head. Empty for kind ``cut``."""
    anonymous_bytes: tuple[Bytes, ...] = ()
    """Per part: what OpenVINO's CPU plugin keeps of the run in memory of its own, the mapped file apart."""


class RunPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run lies in a stage's weight file."""

    sha256: Sha256
    offset: Bytes


class NpuForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Graphs of static shape that an NPU can take, and what their check on a CPU found. Never run on an NPU."""

    context_tokens: Count
    """Slots of every cache; the caches are inputs and outputs that the host keeps."""
    chunk_tokens: Count
    slots: NpuSlots
    """``any``: a token may lie in any slot that the mask marks. ``adjacent``: the tokens must fill the last slots, the
    newest last, because the model counts distances by slots (a sliding window, a bias by distance)."""
    max_abs_diff: float
    """Largest absolute difference of any logit from the dynamic shards', in f32."""
    logit_range: float
    """Largest distance between two logits of one position; the difference is in proportion to it."""
    greedy_match: float
    """Share of the compared positions (0 to 1) whose largest logit is the same token."""


class WeightFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many bytes of the model's constants have an element type, as OpenVINO names it (``u4``, ``f16``)."""

    element_type: Text
    bytes: Bytes


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decoder layer: its weight bytes and what one token of one sequence adds to its KV cache.

    ``kv_elements_per_token`` counts numbers, K and V together, so that the bytes follow from any KV precision.
    """

    index: Count
    bytes: Bytes
    kv_elements_per_token: Count
    kv_bytes_per_token: Bytes
    """At the manifest's own ``kv_precision``."""
    borrowed_caches: tuple[Count, ...] = ()
    """Earlier layers whose caches it reads too; a stage that begins behind one of them holds a copy of its cache."""
    weight_formats: tuple[WeightFormat, ...] = ()


class CutTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that crosses a cut, as part of the hidden states: ``width`` numbers per token."""

    name: Text
    """What the whole model's graph calls it."""
    width: Count
    element_type: Text
    """In the whole model; it crosses as f32."""


class FusionFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule of a device plugin's attention fusion that a node of the shard's graph breaks."""

    rule: Text
    node: Text
    reason: Text
    plugins: tuple[FusionPlugin, ...] = ("CPU", "GPU")
    """Whose rule it is."""


class NpuGraphs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage's graphs of static shape, over the stage's own weight file."""

    chunk: FileEntry
    """For ``NpuForm.chunk_tokens`` new tokens."""
    step: FileEntry
    """For one new token."""


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One shard: layers ``first_layer`` to ``end_layer`` (exclusive)."""

    stage: Count
    first_layer: Count
    end_layer: Count
    bytes: Bytes
    """Bytes of the weight file."""
    graph: FileEntry
    weights: FileEntry
    runs: tuple[RunPlace, ...]
    inputs: tuple[str, ...]
    """Names of the graph's inputs; the first stage reads ``input_ids``, a later one ``inputs_embeds``."""
    fused_attention: Count = 0
    """Fused attention nodes that the CPU plugin made of this shard when it was checked."""
    expected_attention: Count = 0
    cut_tensors: tuple[CutTensor, ...] = ()
    """What enters side by side as ``inputs_embeds``, in this order; empty for the first stage."""
    fusion_faults: tuple[FusionFault, ...] = ()
    """Where the graph breaks the pattern that the plugins fuse; empty for a shard that fuses as a whole."""
    npu: NpuGraphs | None = None

    @property
    def input_width(self) -> int:
        """Numbers per token that enter as hidden states; 0 for the first stage."""
        return sum(tensor.width for tensor in self.cut_tensors)


class CaseResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case of a check: what was run and the largest absolute difference of any logit."""

    case: Text
    max_abs_diff: float


class LeftOutCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A case that could not be run, and why."""

    case: Text
    reason: Text


class RollbackResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run with rejected tokens, taken back in one way, against the whole model that never saw them.

    The two differ by the order of sums even where nothing is wrong, in proportion to ``logit_range``, the largest
    distance between two logits of one position.
    """

    kind: RollbackKind
    max_abs_diff: float
    logit_range: float


class PagedForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the shards may be served with paged attention, and what the check of that found."""

    served: bool
    max_abs_diff: float | None = None
    """Against the whole model in f32; None where it did not run."""
    reason: Text = ""
    """Why it may not be served so."""


class Verification(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What running the shards in a chain against the whole model found, in f32."""

    max_abs_diff: float
    """Largest absolute difference of any logit."""
    greedy_match: float
    """Share of positions (0 to 1) whose largest logit is the same token."""
    device: str
    kv_precision: KvPrecision
    openvino_version: str
    cases: tuple[CaseResult, ...] = ()
    sampled: bool = False
    """Whether only a part of the cases was run, to bound the time."""
    rollback: tuple[RollbackResult, ...] = ()
    """Every way of taking tokens back that could be run, whether it may be used or not."""
    left_out: tuple[LeftOutCase, ...] = ()
    """What the model or the device could not run."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model cut into stages. ``model_id`` depends on the graph, weights and tokenizer, not on the cut."""

    manifest_version: Literal[1]
    model_id: str
    name: str
    architecture: str
    hidden_size: Count
    vocabulary_size: Count
    context_tokens: Count
    """Longest context that the model was trained for; 0 where the model does not say."""
    kv_precision: KvPrecision
    layers: tuple[Layer, ...]
    runs: tuple[Run, ...]
    stages: tuple[Stage, ...]
    tokenizer: tuple[FileEntry, ...]
    """Tokenizer, detokenizer, configuration and licence files, which the gateway needs."""
    stop_token_ids: tuple[Count, ...]
    verification: Verification | None = None
    notes: tuple[str, ...] = ()
    rollback: tuple[RollbackKind, ...] = ()
    """How rejected tokens may be taken back from stateful shards; found by running it."""
    sliding_window: Count = 0
    """Tokens of the widest window that a layer looks through, if it is narrower than the context; 0: no such layer."""
    step_switch_tokens: Count = 0
    """Where not 0, a step that reaches beyond so many tokens of a sequence is computed with other rotary frequencies,
    so the first step of a longer prompt must."""
    paged: PagedForm | None = None
    """None where it was not tried."""
    npu: NpuForm | None = None
    """None where no graphs for an NPU were made."""
    weight_formats: tuple[WeightFormat, ...] = ()
    step_bytes_per_token: Bytes = 0
    """Memory that a step takes for each of its tokens while it runs, in a stage of any number of layers."""
    has_chat_template: bool = True

    def width_into(self, stage: int) -> int:
        """Numbers per token of the hidden states that enter a stage; 0 for the first stage and behind the last."""
        if not 0 < stage < len(self.stages):
            return 0
        return self.stages[stage].input_width or self.hidden_size

    @property
    def widest_cut(self) -> int:
        """Most numbers per token that enter any stage."""
        return max((self.width_into(stage.stage) for stage in self.stages), default=0)

    def run(self, sha256: str) -> Run:
        """The run of that hash; KeyError where the model has none."""
        for run in self.runs:
            if run.sha256 == sha256:
                return run
        raise KeyError(sha256)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files of the shard folder but the manifest."""
        found = [*self.tokenizer]
        for stage in self.stages:
            found += [stage.graph, stage.weights]
            if stage.npu is not None:
                found += [stage.npu.chunk, stage.npu.step]
        return tuple(found)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first layer of every stage but stage 0."""
        return tuple(stage.first_layer for stage in self.stages[1:])


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(text: bytes, where: str = "manifest") -> Manifest:
    """The checked manifest.

    Raises:
        ModelError: not a manifest, of another version, or inconsistent in itself.
    """
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{where} is not a shard manifest that this version reads: {error}.") from None
    _check_file_names(manifest, where)
    fault = _fault(manifest)
    if fault:
        raise ModelError(f"{where}: {fault}; build the shards again.")
    known = {run.sha256: run for run in manifest.runs}
    if any(run.bytes != known[run.sha256].bytes for run in manifest.runs):
        raise ModelError(f"{where}: a run is listed twice with two sizes; build the shards again.")
    expected_first = 0
    for index, stage in enumerate(manifest.stages):
        if stage.stage != index or stage.first_layer != expected_first or stage.end_layer < stage.first_layer:
            raise ModelError(f"{where}: the stages do not follow each other at stage {index}; build the shards again.")
        expected_first = stage.end_layer
        if stage.bytes != stage.weights.bytes:
            raise ModelError(f"{where}: stage {index} gives two sizes of its weight file; build the shards again.")
        end = 0
        for place in stage.runs:
            if place.sha256 not in known:
                raise ModelError(f"{where}: stage {index} names a run that the manifest lacks; build the shards again.")
            if place.offset < end or place.offset % RUN_ALIGNMENT_BYTES:
                raise ModelError(f"{where}: the runs of stage {index} overlap; build the shards again.")
            end = place.offset + known[place.sha256].bytes
        if end > stage.weights.bytes:
            raise ModelError(f"{where}: the runs of stage {index} exceed its weight file; build the shards again.")
    if expected_first != len(manifest.layers):
        raise ModelError(f"{where}: the stages do not cover all {len(manifest.layers)} layers; build the shards again.")
    return manifest


def _fault(manifest: Manifest) -> str:
    """What does not hold together in the model that the manifest describes; empty where all does."""
    layers = len(manifest.layers)
    if not layers or not manifest.stages:
        return "there are no layers or no stages"
    if not manifest.vocabulary_size:
        return "the vocabulary_size is 0"
    for index, layer in enumerate(manifest.layers):
        if layer.index != index:
            return f"the layers are not in order at layer {index}"
        if any(owner >= index for owner in layer.borrowed_caches):
            return f"the borrowed_caches of layer {index} are not those of earlier layers"
    for run in manifest.runs:
        if any(part > layers for part in run.parts) or (run.layer or 0) >= layers:
            return f"a run is of a layer that the model of {layers} layers does not have"
        if run.anonymous_bytes and len(run.anonymous_bytes) != len(run.parts):
            return "the anonymous_bytes of a run are not one for each of its parts"
    for formats in (manifest.weight_formats, *(layer.weight_formats for layer in manifest.layers)):
        if formats and not any(entry.bytes for entry in formats):
            return "the weight_formats have no bytes"
    if any(not tensor.width for stage in manifest.stages for tensor in stage.cut_tensors):
        return "the width of a cut tensor is 0"
    return ""


def _check_file_names(manifest: Manifest, where: str) -> None:
    """Every file can lie beside the others on any system: Windows reserves some names and ignores case."""
    seen = {MANIFEST_NAME}
    for entry in manifest.files:
        folded = entry.name.lower()
        if folded in seen or folded.endswith(".") or folded.partition(".")[0] in _WINDOWS_DEVICES:
            raise ModelError(
                f"{where}: the file name {entry.name} is used twice or not allowed; build the shards again."
            )
        seen.add(folded)


def load_manifest(folder: Path) -> Manifest:
    """The manifest of a shard folder.

    Raises:
        ModelError: the folder holds none, or it cannot be read.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(
            f"{folder} is not a shard folder: it has no {MANIFEST_NAME}. Make one with 'paceline shard build'."
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    return decode_manifest(text, str(path))
