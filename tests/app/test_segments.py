"""Splitting an answer into prose and code."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.chat.segments import Segment, finished_length, split_markdown

MARKDOWN = st.text(alphabet=st.sampled_from(list("`~ab \n#-")), max_size=120)


def test_prose_and_code_alternate() -> None:
    text = "Look:\n\n```python\nprint(1)\n\nprint(2)\n```\nDone.\n\n~~~\nplain\n~~~"
    assert split_markdown(text) == [
        Segment("Look:"),
        Segment("print(1)\n\nprint(2)", "python"),
        Segment("Done."),
        Segment("plain", ""),
    ]


def test_code_without_its_closing_fence_is_open() -> None:
    assert split_markdown("```c\nint x;") == [Segment("int x;", "c", closed=False)]


def test_prose_at_the_end_is_open() -> None:
    assert split_markdown("Hello") == [Segment("Hello", closed=False)]


def test_a_shorter_or_other_fence_does_not_close_a_block() -> None:
    assert split_markdown("````\n```\n~~~~\n````") == [Segment("```\n~~~~", "")]


def test_an_indented_fence_belongs_to_its_list() -> None:
    assert [segment.is_code for segment in split_markdown("- one\n\n    ```\n    x\n    ```")] == [False]


def test_inline_code_is_prose() -> None:
    assert split_markdown("use ```x``` here") == [Segment("use ```x``` here", closed=False)]


def test_finished_prose_ends_with_the_last_blank_line() -> None:
    assert finished_length("one\n\ntwo\n\nthr") == len("one\n\ntwo\n\n")
    assert finished_length("one") == 0


@given(MARKDOWN)
def test_no_word_is_lost_and_closed_segments_stay(text: str) -> None:
    segments = split_markdown(text)
    shown = "".join(segment.text for segment in segments)
    assert shown.count("a") <= text.count("a")
    assert all(segment.closed for segment in segments[:-1])


@given(MARKDOWN, MARKDOWN)
def test_growing_text_changes_only_the_end(start: str, more: str) -> None:
    """Whatever follows whole lines leaves all segments but the last one as they were."""
    before = split_markdown(start + "\n")
    after = split_markdown(start + "\n" + more)
    settled = [segment for segment in before if segment.closed]
    assert after[: len(settled)] == settled
