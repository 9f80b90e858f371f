"""Colours by meaning, for a light and a dark scheme. Free of Qt, so that contrast is tested without a screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scheme = Literal["light", "dark"]
SchemeChoice = Literal["auto", "light", "dark"]


@dataclass(frozen=True)
class Tokens:
    """Colours as ``#rrggbb``. Names say what a colour is for, never what it looks like.

    Text tokens (``text*``, ``ok``, ``warning``, ``error``, ``planned``, ``accent``) are read on ``window``,
    ``surface`` and ``raised``, and reach a contrast of 4.5 on each of them.
    """

    window: str
    surface: str
    raised: str
    hover: str
    border: str
    border_strong: str
    text: str
    text_muted: str
    accent: str
    accent_fill: str
    accent_fill_hover: str
    text_on_accent: str
    accent_soft: str
    ok: str
    warning: str
    error: str
    planned: str
    ok_soft: str
    warning_soft: str
    error_soft: str
    bar_track: str
    bar_weights: str
    bar_cache: str
    bar_runtime: str
    bar_used: str
    bar_over: str
    code_ground: str
    stages: tuple[str, ...]
    """Fills of the stages' layer blocks, in turn; ``text_on_stage`` is read on each."""
    text_on_stage: str


LIGHT = Tokens(
    window="#f4f6f9",
    surface="#ffffff",
    raised="#f8fafc",
    hover="#eaf0f8",
    border="#d8dfe8",
    border_strong="#76859a",
    text="#16202c",
    text_muted="#4f5d70",
    accent="#0f58b8",
    accent_fill="#1560c4",
    accent_fill_hover="#0f4fa6",
    text_on_accent="#ffffff",
    accent_soft="#e3edfb",
    ok="#11693a",
    warning="#855000",
    error="#b0211a",
    planned="#6a3fb0",
    ok_soft="#e2f4e9",
    warning_soft="#fdf0d9",
    error_soft="#fde8e6",
    bar_track="#e4e9f0",
    bar_weights="#3b7ddd",
    bar_cache="#27a08a",
    bar_runtime="#9a7bd6",
    bar_used="#6f8db5",
    bar_over="#d4382f",
    code_ground="#eef2f7",
    stages=("#b9d4f8", "#b5e4d8", "#dccdf6", "#f6d9b0", "#f5c6d3", "#c3e3b0"),
    text_on_stage="#16202c",
)

DARK = Tokens(
    window="#12171e",
    surface="#1a212b",
    raised="#202936",
    hover="#273242",
    border="#313d4d",
    border_strong="#6c7d93",
    text="#e7edf5",
    text_muted="#a3b1c4",
    accent="#7db4ff",
    accent_fill="#2f74d8",
    accent_fill_hover="#2566c4",
    text_on_accent="#ffffff",
    accent_soft="#1f3350",
    ok="#63cf92",
    warning="#efb457",
    error="#ff8f85",
    planned="#c3a3ff",
    ok_soft="#17382a",
    warning_soft="#3d3019",
    error_soft="#46211f",
    bar_track="#2c3747",
    bar_weights="#5b9cf5",
    bar_cache="#3fbfa6",
    bar_runtime="#ad8cec",
    bar_used="#7f9bc0",
    bar_over="#f0645a",
    code_ground="#141b24",
    stages=("#24508c", "#1e6154", "#54408a", "#74501d", "#7a3a4e", "#3d6128"),
    text_on_stage="#f3f7fc",
)


def tokens_of(scheme: Scheme) -> Tokens:
    return DARK if scheme == "dark" else LIGHT


def relative_luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, 0 to 1 (WCAG 2.2, definition of relative luminance)."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2, success criterion 1.4.3)."""
    light, dark = sorted((relative_luminance(first), relative_luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


_PLAIN_TEXT_GROUNDS = ("accent_soft", "ok_soft", "warning_soft", "error_soft", "code_ground")


def text_pairs(tokens: Tokens) -> list[tuple[str, str, str]]:
    """Every (what, text colour, ground colour) that the windows draw."""
    grounds = {name: getattr(tokens, name) for name in ("window", "surface", "raised", "hover")}
    texts = {
        name: getattr(tokens, name) for name in ("text", "text_muted", "accent", "ok", "warning", "error", "planned")
    }
    pairs = [(f"{text} on {ground}", texts[text], grounds[ground]) for text in texts for ground in grounds]
    pairs += [
        (f"{name} on {name}_soft", texts[name], getattr(tokens, f"{name}_soft")) for name in ("ok", "warning", "error")
    ]
    pairs += [(f"text on {name}", tokens.text, getattr(tokens, name)) for name in _PLAIN_TEXT_GROUNDS]
    pairs += [
        (f"{name} on accent_soft", texts[name], tokens.accent_soft) for name in ("text_muted", "accent", "planned")
    ]
    pairs += [("text_muted on code_ground", tokens.text_muted, tokens.code_ground)]
    pairs += [
        ("text_on_accent on accent_fill", tokens.text_on_accent, tokens.accent_fill),
        ("text_on_accent on accent_fill_hover", tokens.text_on_accent, tokens.accent_fill_hover),
    ]
    pairs += [
        (f"text_on_stage on stage {index}", tokens.text_on_stage, fill) for index, fill in enumerate(tokens.stages)
    ]
    return pairs
