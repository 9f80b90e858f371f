"""Fixtures of the stage tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_ir(smollm2_gguf: Path, converted_models: Path) -> Path:
    """The folder of the whole small model, as the builder converts it before the cut."""
    from shard_builder.sources.ways_in import open_source

    return open_source(smollm2_gguf, converted_models).folder
