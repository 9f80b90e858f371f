"""Cuts an OpenVINO language model into shards that give the same logits as the whole model."""

# ruff: noqa: E402 - the call must come before the modules that import OpenVINO
from fleet.telemetry import forbid_openvino_telemetry

forbid_openvino_telemetry()

from shard_builder.building import build
from shard_builder.inspection import Inspection, inspect
from shard_builder.verification import Check, verify

__all__ = ["Check", "Inspection", "build", "inspect", "verify"]
