"""What a stage needs of its node's memory, from the manifest, before anything is cut or started.

A stage process maps its weight file and keeps in memory of its own ("anonymous", which no file could give again):

- what the device plugin makes of the weights (``Run.anonymous_bytes``, from the model's graph);
- the KV cache, and what its attention kernels make of one sequence's cache in a step of several tokens: as much again;
- the results of a step, by its tokens (``Manifest.step_bytes_per_token``);
- the process itself.

Pages of the mapped file may be given back at any time and are read only once, so a plan does not count them; what is
shown to people has them apart. The figures are those of OpenVINO 2026.4's CPU plugin; ``benchmarks/shard_memory.py``
compares them with running stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from fleet.manifest import KvPrecision, Manifest, Run, Stage

EMBEDDING_PART = -1
"""In ``Run.parts``; layer k is k, and the head the number of layers."""
PROCESS_BYTES = 66_000_000
"""Interpreter, OpenVINO, the compiled graph and its kernels; measured 45 to 72 MB for 8 to 16 layers."""
LATER_KERNELS_BYTES = 64 << 20
"""For plans: the CPU plugin keeps 1 to 2 MB of kernels for every length of step that it meets."""
CHUNK_TOKENS = 256
"""The longest step, as a rule: the gateway sends a longer prompt in chunks."""
GATEWAY_BYTES = 256 << 20
"""The gateway process with its tokenizer, on the node of the first stage."""

_KV_BYTES: dict[KvPrecision, float] = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "u8": 1.125}
"""u8 keeps an f32 scale and zero point per head and token: 8 bytes for 64 values."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage process that has loaded and answered."""

    mapped_bytes: int
    """Of the weight file, at most; the system may give them back at any time."""
    weight_bytes: int
    """What the device plugin keeps of the weights besides."""
    kv_bytes: int
    step_bytes: int
    """For a step of the given number of tokens, its attention included."""
    process_bytes: int

    @property
    def anonymous_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.step_bytes + self.process_bytes


@dataclass(frozen=True)
class StageNeed:
    """Bytes that a stage needs of its node's memory, with the gateway where it runs beside."""

    weight_bytes: int
    kv_bytes: int
    runtime_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.runtime_bytes


class ModelNeed:
    """The needs of every possible stage of a model at a context and number of users."""

    def __init__(
        self,
        manifest: Manifest,
        context_tokens: int,
        users: int,
        kv_precision: KvPrecision | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """``context_tokens`` for each of ``users``; ``kv_precision`` is the manifest's own where it is None."""
        element_bytes = _KV_BYTES[kv_precision or manifest.kv_precision]
        self.layers = len(manifest.layers)
        self._users = users
        longest_step = max(chunk_tokens, manifest.step_switch_tokens + 1 if manifest.step_switch_tokens else 0)
        self._step_bytes = manifest.step_bytes_per_token * min(longest_step, context_tokens)
        self._kv_of_one = list(
            accumulate(
                (round(layer.kv_elements_per_token * element_bytes * context_tokens) for layer in manifest.layers),
                initial=0,
            )
        )
        self._borrowed = [layer.borrowed_caches for layer in manifest.layers]
        kept = [0] * (self.layers + 2)
        read = [0] * (self.layers + 2)
        self._runs = [(run.bytes, _parts(run, self.layers)) for run in manifest.runs]
        for run in manifest.runs:
            parts = _parts(run, self.layers)
            # Where the builder did not say what is kept, as much as the file has: most weights are laid out once more.
            for part, size in zip(parts, run.anonymous_bytes or (run.bytes,) * len(parts), strict=True):
                kept[part + 1] += size
                read[part + 1] += run.bytes
        self._kept = list(accumulate(kept, initial=0))
        self._read = list(accumulate(read, initial=0))

    def memory(self, first_layer: int, end_layer: int) -> StageMemory:
        """What layers ``first_layer`` to ``end_layer`` (exclusive) take as one stage."""
        first, end = self._parts_of(first_layer, end_layer)
        kv_of_one = self._kv_of(first_layer, end_layer)
        return StageMemory(
            mapped_bytes=sum(size for size, parts in self._runs if any(first <= part < end for part in parts)),
            weight_bytes=self._kept[end + 1] - self._kept[first + 1],
            kv_bytes=kv_of_one * self._users,
            step_bytes=self._step_bytes + kv_of_one,
            process_bytes=PROCESS_BYTES,
        )

    def of(self, first_layer: int, end_layer: int) -> StageNeed:
        """What layers ``first_layer`` to ``end_layer`` (exclusive) need as one stage."""
        first, end = self._parts_of(first_layer, end_layer)
        kv_of_one = self._kv_of(first_layer, end_layer)
        beside = PROCESS_BYTES + LATER_KERNELS_BYTES + (GATEWAY_BYTES if first_layer == 0 else 0)
        return StageNeed(
            weight_bytes=self._kept[end + 1] - self._kept[first + 1],
            kv_bytes=kv_of_one * self._users,
            runtime_bytes=beside + self._step_bytes + kv_of_one,
        )

    def _kv_of(self, first_layer: int, end_layer: int) -> int:
        """Bytes of one sequence's KV cache, copies of earlier layers' caches that these layers read included."""
        borrowed = {owner for layer in range(first_layer, end_layer) for owner in self._borrowed[layer]}
        copies = sum(self._kv_of_one[owner + 1] - self._kv_of_one[owner] for owner in borrowed if owner < first_layer)
        return self._kv_of_one[end_layer] - self._kv_of_one[first_layer] + copies

    def load(self, first_layer: int, end_layer: int) -> int:
        """Bytes that a stage reads for every token, which stand for its time: its layers, and the head at the end.

        Of the embedding a token reads one row.
        """
        _, end = self._parts_of(first_layer, end_layer)
        return self._read[end + 1] - self._read[first_layer + 1]

    def _parts_of(self, first_layer: int, end_layer: int) -> tuple[int, int]:
        """The first part of a stage and the one behind its last."""
        first = EMBEDDING_PART if first_layer == 0 else first_layer
        return first, end_layer + 1 if end_layer == self.layers else end_layer


def stage_memory(
    manifest: Manifest,
    stage: Stage,
    context_tokens: int,
    users: int = 1,
    *,
    kv_precision: KvPrecision | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> StageMemory:
    """What a stage of a shard folder takes with ``users`` chats of ``context_tokens`` each.

    ``chunk_tokens`` is the longest step that it has run; ``kv_precision`` is the manifest's own where it is None.
    """
    need = ModelNeed(manifest, context_tokens, users, kv_precision, chunk_tokens)
    return need.memory(stage.first_layer, stage.end_layer)


def _parts(run: Run, layers: int) -> Sequence[int]:
    """Who reads a run; every part where only its kind is known and that is ``shared``."""
    if run.parts or run.kind == "cut":
        return run.parts
    if run.kind == "layer" and run.layer is not None:
        return (run.layer,)
    if run.kind == "embedding":
        return (EMBEDDING_PART,)
    return (layers,) if run.kind == "head" else range(EMBEDDING_PART, layers + 1)
