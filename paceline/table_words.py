"""Sizes, layers and findings as the tables about shards write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from fleet.manifest import KvPrecision, WeightFormat

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_SMALL_SHARE = 0.005


def size_words(size: int) -> str:
    """Bytes in the binary unit in which they are below 1,024: '7.6 GiB'."""
    exponent = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    value = f"{size / (1 << 10 * exponent):,.1f}" if exponent else str(size)
    return f"{value} {_UNITS[exponent]}"


def number_words(numbers: Iterable[int]) -> str:
    """Numbers in rising order with ranges drawn together: '0 to 4, 7, 9 to 11'."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ranges)


def part_words(parts: Sequence[int], layers: int) -> str:
    """The readers of a run of weights: 'embedding, head' for a tied embedding, 'layers 0 to 29' for a mask."""
    inner = [part for part in parts if 0 <= part < layers]
    words = ["embedding"] if -1 in parts else []
    if inner:
        words.append(f"layer{'s' if len(inner) > 1 else ''} {number_words(inner)}")
    if layers in parts:
        words.append("head")
    return ", ".join(words) or "parts that the manifest does not tell"


def format_words(formats: Sequence[WeightFormat]) -> str:
    """Element types with their share of the bytes: 'u4 87 %, f16 13 %'; those below half a percent are left out."""
    total = sum(item.bytes for item in formats)
    kept = [item for item in formats if item.bytes >= _SMALL_SHARE * total]
    return ", ".join(f"{item.element_type} {item.bytes / total:.0%}".replace("%", " %") for item in kept)


def finding_words(max_abs_diff: float, greedy_match: float, device: str, kv_precision: KvPrecision) -> str:
    """What a check against the whole model found."""
    return (
        f"Against the whole model on {device} with a KV cache in {kv_precision}: largest difference of a logit "
        f"{max_abs_diff:.3g}, same greedy token at {greedy_match:.1%} of positions."
    )


def plain_table(*columns: str) -> Table:
    """A table whose columns hold numbers, except those whose title begins with '<' (as in a format specification)."""
    table = Table()
    for column in columns:
        title = column.removeprefix("<")
        table.add_column(title, justify="right" if title == column else "left", overflow="fold")
    return table


def fact_grid(facts: Iterable[tuple[str, str]]) -> Table:
    """Two columns without lines: what, and what is known of it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for what, known in facts:
        grid.add_row(what, known)
    return grid
