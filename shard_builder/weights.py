"""Groups a model's constants into runs: bytes that stay the same wherever the model is cut.

A run holds the constants that the same parts of the *whole* model read. Constants that lie at the same place of the
source file are one blob. Weights are only ever touched in slices of the mapped file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fleet.manifest import RUN_ALIGNMENT_BYTES, Run, RunKind

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

CONSTANT_ALIGNMENT_BYTES = 64
SLICE_BYTES = 8 << 20
EMBEDDING_PART = -1


def constant_bytes(constant: Any) -> NDArray[np.uint8]:
    """A flat view of a constant's bytes as they lie in memory; types of less than a byte stay packed."""
    data: NDArray[Any] = constant.data
    return data.reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class Blob:
    """One stretch of bytes and the constants (numbers of the whole model's nodes) that are made of it."""

    constants: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class RunLayout:
    """Where each blob lies within a run.

    ``parts`` are the readers: -1 the embedding, k layer k, the number of layers the head.
    """

    parts: tuple[int, ...]
    blobs: tuple[Blob, ...]
    offsets: tuple[int, ...]
    bytes: int
    anonymous_bytes: tuple[int, ...] = ()
    """Per part, see ``shard_builder.anonymous_memory``."""

    def kind(self, layers: int) -> tuple[RunKind, int | None]:
        """The kind of run in a model of that many layers, and the layer."""
        if len(self.parts) != 1:
            return "shared", None
        part = self.parts[0]
        if part == EMBEDDING_PART:
            return "embedding", None
        return ("head", None) if part == layers else ("layer", part)


def lay_out(blobs: Sequence[Blob], parts: tuple[int, ...]) -> RunLayout:
    """The blobs one behind the other, each aligned."""
    offsets = []
    end = 0
    for blob in blobs:
        start = align(end, CONSTANT_ALIGNMENT_BYTES)
        offsets.append(start)
        end = start + blob.bytes
    return RunLayout(parts, tuple(blobs), tuple(offsets), end)


def align(offset: int, alignment: int) -> int:
    """The next multiple of ``alignment`` that is not below ``offset``."""
    return -(-offset // alignment) * alignment


def find_runs(operations: Sequence[Any], readers: Mapping[int, Collection[int]]) -> tuple[RunLayout, ...]:
    """All runs of a whole model, in an order that no cut changes: by their readers.

    ``operations`` are the model's nodes in graph order, ``readers`` the parts that read each of them.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for number, operation in enumerate(operations):
        if operation.get_type_name() == "Constant":
            view = constant_bytes(operation)
            places.setdefault((view.__array_interface__["data"][0], view.nbytes), []).append(number)
    grouped: dict[tuple[int, ...], list[Blob]] = {}
    for (_, size), numbers in places.items():
        parts = sorted({part for number in numbers for part in readers.get(number, ())})
        grouped.setdefault(tuple(parts), []).append(Blob(tuple(numbers), size))
    return tuple(lay_out(grouped[parts], parts) for parts in sorted(grouped))


@dataclass(frozen=True)
class PlacedRun:
    """A run at its place in a stage's weight file."""

    layout: RunLayout
    offset: int


@dataclass
class WeightFileLayout:
    """A stage's weight file: the whole model's runs that it needs, then the constants that the cut brought in."""

    runs: tuple[PlacedRun, ...]
    cut_offset: int
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Offset and bytes of every constant of the whole model that lies in the file."""

    @property
    def run_bytes(self) -> int:
        """Bytes of the runs without the cut's own."""
        return sum(run.layout.bytes for run in self.runs)


def place_runs(runs: Sequence[RunLayout], needed: Collection[int]) -> WeightFileLayout:
    """The runs of which the stage reads at least one constant (``needed``: node numbers), each aligned."""
    placed = []
    places = {}
    end = 0
    for layout in runs:
        if not any(number in needed for blob in layout.blobs for number in blob.constants):
            continue
        start = align(end, RUN_ALIGNMENT_BYTES)
        placed.append(PlacedRun(layout, start))
        for blob, offset in zip(layout.blobs, layout.offsets, strict=True):
            for number in blob.constants:
                places[number] = (start + offset, blob.bytes)
        end = start + layout.bytes
    return WeightFileLayout(tuple(placed), align(end, RUN_ALIGNMENT_BYTES), places)


def run_slices(layout: RunLayout, operations: Sequence[Any]) -> Iterator[memoryview]:
    """The bytes of a run, padding included, in slices of at most SLICE_BYTES."""
    end = 0
    for blob, offset in zip(layout.blobs, layout.offsets, strict=True):
        if offset > end:
            yield memoryview(bytes(offset - end))
        view = constant_bytes(operations[blob.constants[0]])
        for start in range(0, blob.bytes, SLICE_BYTES):
            yield view[start : start + SLICE_BYTES].data
        end = offset + blob.bytes


def describe_run(layout: RunLayout, sha256: str, layers: int) -> Run:
    """The run's entry in the manifest."""
    kind, layer = layout.kind(layers)
    return Run(
        sha256=sha256,
        bytes=layout.bytes,
        kind=kind,
        layer=layer,
        parts=layout.parts,
        anonymous_bytes=layout.anonymous_bytes,
    )


def hash_run(layout: RunLayout, operations: Sequence[Any]) -> str:
    """SHA-256 of a run's bytes."""
    digest = hashlib.sha256()
    for part in run_slices(layout, operations):
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class WrittenWeights:
    """What writing a weight file gave: its hash and those of its runs, in their order in the file."""

    bytes: int
    sha256: str
    run_hashes: tuple[str, ...]
    cut_hash: str
    cut_bytes: int


def write_weights(
    file: BinaryIO,
    layout: WeightFileLayout,
    operations: Sequence[Any],
    cut_constants: bytes,
    advance: Callable[[int], None],
) -> WrittenWeights:
    """Writes a stage's weight file from the mapped source; ``advance`` hears of bytes written and may raise to stop."""
    with _HashingFile(file) as output:
        hashes = []
        for run in layout.runs:
            output.pad_to(run.offset)
            digest = hashlib.sha256()
            for part in run_slices(run.layout, operations):
                output.write(part, digest)
                advance(len(part))
            hashes.append(digest.hexdigest())
        cut_digest = hashlib.sha256()
        if cut_constants:
            output.pad_to(layout.cut_offset)
            output.write(memoryview(cut_constants), cut_digest)
        return WrittenWeights(output.bytes, output.sha256(), tuple(hashes), cut_digest.hexdigest(), len(cut_constants))


class _HashingFile:
    """Writes a file while two threads hash what is written: for the file as a whole and for the run that it is in.

    Hashing takes longer than writing, and lets go of the interpreter's lock.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.bytes = 0
        self._file = file
        self._whole = hashlib.sha256()
        self._hashers = ThreadPoolExecutor(2, thread_name_prefix="hash")

    def __enter__(self) -> _HashingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._hashers.shutdown()

    def sha256(self) -> str:
        """Of everything written so far."""
        return self._whole.hexdigest()

    def pad_to(self, offset: int) -> None:
        """Zeros up to an offset, which belong to no run."""
        padding = bytes(offset - self.bytes)
        self._file.write(padding)
        self._whole.update(padding)
        self.bytes = offset

    def write(self, part: memoryview, digest: Hash) -> None:
        """Appends a part and adds it to both hashes; it is done with the part afterwards."""
        hashing = [self._hashers.submit(hasher.update, part) for hasher in (self._whole, digest)]
        self._file.write(part)
        wait(hashing)
        self.bytes += len(part)
