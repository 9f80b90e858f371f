"""Adds graphs for an NPU to a shard folder, once they were found to give the dynamic shards' logits on a CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import openvino as ov

from fleet.build_messages import BuildProgress
from fleet.errors import ModelError
from fleet.manifest import Manifest, NpuForm, NpuGraphs, NpuSlots, load_manifest
from shard_builder.check.verification import check_files, replace_manifest
from shard_builder.forms.npu_check import check_static, is_noise
from shard_builder.forms.npu_form import NpuSizes, write_static_graph
from shard_builder.reporting import Reporter
from shard_builder.shard_files import file_entry

DEFAULT_CONTEXT_TOKENS = 1024
DEFAULT_CHUNK_TOKENS = 128
SMALLEST_CONTEXT_TOKENS = 32
_SLOTS: tuple[NpuSlots, ...] = ("any", "adjacent")
"""The first is less work for the host."""


def prepare_npu(
    folder: Path,
    *,
    context_tokens: int | None = None,
    chunk_tokens: int | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Manifest:
    """Writes every stage's static graphs beside its shard and records them in the manifest.

    Args:
        folder: the shard folder.
        context_tokens: slots of every cache; 1,024 by default, or less where the model was trained for less or switches
            its rotary frequencies earlier.
        chunk_tokens: new tokens per call of the prompt's graph; 128 by default, or half of a smaller context.
        progress: hears how far it is.
        cancelled: asked with every report of progress; True stops it.

    Returns:
        The new manifest.

    Raises:
        ModelError: a stage cannot be made static, or its static graphs give other logits. The folder is as it was.
        CancelledError: ``cancelled`` said so. The folder is as it was.
    """
    reporter = Reporter(progress, cancelled)
    manifest = load_manifest(folder)
    sizes = _choose_sizes(manifest, context_tokens, chunk_tokens)
    check_files(folder, manifest, reporter)
    core = ov.Core()
    tick = reporter.steps("write", 2 * len(manifest.stages))
    try:
        with tempfile.TemporaryDirectory(prefix=".npu-", dir=folder) as scratch:
            graphs = []
            for stage in manifest.stages:
                files = []
                for kind, tokens in (("chunk", sizes.chunk_tokens), ("step", 1)):
                    file = Path(scratch) / f"stage-{stage.stage}.npu-{kind}-{tokens}-of-{sizes.context_tokens}.xml"
                    with tempfile.TemporaryDirectory(dir=scratch) as drafts:
                        write_static_graph(core, folder, stage, sizes.context_tokens, tokens, file, Path(drafts))
                    tick()
                    files.append(file)
                graphs.append(files)
            reporter.report("verify", 0.0)
            for slots in _SLOTS:
                check = check_static(core, folder, manifest, graphs, sizes, slots, reporter.check)
                reporter.check()
                if is_noise(check):
                    break
            else:
                raise ModelError(
                    f"{manifest.name} has no form for an NPU: its static graphs give other logits (largest difference "
                    f"{check.max_abs_diff:.3g}). It takes the number of past tokens from the length of its caches, "
                    "which is the same at every step there."
                )
            stages = tuple(
                msgspec.structs.replace(stage, npu=NpuGraphs(chunk=file_entry(files[0]), step=file_entry(files[1])))
                for stage, files in zip(manifest.stages, graphs, strict=True)
            )
            form = NpuForm(
                context_tokens=sizes.context_tokens,
                chunk_tokens=sizes.chunk_tokens,
                slots=slots,
                max_abs_diff=check.max_abs_diff,
                logit_range=check.logit_range,
                greedy_match=check.greedy_match,
            )
            renewed = msgspec.structs.replace(manifest, stages=stages, npu=form)
            for file in (file for files in graphs for file in files):
                file.replace(folder / file.name)
            replace_manifest(folder, renewed)
    except OSError as error:
        raise ModelError(f"The graphs for an NPU cannot be written to {folder}: {error.strerror}.") from None
    finally:
        _remove_unlisted(folder)
    reporter.finish()
    return renewed


def _choose_sizes(manifest: Manifest, context_tokens: int | None, chunk_tokens: int | None) -> NpuSizes:
    trained = manifest.context_tokens
    switch = manifest.step_switch_tokens
    # With a chunk of half of it, the default context stays on one side of a switch.
    default = min(DEFAULT_CONTEXT_TOKENS, trained or DEFAULT_CONTEXT_TOKENS, switch * 2 // 3 or DEFAULT_CONTEXT_TOKENS)
    context = context_tokens or default
    chunk = chunk_tokens or min(DEFAULT_CHUNK_TOKENS, context // 2)
    if context < SMALLEST_CONTEXT_TOKENS or (trained and context > trained):
        most = f" and at most the {trained:,} that the model was trained for" if trained else ""
        raise ModelError(
            f"A context of {context:,} tokens does not do; it takes at least {SMALLEST_CONTEXT_TOKENS}{most}."
        )
    if not 2 <= chunk <= context // 2:
        raise ModelError(f"A chunk of {chunk:,} tokens does not do; it takes 2 to half of the context of {context:,}.")
    if switch and context + chunk > switch:
        raise ModelError(
            f"A context of {context:,} tokens with chunks of {chunk:,} does not do: a step that reaches beyond "
            f"{switch:,} tokens is computed with other rotary frequencies, and prompts for an NPU go in chunks; both "
            f"together may be at most {switch:,}."
        )
    return NpuSizes(context, chunk)


def _remove_unlisted(folder: Path) -> None:
    """Removes graphs for an NPU that the folder's manifest does not list: of other sizes, or of a try that failed."""
    listed = {entry.name for entry in load_manifest(folder).files}
    for path in folder.glob("stage-*.npu-*.xml"):
        if path.name not in listed:
            path.unlink(missing_ok=True)
