"""Cuts an OpenVINO language model into shards that give the same logits as the whole model.

``build`` makes a shard folder, ``verify`` runs it against the whole model again, ``inspect`` tells what is in a model
or a shard folder, ``diff`` compares two shard folders, and ``prepare_npu`` adds graphs of static shape to one. Each
returns plain data and raises ``fleet.errors.PacelineError``, whose text is a sentence for people. ``docs/cutting.md``
explains the cut.
"""

# ruff: noqa: E402 - the call must come before the modules that import OpenVINO
from fleet.telemetry import forbid_openvino_telemetry

forbid_openvino_telemetry()

from shard_builder.building import build
from shard_builder.check.verification import Check, verify
from shard_builder.difference import Difference, diff
from shard_builder.forms.npu import prepare_npu
from shard_builder.inspection import Inspection, inspect

__all__ = ["Check", "Difference", "Inspection", "build", "diff", "inspect", "prepare_npu", "verify"]
