from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from fleet.transfer_machine import ChunkMachine, Fetch


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_in_any_order_with_losses_and_damage_every_byte_arrives_once(
    piece_bytes: list[int], window: int, chunk_bytes: int, source: random.Random
) -> None:
    machine = ChunkMachine(piece_bytes, window=window, chunk_bytes=chunk_bytes, attempts=1_000)
    content = [bytearray(size) for size in piece_bytes]
    verified = {piece for piece, size in enumerate(piece_bytes) if size and source.random() < 0.2}
    for piece in verified:
        content[piece][:] = b"\1" * piece_bytes[piece]
    written = {}
    for piece in range(len(piece_bytes)):
        if piece not in verified and source.random() < 0.3:
            written[piece] = {chunk for chunk in range(machine.chunks_of(piece)) if source.random() < 0.5}
            for chunk in written[piece]:
                end = min((chunk + 1) * chunk_bytes, piece_bytes[piece])
                content[piece][chunk * chunk_bytes : end] = b"\1" * (end - chunk * chunk_bytes)
    on_the_way: list[Fetch] = []
    to_verify = machine.begin(verified, written)
    for _ in range(10_000):
        if machine.done:
            break
        on_the_way += machine.next_fetches()
        assert len(on_the_way) <= window
        assert on_the_way or to_verify
        if to_verify and (not on_the_way or source.random() < 0.5):
            piece = to_verify.pop(source.randrange(len(to_verify)))
            assert all(content[piece])
            if piece_bytes[piece] and source.random() < 0.1:
                content[piece][:] = bytes(piece_bytes[piece])
                assert machine.on_damaged(piece)
            else:
                machine.on_verified(piece)
            continue
        fetch = on_the_way.pop(source.randrange(len(on_the_way)))
        assert 0 < fetch.bytes <= chunk_bytes
        if source.random() < 0.2:
            machine.on_lost(fetch)
            continue
        place = slice(fetch.offset, fetch.offset + fetch.bytes)
        assert not any(content[fetch.piece][place])
        content[fetch.piece][place] = b"\1" * fetch.bytes
        complete = machine.on_written(fetch)
        if complete is not None:
            to_verify.append(complete)
    assert machine.done
    assert all(all(piece) for piece in content)
    assert machine.arrived_bytes == sum(piece_bytes)


def test_damage_is_not_tried_for_ever() -> None:
    machine = ChunkMachine([10], attempts=3)
    machine.begin(set(), {})
    for expected in (True, True, False):
        (fetch,) = machine.next_fetches()
        assert machine.on_written(fetch) == 0
        assert machine.on_damaged(0) is expected


def test_an_empty_piece_with_a_wrong_hash_is_given_up() -> None:
    machine = ChunkMachine([0])
    assert machine.begin(set(), {}) == [0]
    assert not machine.on_damaged(0)
