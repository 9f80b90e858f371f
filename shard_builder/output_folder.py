"""The place where a shard folder is made: aside under a hidden name, and put in place once it is complete.

A build that ends, however it ends, leaves nothing behind: a build that is cancelled or fails clears up after itself,
and what one leaves that was killed or lost its power is cleared by the next build of the same output.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from fleet.errors import ModelError
from fleet.manifest import MANIFEST_NAME
from shard_builder.made_folders import made_folder

_REPLACED = "replaced-shards"
"""Within a scratch folder: the earlier shard folder, until the new one is in its place."""


def check_output(output: Path) -> None:
    """Refuses to replace anything but an empty folder or a shard folder.

    Raises:
        ModelError: there is something else, or it cannot be read.
    """
    try:
        if not output.exists():
            return
        if output.is_dir() and ((output / MANIFEST_NAME).is_file() or not any(output.iterdir())):
            return
    except OSError as error:
        raise ModelError(f"{output} cannot be read: {error.strerror}.") from None
    raise ModelError(f"{output} exists and is not a shard folder; give another folder for the shards.")


@contextlib.contextmanager
def scratch_folder(output: Path) -> Iterator[Path]:
    """An empty folder beside ``output``, on the same disk; gone afterwards, and folders made for it too if all failed.

    Raises:
        ModelError: it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(made_folder(output.absolute().parent))
            _clear_abandoned(output)
            # Not a private temporary folder: it becomes the shard folder, with the permissions that others have.
            scratch = output.absolute().with_name(f".{output.name}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")
            scratch.mkdir()
        except OSError as error:
            raise ModelError(f"The shards cannot be written to {output}: {error.strerror}.") from None
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def put_in_place(scratch: Path, output: Path) -> None:
    """Gives a complete shard folder its name; an earlier one is there until that moment.

    Raises:
        OSError: it cannot be renamed; the earlier one is in its place again.
    """
    if not output.exists():
        scratch.replace(output)
        return
    aside = scratch.with_name(f"{scratch.name}-{_REPLACED}")
    output.replace(aside)
    try:
        scratch.replace(output)
    except OSError:
        aside.replace(output)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _clear_abandoned(output: Path) -> None:
    """Removes what builds of the same output left on this PC whose process is gone."""
    parent = output.absolute().parent
    pattern = re.compile(rf"\.{re.escape(output.name)}-{_host()}-(\d+)-[0-9a-f]{{8}}(-{_REPLACED})?")
    for folder in sorted(parent.iterdir()):
        match = pattern.fullmatch(folder.name)
        if match is None or _owns(int(match[1]), folder):
            continue
        if match[2] and not output.exists():
            folder.replace(output)  # the build was killed between the two renames
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _owns(process: int, folder: Path) -> bool:
    """Whether the process runs that made the folder; another may have its number since."""
    try:
        return psutil.Process(process).create_time() <= folder.stat().st_mtime
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
    except psutil.AccessDenied:
        return True


def _host() -> str:
    """Tells PCs apart that build into one network folder: a process number means something on its own PC only."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
