"""Hostile names and answers reach the terminal as text."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from fleet.node import NodeId
from fleet.views import FleetView, NodeView
from paceline.fleet_commands import show_nodes
from paceline.terminal import PlainConsole, printable

HOSTILE = (
    "[/nope]",
    "[bold red]evil[/]",
    "[link=http://x]y[/link]",
    "\x1b]0;owned\x07",
    "a\x1b[2Jb",
    "\u202eexe",
    "\x9b2J",
)


@given(st.text())
def test_nothing_that_controls_a_terminal_is_left(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert all(character in "\n\t" or character.isprintable() for character in shown)
    assert printable(shown) == shown


@pytest.mark.parametrize("text", HOSTILE)
def test_strings_in_tables_and_sentences_are_shown_as_they_are(text: str) -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, width=120, force_terminal=True, color_system=None)
    table = Table("name")
    table.add_row(text)
    console.print(table)
    console.print(f"{text} is left out")
    assert out.getvalue().count(printable(text)) == 2
    assert not any(control in out.getvalue() for control in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e"))


def test_a_node_with_any_name_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = tuple(
        NodeView(NodeId(f"{number:016x}"), name, "found", "", ("10.0.0.1",), "k" * 40)
        for number, name in enumerate(HOSTILE)
    )
    show_nodes(FleetView(nodes=nodes))
    shown = capsys.readouterr().out
    assert "[/nope]" in shown
    assert "\x1b" not in shown
