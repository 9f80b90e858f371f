"""What an agent was asked to run, kept beside the files, so that it goes on after a restart of the PC or the agent."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TypeVar

import msgspec

from fleet.control_messages import StartGateway, StartStage
from fleet.data_dir import read_file, write_private
from fleet.node import Port, PublicKey


class StageRecord(msgspec.Struct, frozen=True):
    """A stage that was started, by whom, and the port that others know it by."""

    controller: PublicKey
    request: StartStage
    port: Port | None = None


class GatewayRecord(msgspec.Struct, frozen=True):
    """A gateway that was started."""

    controller: PublicKey
    request: StartGateway
    port: Port | None = None
    http_port: Port | None = None


RecordType = TypeVar("RecordType", StageRecord, GatewayRecord)


class RunRecords:
    """The records of one agent, one file each, in the deployments' folders."""

    def __init__(self, deployments: Path) -> None:
        self._deployments = deployments

    def stage(self, deployment: str, stage: int) -> StageRecord | None:
        """The record of a stage; None if it was never started."""
        return _read(self._stage_path(deployment, stage), StageRecord)

    def gateway(self, deployment: str) -> GatewayRecord | None:
        """The record of a deployment's gateway; None if none was started here."""
        return _read(self._gateway_path(deployment), GatewayRecord)

    def keep_stage(self, deployment: str, stage: int, record: StageRecord) -> None:
        """Write a stage's record."""
        write_private(self._stage_path(deployment, stage), msgspec.json.encode(record))

    def keep_gateway(self, deployment: str, record: GatewayRecord) -> None:
        """Write a gateway's record."""
        write_private(self._gateway_path(deployment), msgspec.json.encode(record))

    def _stage_path(self, deployment: str, stage: int) -> Path:
        return self._deployments / deployment / f"stage-{stage}.json"

    def _gateway_path(self, deployment: str) -> Path:
        return self._deployments / deployment / "gateway.json"


def _read(path: Path, record_type: type[RecordType]) -> RecordType | None:
    content = read_file(path)
    if content is not None:
        with contextlib.suppress(msgspec.MsgspecError):  # of an older version: the controller starts it again
            return msgspec.json.decode(content, type=record_type)
    return None
