"""A disk that is full, before or in the middle: a sentence that says so and where, and nothing left behind."""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from fleet.build_messages import BuildProgress
from fleet.data_dir import HOME_VARIABLE
from fleet.errors import ModelError
from shard_builder import build, building, verify
from shard_builder.check.array_files import save_array
from shard_builder.shard_files import NamedConstants, name_constants
from shard_builder.sources.child_work import run_child_work
from shard_builder.sources.kept_models import keep
from shard_builder.stream_faults import told_of_streams
from tests.shard_builder.desk import Desk

FULL = "No space left on device"


def fill(disk: Path) -> None:
    """Leaves not a byte free."""
    with (disk / "filler").open("ab") as filler:
        filler.write(bytes(shutil.disk_usage(disk).free))


def test_a_disk_of_50_mb(desk: Desk, small_disk: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(45 << 20))  # the tiny model needs little; what is left is less than a build may need
    assert re.search(r"need .* free", desk.refused("build", desk.model, "-o", small_disk / "shards", "--stages", 2))
    filler.unlink()
    monkeypatch.setenv(HOME_VARIABLE, str(small_disk))
    result = desk.run("build", smollm2_gguf, "-o", desk.folder / "shards", "--stages", 2)
    assert result.exit_code == 1
    assert re.search(r"needs .* on the disk of .*, which has .* free\.$", result.stderr)  # what it takes is told before
    assert not list(small_disk.iterdir())


def test_a_disk_that_fills_while_a_graph_is_written(
    desk: Desk, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_first(stage: ov.Model, numbers: dict[str, int]) -> NamedConstants:
        fill(small_disk)
        return name_constants(stage, numbers)

    monkeypatch.setattr(building, "name_constants", fill_first)
    with pytest.raises(ModelError, match=f"cannot be written to {small_disk / 'shards'}: {FULL}"):
        build(desk.model, small_disk / "shards", stages=2)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_graphs_for_an_npu_on_a_full_disk(desk: Desk, small_disk: Path) -> None:
    build(desk.model, small_disk / "shards", stages=2)
    fill(small_disk)
    before = set(small_disk.rglob("*"))
    refusal = desk.refused("npu", small_disk / "shards")
    assert f"cannot be written to {small_disk / 'shards'}: {FULL}." in refusal
    assert set(small_disk.rglob("*")) == before


def test_a_disk_that_fills_during_a_check(desk: Desk, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(desk.model, desk.folder / "shards", stages=2, check="none")
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))

    def fill_once_the_reference_is_there(progress: BuildProgress) -> None:
        if list(small_disk.glob("*/reference.json")):
            fill(small_disk)

    with pytest.raises(ModelError, match=f"hidden states .* cannot be written to {small_disk}.*: {FULL}"):
        verify(desk.folder / "shards", progress=fill_once_the_reference_is_there)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
    fill(small_disk)
    with pytest.raises(ModelError, match=f"reference cannot be written to {small_disk / 'logits'}: {FULL}"):
        verify(desk.folder / "shards", reference=small_disk / "logits")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_conversion_on_a_disk_that_fills(desk: Desk, small_disk: Path) -> None:
    def compress(scratch: Path) -> None:
        fill(small_disk)
        run_child_work(
            "shard_builder.sources.compress_weights",
            (str(desk.model / "openvino_model.xml"), str(scratch), '{"format":"fp16"}'),
            complaint="The model cannot be compressed",
            on_progress=lambda _: None,
            cancelled=lambda: False,
        )

    kept = small_disk / "home" / "converted-models"
    with pytest.raises(ModelError, match=rf"^Compressing it failed: {FULL} \({kept}\)\.$"):
        keep(kept / "model", 0, "Compressing it", compress)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_large_arrays_on_a_full_disk_name_the_reason(small_disk: Path) -> None:
    with pytest.raises(OSError, match=FULL) as raised:
        save_array(small_disk / "array.npy", np.zeros(60 << 18, np.float32))
    assert raised.value.errno == errno.ENOSPC


def test_arrays_are_written_as_numpy_reads_them(tmp_path: Path) -> None:
    for array in (np.arange(12, dtype=np.float32).reshape(3, 4).T, np.zeros((0, 5), np.int64), np.float32(3)):
        save_array(tmp_path / "array.npy", np.asarray(array))
        read = np.load(tmp_path / "array.npy")
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)


def test_other_errors_of_openvino_stay_what_they_are(tmp_path: Path) -> None:
    parameter = ops.parameter([2], np.float32)
    model = ov.Model([ops.result(parameter)], [parameter], "model")
    with pytest.raises(RuntimeError, match="nowhere"), told_of_streams(tmp_path):
        ov.Core().read_model(tmp_path / "nowhere.xml")
    with told_of_streams(tmp_path):
        ov.serialize(model, tmp_path / "model.xml", tmp_path / "model.bin")
    assert (tmp_path / "model.xml").is_file()
