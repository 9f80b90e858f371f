"""Values of command-line options that are more than one number or word."""

from __future__ import annotations

import re
from pathlib import Path

import typer

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes from ``6000000000``, ``6G``, ``6GB`` or ``5.5GiB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a number of bytes; write for example 6000000000, 6GB or 5.5GiB.")
    value = int(float(match[1]) * _UNITS[match[2]])
    if value < 1:
        raise typer.BadParameter(f"{text!r} is not enough: name a number of bytes above 0, such as 8GB.")
    return value


def parse_folder(text: str) -> Path:
    """The path of a folder; an empty text, as an unset variable of a script gives, is none."""
    if not text:
        raise typer.BadParameter("the name of a folder is empty.")
    return Path(text)


def not_empty(text: str | None) -> str | None:
    """A text option's value; an empty text is refused."""
    if text is not None and not text.strip():
        raise typer.BadParameter("the text is empty.")
    return text


def parse_numbers(text: str, what: str, lowest: int, highest: int | None = None) -> tuple[int, ...]:
    """Whole numbers from ``1,2,8``."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of {what}; write for example 1,2,8.") from None
    if any(number < lowest for number in numbers):
        raise typer.BadParameter(f"{text!r}: {what} must be at least {lowest}.")
    if highest is not None and any(number > highest for number in numbers):
        raise typer.BadParameter(f"{text!r}: {what} must be at most {highest}.")
    return numbers
