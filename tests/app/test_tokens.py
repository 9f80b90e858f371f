"""Every text that the windows draw can be read, in both schemes."""

from __future__ import annotations

import pytest

from app.looks.tokens import DARK, LIGHT, Tokens, contrast, text_pairs


@pytest.mark.parametrize("tokens", [LIGHT, DARK], ids=["light", "dark"])
def test_every_text_reaches_the_contrast_of_wcag_aa(tokens: Tokens) -> None:
    weak = {what: contrast(text, ground) for what, text, ground in text_pairs(tokens) if contrast(text, ground) < 4.5}
    assert weak == {}


@pytest.mark.parametrize("tokens", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_that_mark_controls_reach_the_contrast_of_wcag_aa_for_graphics(tokens: Tokens) -> None:
    for ground in (tokens.surface, tokens.window):
        assert contrast(tokens.accent, ground) >= 3
        assert contrast(tokens.border_strong, ground) >= 3


def test_contrast_follows_the_definition_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert contrast("#123456", "#123456") == 1
