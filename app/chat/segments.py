"""Splits Markdown into prose and fenced code, so that each is shown by a widget of its own. Free of Qt."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPENING = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$")


@dataclass(frozen=True)
class Segment:
    """A part of an answer. ``language`` is None for prose; for code it is what the fence says, possibly empty.

    ``closed`` code has its closing fence; prose is closed by the code that follows it.
    """

    text: str
    language: str | None = None
    closed: bool = True

    @property
    def is_code(self) -> bool:
        return self.language is not None


def split_markdown(text: str) -> list[Segment]:
    """Prose and code blocks in order (CommonMark 0.31, 4.5 fenced code blocks).

    Only fences at the document's own level are split off; fences inside lists and quotes stay in their prose. A text
    that grows only ever changes the last segment or adds to the list, except for an unfinished fence line at its end.
    """
    segments: list[Segment] = []
    lines: list[str] = []
    fence, language = "", ""
    for line in text.split("\n"):
        if fence:
            if _closes(line, fence):
                segments.append(Segment("\n".join(lines), language))
                lines, fence = [], ""
            else:
                lines.append(line)
            continue
        opening = _OPENING.match(line)
        if opening is None:
            lines.append(line)
            continue
        _add_prose(segments, lines, closed=True)
        fence, language, lines = opening[1], opening[2], []
    if fence:
        segments.append(Segment("\n".join(lines), language, closed=False))
    else:
        _add_prose(segments, lines, closed=False)
    return segments


def finished_length(prose: str) -> int:
    """How much of growing prose, from its start, is whole blocks: up to and with the last blank line."""
    end = prose.rfind("\n\n")
    return 0 if end < 0 else end + 2


def _closes(line: str, fence: str) -> bool:
    stripped = line.strip()
    indent = len(line) - len(line.lstrip(" "))
    return indent <= 3 and len(stripped) >= len(fence) and set(stripped) == {fence[0]}


def _add_prose(segments: list[Segment], lines: list[str], *, closed: bool) -> None:
    text = "\n".join(lines)
    if text.strip():
        segments.append(Segment(text.strip("\n") if closed else text.lstrip("\n"), closed=closed))
