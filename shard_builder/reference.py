"""The whole model's logits for a fixed series of calls, kept on disk so that a later check need not load the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
from numpy.typing import NDArray

from fleet.errors import ModelError
from fleet.manifest import KvPrecision
from shard_builder.opened_model import plain_reason
from shard_builder.surgery import SAMPLED_INPUT

REFERENCE_NAME = "reference.json"
SEED = 20240229
EXACT_THREADS = 2


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many tokens in one inference; ``starts`` a new sequence with empty states."""

    tokens: int
    starts: bool = False


CALLS = (
    Call(1, starts=True),
    Call(1),
    Call(24, starts=True),
    Call(1),
    Call(1),
    Call(6),
    Call(1),
)
"""A prompt of one token, one of a few, single steps, and chunks after a past."""


class ReferenceHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stored reference belongs to."""

    model_id: str
    device: str
    kv_precision: KvPrecision
    vocabulary_size: int
    openvino_version: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Reference:
    """A folder with the head and one file of logits f32 [tokens, vocabulary] per call."""

    folder: Path
    head: ReferenceHead

    def logits(self, call: int) -> NDArray[np.float32]:
        """The whole model's logits of one call, mapped from the file.

        Raises:
            ModelError: the file is missing or damaged.
        """
        path = self.folder / _logits_name(call)
        try:
            stored: NDArray[np.float32] = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError):
            raise ModelError(
                f"The reference {path} is missing or damaged; remove its folder and check again."
            ) from None
        if stored.shape != (self.head.calls[call].tokens, self.head.vocabulary_size) or stored.dtype != np.float32:
            raise ModelError(f"The reference {path} has another shape than it should; remove its folder.")
        return stored


def token_ids(calls: tuple[Call, ...], vocabulary_size: int) -> list[NDArray[np.int64]]:
    """The same ids [1, tokens] for every run of these calls."""
    generator = np.random.default_rng(SEED)
    return [generator.integers(0, vocabulary_size, (1, call.tokens), dtype=np.int64) for call in calls]


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


def run_calls(
    request: ov.InferRequest, inputs: set[str], calls: tuple[Call, ...], entering: Callable[[int], dict[str, Any]]
) -> Iterator[NDArray[np.float32]]:
    """Runs the calls of one sequence after the other (batch 1) and yields a copy of the only output of each.

    ``entering`` gives the token ids or hidden states of a call; masks, positions and beams are added here.
    """
    past = 0
    for number, call in enumerate(calls):
        if call.starts:
            request.reset_state()
            past = 0
        feed = entering(number)
        feed["attention_mask"] = np.ones((1, past + call.tokens), dtype=np.int64)
        feed["position_ids"] = np.arange(past, past + call.tokens, dtype=np.int64)[None]
        feed["beam_idx"] = np.zeros(1, dtype=np.int32)
        request.infer({name: value for name, value in feed.items() if name in inputs})
        past += call.tokens
        yield np.array(request.get_output_tensor(0).data, dtype=np.float32)


def input_names(model: ov.Model) -> set[str]:
    """All names of a model's inputs."""
    return {name for port in model.inputs for name in port.get_names()}


def make_reference(
    core: ov.Core, model: ov.Model, head: ReferenceHead, folder: Path, tick: Callable[[], None]
) -> Reference:
    """Runs the whole model and keeps its logits; ``tick`` is called once per call and may raise to stop.

    Raises:
        ModelError: the model does not run or gives no logits for every token, or the folder cannot be written.
    """
    try:
        compiled = core.compile_model(model, head.device, exact_properties(head.device, head.kv_precision))
        ids = token_ids(head.calls, head.vocabulary_size)
        results = run_calls(
            compiled.create_infer_request(),
            input_names(model),
            head.calls,
            lambda call: {"input_ids": ids[call], SAMPLED_INPUT: np.arange(head.calls[call].tokens)},
        )
        folder.mkdir(parents=True, exist_ok=True)
        for number, (call, logits) in enumerate(zip(head.calls, results, strict=True)):
            if logits.shape != (1, call.tokens, head.vocabulary_size):
                raise ModelError(
                    f"The model gives logits of shape {list(logits.shape)} for {call.tokens} tokens, not one row "
                    "per token; it cannot be cut."
                )
            np.save(folder / _logits_name(number), logits[0])
            tick()
        (folder / REFERENCE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(head), indent=1))
    except RuntimeError as error:
        raise ModelError(f"The whole model does not run on {head.device}: {plain_reason(error)}.") from None
    except OSError as error:
        raise ModelError(f"The reference cannot be written to {folder}: {error.strerror}.") from None
    return Reference(folder, head)


def load_reference(folder: Path) -> Reference | None:
    """The reference that a folder holds; None where it holds none.

    Raises:
        ModelError: it is damaged.
    """
    path = folder / REFERENCE_NAME
    try:
        return Reference(folder, msgspec.json.decode(path.read_bytes(), type=ReferenceHead))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except msgspec.MsgspecError:
        raise ModelError(f"{path} is damaged; remove its folder and check again.") from None


def _logits_name(call: int) -> str:
    return f"logits-{call}.npy"
