"""What the placement planner needs to know of a model, from its shard folder or from the model itself."""

from __future__ import annotations

from pathlib import Path

from fleet.manifest import MANIFEST_NAME, Manifest, load_manifest


def model_facts(path: Path) -> Manifest:
    """The manifest of a shard folder, or that of a model as it would be without any cut.

    Raises:
        ModelError: the path is neither.
    """
    if (path / MANIFEST_NAME).is_file():
        return load_manifest(path)
    from shard_builder.uncut import describe_uncut

    return describe_uncut(path)
