"""The page about cutting keeps its word: its program runs, and its drawing is of the bundled model."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.manifest import load_manifest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_program_runs(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (DOCS / "cutting.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tiny_model().parent)
    exec(compile(program, "cutting.md", "exec"), {})
    assert "first layers of the later stages: (2,)" in capsys.readouterr().out
    assert len(load_manifest(Path("shards")).stages) == 2


def test_the_page_names_what_there_is() -> None:
    text = (DOCS / "cutting.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (DOCS / link).is_file()


def test_the_drawing_is_of_the_bundled_model(smollm2_two_stages: Path) -> None:
    manifest = load_manifest(smollm2_two_stages)
    texts = [element.text or "" for element in ElementTree.parse(DOCS / "cut.svg").getroot().iter()]
    cut = manifest.stages[1]
    assert f"{manifest.name}, cut before layer {cut.first_layer}" in texts
    assert any(f"f32 [batch, tokens, {manifest.hidden_size}]" in text for text in texts)
    assert any(f"{manifest.layers[cut.first_layer].bytes:,} bytes" in text for text in texts)
