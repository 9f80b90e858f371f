"""Figures from the times at which tokens arrived."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.measure import RequestTimes, Round, percentiles, summarise


def test_two_users_together_count_the_tokens_of_both_over_the_common_time() -> None:
    one = Round(2, (RequestTimes(0.0, (1.0, 2.0)), RequestTimes(0.5, (1.5, 4.0))))
    assert one.tokens_per_second == pytest.approx(4 / 4.0)


def test_a_run_tells_the_median_round_and_its_spread() -> None:
    rounds = [Round(1, (RequestTimes(0.0, (1.0, last)),)) for last in (2.0, 4.0, 8.0)]
    run = summarise(rounds)
    assert (run.users, run.rounds) == (1, 3)
    assert run.tokens_per_second == pytest.approx(0.5)
    assert (run.tokens_per_second_lowest, run.tokens_per_second_highest) == pytest.approx((0.25, 1.0))
    assert run.time_to_first_token_s.p50 == pytest.approx(1.0)
    assert run.inter_token_s.p50 == pytest.approx(3.0)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_lie_within_the_values_and_in_order(values: list[float]) -> None:
    found = percentiles(values)
    assert min(values) <= found.p50 <= found.p95 <= max(values)
