"""Rate and time left of a transfer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.deploy.transfer_meter import TransferMeter


def test_a_steady_transfer_is_measured_exactly() -> None:
    meter = TransferMeter()
    for second in range(10):
        meter.update(second * 100, float(second))
    assert meter.bytes_per_second(9.0) == pytest.approx(100)
    assert meter.seconds_left(1900, 9.0) == pytest.approx(10)


def test_bytes_that_were_there_before_do_not_count_as_speed() -> None:
    meter = TransferMeter()
    meter.update(1_000_000, 5.0)
    assert meter.bytes_per_second(5.0) is None
    meter.update(1_000_100, 6.0)
    assert meter.bytes_per_second(6.0) == pytest.approx(100)


def test_a_transfer_that_stands_still_has_no_time_left() -> None:
    meter = TransferMeter()
    meter.update(0, 0.0)
    meter.update(100, 2.0)
    assert meter.seconds_left(200, 2.0) is not None
    assert meter.seconds_left(200, 30.0) is None


def test_a_transfer_that_begins_again_is_measured_anew() -> None:
    meter = TransferMeter()
    meter.update(0, 0.0)
    meter.update(1000, 1.0)
    meter.update(10, 2.0)
    assert meter.bytes_per_second(2.0) is None


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0.01, 10)), min_size=2, max_size=30))
def test_the_rate_lies_between_the_slowest_and_the_fastest_sample(steps: list[tuple[int, float]]) -> None:
    meter = TransferMeter()
    done, now_s = 0, 0.0
    meter.update(done, now_s)
    samples = []
    pause = 0.0
    for more, seconds in steps:
        done, now_s, pause = done + more, now_s + seconds, pause + seconds
        meter.update(done, now_s)
        if more:
            samples.append(more / pause)
            pause = 0.0
    rate = meter.bytes_per_second(now_s)
    if rate is not None:
        assert min(samples) * 0.999 <= rate <= max(samples) * 1.001
