"""Says of a shard folder that nobody knows yet whether it gives the whole model's answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.local_fleet import tell_on_stderr

if TYPE_CHECKING:
    from fleet.manifest import Manifest
    from shard_builder import Inspection


def tell_if_unchecked(folder: Path, described: Manifest | Inspection) -> None:
    """One sentence on standard error where the shards were never checked; nothing for a model that is not yet cut."""
    if described.stages and described.verification is None:
        tell_on_stderr(
            f"The shards in {folder} have not been checked against the whole model; do that with "
            f"'paceline shard verify {folder}'."
        )
