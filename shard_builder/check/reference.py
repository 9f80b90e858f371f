"""The whole model's logits for what a check runs, kept on disk so that a later check need not load the model."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
from numpy.typing import NDArray

from fleet.errors import ModelError
from fleet.manifest import KvPrecision
from shard_builder.check.array_files import save_array
from shard_builder.check.cases import Sequence, whole_sequences
from shard_builder.check.step_values import StepValues, compared_rows, feed, step_values
from shard_builder.cut.opened_model import plain_reason
from shard_builder.cut.source_form import TOKEN_INPUT
from shard_builder.cut.surgery import SAMPLED_INPUT

REFERENCE_NAME = "reference.json"
EXACT_THREADS = 2


class LeftOutSequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sequence that the whole model itself cannot run, and why."""

    sequence: Sequence
    reason: str


class ReferenceHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stored reference belongs to, and what was run."""

    model_id: str
    device: str
    kv_precision: KvPrecision
    vocabulary_size: int
    openvino_version: str
    sampled: bool
    sequences: tuple[Sequence, ...]
    left_out: tuple[LeftOutSequence, ...] = ()


@dataclass(frozen=True)
class Reference:
    """A folder with the head and one file of logits f32 [compared rows, vocabulary] per sequence."""

    folder: Path
    head: ReferenceHead

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """What the whole model could run."""
        left_out = {one.sequence for one in self.head.left_out}
        return tuple(sequence for sequence in self.head.sequences if sequence not in left_out)

    def restricted_to(self, head: ReferenceHead) -> Reference:
        """The same for a check that runs fewer sequences."""
        left_out = tuple(one for one in self.head.left_out if one.sequence in head.sequences)
        return Reference(self.folder, msgspec.structs.replace(head, left_out=left_out))

    def logits(self, sequence: Sequence) -> NDArray[np.float32]:
        """The whole model's logits [compared rows, vocabulary] of a sequence, mapped from the file.

        Raises:
            ModelError: the file is missing or damaged.
        """
        path = self.folder / _logits_name(sequence)
        try:
            stored: NDArray[np.float32] = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError):
            raise ModelError(
                f"The reference {path} is missing or damaged; remove its folder and check again."
            ) from None
        rows = compared_rows(sequence, self.head.vocabulary_size)
        if stored.shape != (rows, self.head.vocabulary_size) or stored.dtype != np.float32:
            raise ModelError(f"The reference {path} has another shape than it should; remove its folder.")
        return stored


def reference_bytes(sequences: tuple[Sequence, ...], vocabulary_size: int) -> int:
    """How much disk the logits take."""
    rows = sum(compared_rows(sequence, vocabulary_size) for sequence in whole_sequences(sequences))
    return 4 * vocabulary_size * rows


def exact_properties(device: str, kv_precision: KvPrecision) -> dict[str, Any]:
    """Properties under which two ways of computing the same thing may be compared to the bit."""
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "EXECUTION_MODE_HINT": "ACCURACY",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "KV_CACHE_PRECISION": kv_precision,
    }
    if device.startswith("CPU"):
        properties["INFERENCE_NUM_THREADS"] = EXACT_THREADS
        # Without these the CPU plugin takes f32 in this mode, and KV_CACHE_PRECISION still reads as it was set.
        properties["KEY_CACHE_PRECISION"] = properties["VALUE_CACHE_PRECISION"] = kv_precision
    return properties


def run_sequence(
    request: ov.InferRequest,
    ports: Mapping[str, Any],
    steps: Iterator[StepValues],
    entering: Callable[[int, StepValues], dict[str, NDArray[Any]]],
    trim: Callable[[int], None] | None = None,
) -> Iterator[tuple[StepValues, NDArray[np.float32]]]:
    """Runs the steps from empty states and yields each with the only output, which the next step overwrites.

    Args:
        request: its states are reset first.
        ports: the model's inputs by name.
        steps: as ``step_values`` gives them.
        entering: the arrays of a step, by its number, that do not follow from its values: hidden states.
        trim: cuts so many slots off the end of the request's states.
    """
    request.reset_state()
    for number, values in enumerate(steps):
        if values.trimmed_slots:
            if trim is None:
                raise ValueError("these steps need their states trimmed")
            trim(values.trimmed_slots)
        sampled = {SAMPLED_INPUT: np.arange(values.tokens, dtype=np.int64)}
        request.infer(feed(ports, values, sampled | entering(number, values)))
        yield values, request.get_output_tensor(0).data


def input_ports(model: ov.Model) -> dict[str, Any]:
    """A model's inputs by each of their names that a check feeds, or else by the one that they have."""
    return {port.get_any_name(): port for port in model.inputs}


def make_reference(
    core: ov.Core, model: ov.Model, head: ReferenceHead, folder: Path, tick: Callable[[], None]
) -> Reference:
    """Runs the whole model and keeps its logits; ``tick`` is called once per step and may raise to stop.

    A batch, padding or rejected tokens that the model itself cannot run are left out and named in the head.

    Raises:
        ModelError: the model does not run or gives no logits for every token, or the folder cannot be written.
    """
    left_out = []
    made_folder = not folder.exists()
    written = [folder / REFERENCE_NAME]
    try:
        compiled = core.compile_model(model, head.device, exact_properties(head.device, head.kv_precision))
        ports = input_ports(model)
        folder.mkdir(parents=True, exist_ok=True)
        for sequence in whole_sequences(head.sequences):
            if sequence.rows > 1 and _takes_one_row(ports):
                left_out.append(LeftOutSequence(sequence, "the model takes one row at a time"))
                continue
            try:
                logits = _whole_logits(compiled, ports, sequence, head.vocabulary_size, tick)
            except RuntimeError as error:
                if sequence.is_essential:
                    raise
                left_out.append(LeftOutSequence(sequence, plain_reason(error)))
                continue
            if np.isfinite(logits).all():
                written.append(folder / _logits_name(sequence))
                save_array(written[-1], logits)
            elif sequence.is_essential:
                raise ModelError(f"The whole model gives logits that are not numbers on {head.device}.")
            else:
                left_out.append(LeftOutSequence(sequence, "the logits are not numbers"))
        head = msgspec.structs.replace(head, left_out=tuple(left_out))
        (folder / REFERENCE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(head), indent=1))
    except BaseException as error:
        _remove(written, folder if made_folder else None)
        if isinstance(error, RuntimeError):
            raise ModelError(f"The whole model does not run on {head.device}: {plain_reason(error)}.") from None
        if isinstance(error, OSError):
            raise ModelError(f"The reference cannot be written to {folder}: {error.strerror}.") from None
        raise
    return Reference(folder, head)


def _remove(written: list[Path], folder: Path | None) -> None:
    """Takes back what an unfinished reference left, as far as the disk lets it."""
    with contextlib.suppress(OSError):
        for path in written:
            path.unlink(missing_ok=True)
        if folder is not None:
            folder.rmdir()


def _takes_one_row(ports: Mapping[str, Any]) -> bool:
    rows = ports[TOKEN_INPUT].get_partial_shape()[0]
    return bool(rows.is_static and rows.get_length() == 1)


def _whole_logits(
    compiled: ov.CompiledModel,
    ports: Mapping[str, Any],
    sequence: Sequence,
    vocabulary_size: int,
    tick: Callable[[], None],
) -> NDArray[np.float32]:
    """Logits [compared rows, vocabulary]."""
    found = []
    steps = step_values(sequence, vocabulary_size)
    # A request of its own: one whose inference failed is in no known state.
    for values, logits in run_sequence(compiled.create_infer_request(), ports, steps, lambda *_: {}):
        if logits.shape != (*values.ids.shape, vocabulary_size):
            raise ModelError(
                f"The model gives logits of shape {list(logits.shape)} for {values.tokens} tokens, not one row "
                "per token; it cannot be cut."
            )
        found.append(np.array(logits[values.compared], dtype=np.float32))
        tick()
    return np.concatenate(found)


def load_reference(folder: Path) -> Reference | None:
    """The reference that a folder holds; None where it holds none.

    Raises:
        ModelError: it is damaged, or another version made it.
    """
    path = folder / REFERENCE_NAME
    try:
        head = msgspec.json.decode(path.read_bytes(), type=ReferenceHead)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except msgspec.MsgspecError:
        raise ModelError(
            f"{path} is damaged or was made by another version; remove its folder and check again."
        ) from None
    return Reference(folder, head)


def _logits_name(sequence: Sequence) -> str:
    return f"logits-{hashlib.sha256(msgspec.json.encode(sequence)).hexdigest()[:16]}.npy"
