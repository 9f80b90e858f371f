"""Recognises dimensions from two runs."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from shard_builder.cut.shapes import BATCH, PAST, SEQUENCE, TOTAL, Dimension, choose_sizes, recognise

STATIC = st.sets(st.integers(1, 60), max_size=12)
NAMES = st.sampled_from([(), (BATCH,), (SEQUENCE,), (PAST,), (TOTAL,), (BATCH, SEQUENCE), (BATCH, TOTAL)])


@given(STATIC)
def test_sizes_differ_from_each_other_and_from_what_is_static(static: set[int]) -> None:
    one, two = choose_sizes(static)
    numbers = [*one.values.values(), *two.values.values()]
    assert len(set(numbers)) == len(numbers)
    assert not set(numbers) & static


@given(STATIC, NAMES, st.integers(1, 4096))
def test_a_dimension_is_recognised_from_its_two_values(static: set[int], names: tuple[str, ...], factor: int) -> None:
    sizes = choose_sizes(static)
    first, second = (factor * prod(size.values[name] for name in names) for size in sizes)
    found = recognise(first, second, sizes)
    assert found is not None
    for size, value in zip(sizes, (first, second), strict=True):
        assert found.factor * prod(size.values[name] for name in found.names) == value
    assert found == Dimension(factor, names)


@given(STATIC)
def test_what_follows_from_nothing_known_is_not_guessed(static: set[int]) -> None:
    sizes = choose_sizes(static)
    assert recognise(sizes[0].batch + 1, sizes[1].batch + 1, sizes) is None
