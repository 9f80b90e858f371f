"""The page of architectures: complete, and plain about what is not as it should be."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from fleet.manifest import CutTensor, FileEntry, Manifest, PagedForm, Stage, Verification

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; the scripts of ``docs`` import each other as what lies beside them."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("architecture_table")


def cut_model(max_abs_diff: float = 0.0, **traits: Any) -> Manifest:
    """A manifest with two stages, of which the second takes two tensors."""
    crossing = (CutTensor("residual", 48, "f32"), CutTensor("gate", 6, "f32"))
    file = FileEntry("stage.bin", 0, "0" * 64)
    stages = tuple(
        Stage(
            stage=number,
            first_layer=number,
            end_layer=number + 1,
            bytes=0,
            graph=file,
            weights=file,
            runs=(),
            inputs=(),
            fused_attention=1,
            expected_attention=1,
            cut_tensors=crossing if number else (),
        )
        for number in range(2)
    )
    return Manifest(
        manifest_version=1,
        model_id="0",
        name="tiny",
        architecture="llama",
        hidden_size=48,
        vocabulary_size=320,
        context_tokens=256,
        kv_precision="f16",
        layers=(),
        runs=(),
        stages=stages,
        tokenizer=(),
        stop_token_ids=(),
        verification=Verification(max_abs_diff, 1.0, "CPU", "f16", "2026.4"),
        **traits,
    )


def test_the_page_has_a_row_for_every_model_in_order(table: Any) -> None:
    page = (DOCS / "architectures.md").read_text(encoding="utf-8")
    rows = table.read_rows(page)
    assert list(rows) == [model.name for model in (*table.NAMED_ARCHITECTURES, *table.FURTHER_ARCHITECTURES)]
    assert table.fill_page(rows) == page


def test_a_row_says_what_the_checks_found(table: Any) -> None:
    llama = table.NAMED_ARCHITECTURES[0]
    paged = PagedForm(served=False, reason="It gives other logits (largest difference 0.3).")
    row = table.row_of(llama, [cut_model(rollback=("mask", "trim"), paged=paged), cut_model(rollback=("trim",))])
    assert row.fault == ""
    assert row.text == (
        "| llama | rotary | grouped | 0.0, 0.0 | 2/2, 2/2 | mask, trim; trim | no; not tried | "
        "up to 2 tensors cross a cut (48 + 6 numbers); It gives other logits |"
    )


def test_a_difference_is_a_fault_and_so_is_the_refusal_of_a_named_architecture(table: Any) -> None:
    llama = table.NAMED_ARCHITECTURES[0]
    assert "differ by 0.25" in table.row_of(llama, [cut_model(), cut_model(0.25)]).fault
    refused = table.row_of(llama, "refused: it has | no states")
    assert "no states" in refused.fault
    assert r"it has \| no states |" in refused.text
    assert table.row_of(table.FURTHER_ARCHITECTURES[0], "refused: it has no states").fault == ""
