"""Writing to a terminal what other machines and models say: as text, never as markup or control sequences.

A node's name comes from mDNS, where anybody may announce anything, and an answer from a model. An escape character in
them could retitle the window, move the cursor over other lines, or type on the person's behalf.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

_KEPT = "\n\t"


def printable(text: str) -> str:
    """The text with U+FFFD for every character that controls a terminal or the direction of writing."""
    if text.isprintable():
        return text
    return "".join(
        character if character in _KEPT or character.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


class PlainConsole(Console):
    """A console for tables and sentences that have strings of other machines in them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string on its way to the screen comes through here, those in tables too."""
        return super().render_str(printable(text), **options)
