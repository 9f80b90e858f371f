"""What a build leaves beside its output: the shards or nothing, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fleet.errors import ModelError
from fleet.manifest import MANIFEST_NAME
from shard_builder.output_folder import check_output, put_in_place, scratch_folder

KILLED = """
import os, sys
from pathlib import Path
from shard_builder.output_folder import put_in_place, scratch_folder

output = Path(sys.argv[1])
with scratch_folder(output) as scratch:
    (scratch / "stage-0.bin").write_bytes(b"half")
    if sys.argv[2] == "between":
        output.replace(scratch.with_name(f"{scratch.name}-replaced-shards"))
    os.kill(os.getpid(), 9) if sys.platform != "win32" else os._exit(9)
"""


def killed_build(output: Path, when: str) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(output), when], check=False)
    assert ended.returncode != 0


def test_a_failed_build_leaves_neither_scratch_nor_the_folders_made_for_it(tmp_path: Path) -> None:
    failing = scratch_folder(tmp_path / "new" / "deep" / "shards")
    scratch = failing.__enter__()
    (scratch / "stage-0.bin").write_bytes(b"half")
    error = ModelError("The disk is full.")
    assert not failing.__exit__(ModelError, error, None)
    assert not list(tmp_path.iterdir())


def test_folders_that_were_there_stay(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ModelError), scratch_folder(tmp_path / "mine" / "shards"):
        raise ModelError("No.")
    assert (tmp_path / "mine").is_dir()


def test_a_complete_folder_is_put_in_place_of_an_earlier_one(tmp_path: Path) -> None:
    output = tmp_path / "new" / "shards"
    for content in ("one", "two"):
        with scratch_folder(output) as scratch:
            (scratch / MANIFEST_NAME).write_text(content)
            put_in_place(scratch, output)
    assert (output / MANIFEST_NAME).read_text() == "two"
    assert [path.name for path in output.parent.iterdir()] == ["shards"]


def test_what_a_killed_build_left_is_removed_by_the_next_and_another_build_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "shards"
    killed_build(output, "before")
    left = list(tmp_path.iterdir())
    assert [path.name.startswith(".shards-") for path in left] == [True]
    with scratch_folder(output) as running:
        assert list(tmp_path.iterdir()) == [running]
        with scratch_folder(output) as other:
            assert sorted(tmp_path.iterdir()) == sorted([running, other])
    assert not list(tmp_path.iterdir())


def test_a_build_killed_between_two_names_gives_the_earlier_shards_back(tmp_path: Path) -> None:
    output = tmp_path / "shards"
    output.mkdir()
    (output / MANIFEST_NAME).write_text("earlier")
    killed_build(output, "between")
    assert not output.exists()
    with scratch_folder(output):
        assert (output / MANIFEST_NAME).read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [output]


def test_nothing_but_shards_and_empty_folders_is_replaced(tmp_path: Path) -> None:
    check_output(tmp_path)
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(ModelError, match="is not a shard folder"):
        check_output(tmp_path)
