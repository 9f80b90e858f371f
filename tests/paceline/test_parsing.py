"""Option values that are more than a number or a word."""

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from paceline.parsing import parse_bytes, parse_numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [("6000000000", 6_000_000_000), ("6G", 6 * 10**9), ("6GB", 6 * 10**9), ("5.5GiB", 5_905_580_032), ("1 mb", 10**6)],
)
def test_bytes_are_read_with_the_units_that_people_write(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "0", "0.4", "GB", "six", "-1", "1e9", "4PB", "1 000", "iB"])
def test_what_is_no_number_of_bytes_is_a_usage_error(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="number of bytes"):
        parse_bytes(text)


@given(st.lists(st.integers(1, 10**6), min_size=1))
def test_lists_of_numbers_are_read_back(numbers: list[int]) -> None:
    assert parse_numbers(",".join(map(str, numbers)), "users", 1) == tuple(numbers)


@pytest.mark.parametrize("text", ["", "1,", "a", "0", "1,0", "1;2"])
def test_lists_of_other_things_are_usage_errors(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="users"):
        parse_numbers(text, "users", 1)


def test_numbers_have_a_highest() -> None:
    assert parse_numbers("1,8", "users", 1, 8) == (1, 8)
    with pytest.raises(typer.BadParameter, match="at most 8"):
        parse_numbers("1,9", "users", 1, 8)
