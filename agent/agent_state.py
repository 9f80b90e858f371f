"""What an agent remembers between two starts besides trust and shards, and the lock that keeps it alone."""

from __future__ import annotations

from pathlib import Path

import filelock
import msgspec

from fleet.data_dir import create_data_dir, read_file, write_private
from fleet.errors import DataFolderError
from fleet.node import Port

STATE_FILE = "agent.json"
LOCK_FILE = "agent.lock"


class AgentState(msgspec.Struct, frozen=True, kw_only=True):
    """The ports stay the same where they are free, so that controllers find the agent before they hear it announced."""

    control_port: Port | None = None
    transfer_port: Port | None = None
    paused: bool = False


def load_state(data_dir: Path) -> AgentState:
    """The state kept, or a fresh one where none is or its file is damaged (nothing in it is precious)."""
    content = read_file(data_dir / STATE_FILE)
    if content is None:
        return AgentState()
    try:
        return msgspec.json.decode(content, type=AgentState)
    except msgspec.MsgspecError:
        return AgentState()


def keep_state(data_dir: Path, state: AgentState) -> None:
    """Write the state."""
    write_private(data_dir / STATE_FILE, msgspec.json.encode(state))


def lock_data_dir(data_dir: Path) -> filelock.BaseFileLock:
    """The lock of the one agent that may use a data folder; the operating system releases it when the process ends.

    Raises:
        DataFolderError: another agent runs with this folder.
    """
    lock = filelock.FileLock(create_data_dir(data_dir) / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise DataFolderError(
            f"An agent runs with the data folder {data_dir} already; stop it, or choose another folder with --data-dir."
        ) from None
    except OSError as error:
        raise DataFolderError(f"The data folder {data_dir} cannot be locked: {error.strerror}.") from None
    return lock
