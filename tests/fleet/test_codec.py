from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet.codec import (
    MAX_TENSOR_BYTES,
    Decoder,
    TensorHeader,
    encode,
    read_tensor,
    tensor_frame,
)
from fleet.control_messages import ControlReply, ControlRequest, FetchChunk, Heartbeat
from fleet.errors import MessageError
from pipeline.messages import GatewayBoundMessage, StageMessage

DECODERS: list[Decoder[Any]] = [
    Decoder(ControlRequest),
    Decoder(ControlReply),
    Decoder(FetchChunk),
    Decoder(StageMessage),
    Decoder(GatewayBoundMessage),
]

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=20,
)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(st.binary(max_size=300), st.sampled_from(DECODERS))
def test_no_bytes_raise_anything_but_a_message_error(frame: bytes, decoder: Decoder[Any]) -> None:
    with pytest.raises(MessageError):
        decoder.decode(frame)


@given(plain, st.sampled_from(DECODERS))
def test_no_msgpack_raises_anything_but_a_message_error(content: Any, decoder: Decoder[Any]) -> None:
    with pytest.raises(MessageError):
        decoder.decode(msgspec.msgpack.encode(content))


def test_deep_nesting_is_a_message_error() -> None:
    for decoder in DECODERS:
        with pytest.raises(MessageError):
            decoder.decode(b"\x91" * 100_000)
        with pytest.raises(MessageError):
            decoder.decode(b"\x81\xa1a" * 100_000)


def test_a_frame_that_claims_more_than_it_has_allocates_nothing() -> None:
    for decoder in DECODERS:
        for prefix in (
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff",
        ):
            with pytest.raises(MessageError):
                decoder.decode(prefix + bytes(10))


def test_a_frame_over_the_limit_is_not_looked_at() -> None:
    decoder: Decoder[Heartbeat] = Decoder(Heartbeat, max_bytes=10)
    with pytest.raises(MessageError, match="exceeds the limit of 10"):
        decoder.decode(encode(Heartbeat(number=2**40)))


@given(st.sampled_from(["<f4", "<f2"]), shapes, st.randoms(use_true_random=False))
def test_a_tensor_survives_to_the_bit(dtype: str, shape: tuple[int, ...], source: Any) -> None:
    raw = source.randbytes(math.prod(shape) * np.dtype(dtype).itemsize)
    array: NDArray[Any] = np.frombuffer(raw, dtype=dtype).reshape(shape)
    for variant in (array, array.T):
        header, frame = tensor_frame(variant)
        received = read_tensor(header, bytes(frame))
        assert received.shape == variant.shape
        assert received.tobytes() == variant.tobytes()


@given(shapes, st.integers(-9, 9))
def test_a_frame_of_another_length_is_refused(shape: tuple[int, ...], difference: int) -> None:
    header = TensorHeader("f32", shape)
    length = header.bytes + difference
    if difference == 0 or length < 0:
        assert read_tensor(header, bytes(header.bytes)).shape == shape
        return
    with pytest.raises(MessageError, match="its header says"):
        read_tensor(header, bytes(length))


@pytest.mark.parametrize("shape", [(2**31,), (2**31, 2**31, 2**31, 2**31), (MAX_TENSOR_BYTES // 4 + 1,)])
def test_a_header_that_promises_too_much_is_refused_before_anything_is_allocated(shape: tuple[int, ...]) -> None:
    with pytest.raises(MessageError, match="exceeds the limit"):
        read_tensor(TensorHeader("f32", shape), b"")


@pytest.mark.parametrize(
    "content",
    [["f64", [1]], ["object", [1]], ["f32", [1] * 5], ["f32", [-1]], ["f32", [2**40]], ["f32"], ["f32", [1], 1]],
)
def test_headers_outside_the_closed_set_do_not_decode(content: list[Any]) -> None:
    decoder: Decoder[TensorHeader] = Decoder(TensorHeader)
    with pytest.raises(MessageError):
        decoder.decode(msgspec.msgpack.encode(content))


def test_integers_are_not_sent_as_tensors() -> None:
    with pytest.raises(MessageError, match="int64"):
        tensor_frame(np.zeros(3, dtype=np.int64))
