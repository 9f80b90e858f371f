"""Keeps OpenVINO from telling its maker over the internet that it is used.

``import openvino`` sends an event to Google Analytics and keeps a client number in the home folder
(``openvino/tools/ovc/__init__.py``, package ``openvino-telemetry``), unless the person has opted out with a tool of its
own. What runs on the PCs of a fleet is nobody else's business, and many networks hold such a request up or report it.
"""

from __future__ import annotations

import sys

_PACKAGE = "openvino_telemetry"


def forbid_openvino_telemetry() -> None:
    """Call before ``import openvino``, which takes its own stub where the telemetry package cannot be imported."""
    sys.modules[_PACKAGE] = None  # type: ignore[assignment]
