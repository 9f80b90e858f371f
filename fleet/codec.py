"""Frames: typed msgpack headers and raw tensor frames, checked before anything is allocated."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.errors import MessageError

PROTOCOL_VERSION = 1
"""Exchanged in the first message of every connection."""

MAX_TENSOR_RANK = 4
MAX_CONTROL_BYTES = 4 << 20
MAX_TENSOR_BYTES = 64 << 20
"""Largest tensor frame: 2,048 tokens of 8,192 f32 hidden values."""

DType = Literal["f32", "f16"]
_NUMPY_TYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2")}

MessageType = TypeVar("MessageType")
Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class TensorHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Type and shape of the tensor whose bytes (little endian, C order) are the next frame."""

    dtype: DType
    shape: Annotated[tuple[Dimension, ...], msgspec.Meta(max_length=MAX_TENSOR_RANK)]

    @property
    def bytes(self) -> int:
        """Bytes of the tensor's frame."""
        return prod(self.shape) * _NUMPY_TYPES[self.dtype].itemsize


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One msgpack frame."""
    return _encoder.encode(message)


class Decoder(Generic[MessageType]):
    """Decodes frames of one message type (or union of tagged types) and turns every fault into MessageError."""

    def __init__(self, message_type: Any, max_bytes: int = MAX_CONTROL_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageType] = msgspec.msgpack.Decoder(message_type)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes | memoryview) -> MessageType:
        """The message.

        Raises:
            MessageError: the frame is too large, is not msgpack, or does not fit the type.
        """
        size = len(frame)
        if size > self._max_bytes:
            raise MessageError(f"a message of {size} bytes exceeds the limit of {self._max_bytes}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
            raise MessageError(f"a message does not fit its type: {error}") from None


def tensor_frame(array: NDArray[Any]) -> tuple[TensorHeader, memoryview]:
    """Header and frame of a float array; the frame shares the array's memory where it is contiguous."""
    names = {dtype: name for name, dtype in _NUMPY_TYPES.items()}
    name = names.get(array.dtype)
    if name is None:
        raise MessageError(f"tensors of type {array.dtype} are not sent")
    header = TensorHeader(name, array.shape)  # type: ignore[arg-type]
    return header, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read_tensor(header: TensorHeader, frame: bytes | memoryview) -> NDArray[Any]:
    """A view of the frame as the array that the header describes.

    Raises:
        MessageError: the frame's length is not what type and shape say, or exceeds the limit.
    """
    expected = header.bytes
    if expected > MAX_TENSOR_BYTES:
        raise MessageError(f"a tensor of {expected} bytes exceeds the limit of {MAX_TENSOR_BYTES}")
    if len(frame) != expected:
        raise MessageError(f"a tensor frame has {len(frame)} bytes, its header says {expected}")
    try:
        return np.frombuffer(frame, dtype=_NUMPY_TYPES[header.dtype]).reshape(header.shape)
    except ValueError as error:
        # An empty tensor whose other dimensions multiply to more than numpy counts.
        raise MessageError(f"a tensor of shape {list(header.shape)} cannot be read: {error}") from None
