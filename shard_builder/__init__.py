"""Cuts an OpenVINO language model into shards that give the same logits as the whole model."""

from shard_builder.building import build
from shard_builder.inspection import Inspection, inspect
from shard_builder.verification import Check, verify

__all__ = ["Check", "Inspection", "build", "inspect", "verify"]
