from __future__ import annotations

import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleet.data_dir import HOME_VARIABLE, default_data_dir, write_private
from fleet.errors import DataFolderError
from fleet.identity import IDENTITY_FILE, Identity, is_public_key, load_or_create_identity, node_id_of


def test_identity_is_made_once_and_kept(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path / "new" / "folder")
    assert load_or_create_identity(tmp_path / "new" / "folder") == first
    assert is_public_key(first.public_key)
    assert first.node_id == node_id_of(first.public_key)
    assert len(first.node_id) == 16


@pytest.mark.parametrize("text", ["", "0" * 39, "0" * 41, " " * 40, "\u0661" * 40, "#" * 40, "0" * 35 + "%nSc1"])
def test_what_libzmq_takes_for_no_key_is_none(text: str) -> None:
    assert not is_public_key(text)


def test_the_largest_group_of_a_key_is_one() -> None:
    assert is_public_key("0" * 35 + "%nSc0")


def test_callers_at_once_get_one_identity(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        identities = set(pool.map(load_or_create_identity, [tmp_path] * 16))
    assert len(identities) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX file modes")
def test_only_the_owner_reads_the_key(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path)
    assert stat.S_IMODE((tmp_path / IDENTITY_FILE).stat().st_mode) == 0o600


def test_a_damaged_key_is_an_error_and_not_a_new_identity(tmp_path: Path) -> None:
    (tmp_path / IDENTITY_FILE).write_bytes(b"\xff\x00 not a key")
    with pytest.raises(DataFolderError, match="does not hold a key"):
        load_or_create_identity(tmp_path)
    assert (tmp_path / IDENTITY_FILE).read_bytes() == b"\xff\x00 not a key"


def test_the_secret_does_not_show_in_logs() -> None:
    identity = Identity.generate()
    assert identity.secret_key not in repr(identity)


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_private(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DataFolderError, match="No space left"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_environment_chooses_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    assert default_data_dir() == tmp_path
    monkeypatch.delenv(HOME_VARIABLE)
    assert default_data_dir().name == "paceline"
