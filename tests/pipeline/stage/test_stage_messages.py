"""Bytes from the network: whatever they are, decoding gives a message or a MessageError."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.codec import Decoder, TensorHeader, encode, read_tensor, tensor_frame
from fleet.errors import MessageError
from fleet.gateway_messages import Sampling
from fleet.node import PeerAddress
from pipeline.messages import (
    Attach,
    Attached,
    Entry,
    Fault,
    GatewayBoundMessage,
    Ping,
    Pong,
    Release,
    Sampled,
    StageMessage,
    StageTiming,
    Step,
    StepResult,
)

PEER = PeerAddress(node_name="PC-2", addresses=("192.0.2.7", "pc-2.local"), port=40000, public_key="k" * 40)
STAGE_MESSAGES: list[StageMessage] = [
    Attach(1, 5, 0, PEER),
    Attach(1, 5, 1, None),
    Step(5, 1, (Entry(1, 0, (1, 2, 3), 1, Sampling(temperature=0.7, seed=3, logit_bias={4: -1.5}), 3),)),
    Step(
        5,
        2,
        (Entry(1, 3, (9,), 1), Entry(2, 7, (8, 7), 2)),
        TensorHeader("f32", (3, 576)),
        (StageTiming(0, 1.5),),
    ),
    Release(5, (1, 2, 3)),
    Ping(7),
]
GATEWAY_MESSAGES: list[GatewayBoundMessage] = [
    Attached(1, 5, 0, "PC-1", "CPU", 0, 4, "model"),
    StepResult(5, 1, (Sampled(1, (5,), ((-0.5, ((5, -0.5), (6, -1.0))),)),), (StageTiming(0, 1.5),)),
    Fault(5, 1, "PC-2", (1, 2), "It broke.", True),
    Pong(7, 5, 3),
]
stage_decoder: Decoder[StageMessage] = Decoder(StageMessage)
gateway_decoder: Decoder[GatewayBoundMessage] = Decoder(GatewayBoundMessage)


@pytest.mark.parametrize("message", STAGE_MESSAGES)
def test_messages_to_stages_survive_the_way(message: StageMessage) -> None:
    assert stage_decoder.decode(encode(message)) == message


@pytest.mark.parametrize("message", GATEWAY_MESSAGES)
def test_messages_to_the_gateway_survive_the_way(message: GatewayBoundMessage) -> None:
    assert gateway_decoder.decode(encode(message)) == message


@settings(max_examples=400)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_a_message_error(data: bytes) -> None:
    for decoder in (stage_decoder, gateway_decoder):
        try:
            message = decoder.decode(data)
        except MessageError:
            continue
        assert isinstance(message, msgspec.Struct)


@settings(max_examples=800)
@given(
    st.sampled_from(STAGE_MESSAGES),
    st.lists(st.tuples(st.sampled_from(["flip", "cut", "insert", "repeat"]), st.integers(0, 400), st.integers(0, 255))),
)
def test_mutated_messages_raise_nothing_but_a_message_error(
    original: StageMessage, changes: list[tuple[str, int, int]]
) -> None:
    data = bytearray(encode(original))
    for change, place, value in changes[:8]:
        where = place % (len(data) + 1)
        if change == "flip" and data:
            data[where % len(data)] = value
        elif change == "cut":
            del data[where:]
        elif change == "insert":
            data.insert(where, value)
        else:
            data[where:where] = data[:64]
    try:
        message = stage_decoder.decode(bytes(data))
    except MessageError:
        return
    # What does decode keeps every promise of its type, so it survives the way again.
    assert stage_decoder.decode(encode(message)) is not None


@pytest.mark.parametrize(
    "message",
    [
        Step(5, 1, ()),
        Step(5, 1, (Entry(1, 0, ()),)),
        Step(5, 1, (Entry(1, -1, (1,)),)),
        Step(5, 1, (Entry(1, 0, (-1,)),)),
        Step(5, 1, (Entry(1, 0, (1,) * 8193),)),
        Step(5, 1, tuple(Entry(number, 0, (1,)) for number in range(257))),
        Step(5, 1, (Entry(1, 0, (1,), sampling=Sampling(temperature=-1.0)),)),
        Step(5, 1, (Entry(1, 0, (1,), sampling=Sampling(temperature=float("nan"))),)),
        Step(5, 1, (Entry(1, 0, (1,)),), TensorHeader("f32", (1, 1, 1, 1, 1))),
        Step(-1, 1, (Entry(1, 0, (1,)),)),
        Step(5, 1, (Entry(1, 0, (1,)),), timings=(StageTiming(0, float("nan")),)),
        Step(5, 1, (Entry(1, 0, (1,)),), timings=(StageTiming(0, float("inf")),)),
        Step(5, 1, (Entry(1, 0, (1,)),), timings=(StageTiming(0, -1.0),)),
        Step(5, 1, (Entry(1, 0, (1,)),), timings=(StageTiming(2**40, 1.0),)),
        Release(5, (1,) * 4097),
        Attach(1, 5, 0, PeerAddress(node_name="", addresses=(), port=1, public_key="k" * 40)),
    ],
)
def test_values_out_of_range_do_not_decode(message: StageMessage) -> None:
    with pytest.raises(MessageError):
        stage_decoder.decode(encode(message))


@given(
    st.sampled_from(["f32", "f16"]),
    st.lists(st.integers(0, 2**31), max_size=4),
    st.binary(max_size=64),
)
def test_a_tensor_frame_is_never_read_beyond_its_bytes(dtype: str, shape: list[int], frame: bytes) -> None:
    header = msgspec.convert([dtype, shape], TensorHeader)
    try:
        tensor = read_tensor(header, frame)
    except MessageError:
        # An empty tensor may still have dimensions that no array can have.
        assert header.bytes != len(frame) or header.bytes == 0
        return
    assert tensor.nbytes == len(frame)


def test_hidden_states_survive_the_way() -> None:
    hidden = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    header, frame = tensor_frame(hidden)
    np.testing.assert_array_equal(read_tensor(header, bytes(frame)), hidden)
