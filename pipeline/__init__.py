"""The serving runtime: stages that run one shard each, and the gateway in front of them."""

from fleet.telemetry import forbid_openvino_telemetry

forbid_openvino_telemetry()
