"""What needs torch, transformers, Optimum and NNCF, which come with the ``export`` extra alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from fleet.errors import ModelError

EXPORT_PACKAGES = ("openvino", "openvino-tokenizers", "optimum-intel", "transformers", "torch")
LIBRARIES_BYTES = 900_000_000
"""Memory that torch, transformers, Optimum and NNCF take by themselves."""
COMPRESSION_PACKAGES = ("openvino", "nncf")


def require_export_extra(modules: Sequence[str], purpose: str) -> None:
    """Says how to install what is not there.

    Raises:
        ModelError: one of the modules is missing. The sentence begins with ``purpose``.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ModelError(
            f"{purpose} needs the export extra ({', '.join(missing)} missing): install it with "
            "pip install 'paceline[export]', or run with uv run --extra export."
        )
