"""What a stage needs of its node's memory, from the manifest, before anything is cut or started.

needed = weights + KV cache + runtime, where
runtime = 0.3 x weights (the CPU plugin keeps repacked copies: a stage process holds about 1.3 times its weights in
anonymous memory), and a base for the process itself; the node of stage 0 runs the gateway too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fleet.manifest import KvPrecision, Manifest

REPACKED_SHARE = 0.3
STAGE_BASE_BYTES = 160 << 20
"""Interpreter, OpenVINO and the buffers of a step; measured 60 to 80 MB idle, the rest is for steps."""
GATEWAY_BYTES = 256 << 20
"""The gateway process with its tokenizer."""

_KV_BYTES: dict[KvPrecision, float] = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "u8": 1.125}
"""u8 keeps an f32 scale and zero point per head and token: 8 bytes for 64 values."""


@dataclass(frozen=True)
class StageNeed:
    """Bytes that a stage needs of its node's memory."""

    weight_bytes: int
    kv_bytes: int
    runtime_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.runtime_bytes


class ModelNeed:
    """The needs of every possible stage of a model at a context and number of users.

    Runs that several parts of the model read are counted wherever they may be needed: in the first and the last
    stage, and in those between unless the run holds the embedding. A model without an embedding run of its own shares
    that with the head; it is then the largest of the shared runs.
    """

    def __init__(
        self, manifest: Manifest, context_tokens: int, users: int, kv_precision: KvPrecision | None = None
    ) -> None:
        """``context_tokens`` for each of ``users``; ``kv_precision`` is the manifest's own where it is None."""
        element_bytes = _KV_BYTES[kv_precision or manifest.kv_precision]
        self.layers = len(manifest.layers)
        self._weights = list(accumulate((layer.bytes for layer in manifest.layers), initial=0))
        self._kv = list(
            accumulate(
                (
                    round(layer.kv_elements_per_token * element_bytes * context_tokens * users)
                    for layer in manifest.layers
                ),
                initial=0,
            )
        )
        sizes: dict[str, list[int]] = {"embedding": [], "head": [], "shared": []}
        for run in manifest.runs:
            if run.kind in sizes:
                sizes[run.kind].append(run.bytes)
        shared = sum(sizes["shared"])
        tied = 0 if sizes["embedding"] else max(sizes["shared"], default=0)
        self._first = sum(sizes["embedding"]) + shared
        self._last = sum(sizes["head"]) + shared
        self._only = sum(sizes["embedding"]) + sum(sizes["head"]) + shared
        self._middle = shared - tied
        self._head_load = sum(sizes["head"]) + tied

    def of(self, first_layer: int, end_layer: int) -> StageNeed:
        """What layers ``first_layer`` to ``end_layer`` (exclusive) need as one stage."""
        is_first, is_last = first_layer == 0, end_layer == self.layers
        beside = self._only if is_first and is_last else self._first if is_first else self._last if is_last else None
        weights = self._weights[end_layer] - self._weights[first_layer] + (self._middle if beside is None else beside)
        return StageNeed(
            weight_bytes=weights,
            kv_bytes=self._kv[end_layer] - self._kv[first_layer],
            runtime_bytes=round(weights * REPACKED_SHARE) + STAGE_BASE_BYTES + (GATEWAY_BYTES if is_first else 0),
        )

    def load(self, first_layer: int, end_layer: int) -> int:
        """Bytes that a stage reads for every token, which stand for its time: its layers, and the head at the end.

        Of the embedding a token reads one row.
        """
        head = self._head_load if end_layer == self.layers else 0
        return self._weights[end_layer] - self._weights[first_layer] + head
