"""The rows of docs/architectures.md, and the page around them. Knows neither exporters nor builds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from further_architectures import FURTHER_ARCHITECTURES
from named_architectures import NAMED_ARCHITECTURES
from tiny_model import TinyModel

from fleet.manifest import Manifest

PAGE = """# Architectures

Each row is a model of random weights, exported by Optimum Intel, cut in 2 and in 3 stages, and compared with the whole
model on the CPU in f32: prompts of several lengths (over the sliding window where there is one), single steps, chunks
after a past, a batch of three with padding, and reordering by beam. `python docs/make_architectures.py` writes this
page; the tests that need the `export` extra fail where it is out of date or a difference is not 0.

- **Difference**: the largest absolute difference of any logit, cut in 2 and in 3 stages.
- **Fused**: attention layers that the CPU plugin fuses with their cache, of those that have one, in both cuts.
- **Rollback**: how rejected drafts may be taken back: by a 0 in the attention mask, or by trimming the caches.
- **Paged**: whether the shards may be served with paged attention, which rolls back and batches freely.

## Tried with every change

{named}

## Further forms and architectures

Made with `--all`. Where a version of transformers is given, the one that the `export` extra pins does not export the
model. Optimum Intel also exports models whose code comes from a hub; those are not here.

{further}
"""
HEAD = """| Architecture | Positions | Attention | Difference | Fused | Rollback | Paged | Remarks |
|---|---|---|---|---|---|---|---|"""

_WHERE_AND_HOW_MUCH = re.compile(r"^Stage [^:]*: | \(largest difference [^)]*\)")


@dataclass(frozen=True)
class Row:
    """One line of a table; ``fault`` says what is wrong with it, if anything is."""

    name: str
    text: str
    fault: str = ""


def row_of(model: TinyModel, found: Sequence[Manifest] | str) -> Row:
    """The row of a model, given the manifests of its cuts, or why there are none.

    A difference is a fault; a refusal only of a named architecture.
    """
    if isinstance(found, str):
        fault = f"{model.name}: {found}" if model in NAMED_ARCHITECTURES else ""
        return Row(model.name, _line(model, "", "", "", "", [found]), fault)
    differences = [_max_abs_diff(manifest) for manifest in found]
    fused = [
        f"{sum(stage.fused_attention for stage in manifest.stages)}/"
        f"{sum(stage.expected_attention for stage in manifest.stages)}"
        for manifest in found
    ]
    cells = (
        ", ".join(f"{difference:.3g}" if difference else "0.0" for difference in differences),
        ", ".join(fused),
        _same(", ".join(manifest.rollback) or "none" for manifest in found),
        _same(_paged(manifest) for manifest in found),
    )
    fault = f"{model.name}: the logits differ by {max(differences):.3g}." if any(differences) else ""
    return Row(model.name, _line(model, *cells, _remarks(found)), fault)


def _line(model: TinyModel, difference: str, fused: str, rollback: str, paged: str, remarks: Sequence[str]) -> str:
    version = [f"transformers {model.transformers}"] if model.transformers else []
    remark = "; ".join([*version, *remarks]).replace("|", "\\|")
    cells = (model.name, model.positions, model.attention, difference, fused, rollback, paged, remark)
    return f"| {' | '.join(cells)} |"


def _same(found: Iterable[str]) -> str:
    """One word for all cuts, or one for each."""
    words = list(found)
    return words[0] if len(set(words)) == 1 else "; ".join(words)


def _max_abs_diff(manifest: Manifest) -> float:
    if manifest.verification is None:
        raise ValueError("A model was cut without a check.")
    return manifest.verification.max_abs_diff


def _paged(manifest: Manifest) -> str:
    if manifest.paged is None:
        return "not tried"
    return "yes" if manifest.paged.served else "no"


def _remarks(found: Sequence[Manifest]) -> list[str]:
    """What sets the cuts of this model apart, without figures that depend on the PC."""
    remarks = []
    stages = [stage for manifest in found for stage in manifest.stages]
    widths = {tuple(tensor.width for tensor in stage.cut_tensors) for stage in stages if len(stage.cut_tensors) > 1}
    if widths:
        most = max(widths, key=len)
        remarks.append(f"up to {len(most)} tensors cross a cut ({' + '.join(str(width) for width in most)} numbers)")
    rules = sorted({fault.rule for stage in stages for fault in stage.fusion_faults if "CPU" in fault.plugins})
    if rules:
        remarks.append(f"not fused because of {', '.join(rules)}")
    reasons = {manifest.paged.reason for manifest in found if manifest.paged is not None and not manifest.paged.served}
    if reasons:
        remarks.append(_WHERE_AND_HOW_MUCH.sub("", min(reasons)).rstrip("."))
    return remarks


def read_rows(page: str) -> dict[str, str]:
    """The rows of a page by name, so that those that are not made anew can stay."""
    return {line.split(" | ")[0][2:]: line for line in page.splitlines() if line.startswith("| ") and line not in HEAD}


def fill_page(rows: Mapping[str, str]) -> str:
    """The page with a row for every model that has one."""
    named, further = (
        "\n".join([HEAD, *(rows[model.name] for model in models if model.name in rows)])
        for models in (NAMED_ARCHITECTURES, FURTHER_ARCHITECTURES)
    )
    return PAGE.format(named=named, further=further)
