"""Cuts an OpenVINO language model into shards that give the same logits as the whole model."""

from shard_builder.building import build

__all__ = ["build"]
