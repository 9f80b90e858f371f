"""What an agent does for deployments: receive stages, run them, run gateways, and say how all that is.

Requests are idempotent: asking for what is there already changes nothing. A refusal is one plain sentence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from agent.child_machine import ChildState
from agent.node_facts import NodeFacts
from agent.receiving import Fetcher, Reception
from agent.run_records import GatewayRecord, RunRecords, StageRecord
from agent.shard_store import ShardStore
from agent.supervisor import ChildSpec, Supervisor
from fleet.control_messages import (
    GatewayState,
    GatewayStatus,
    PrepareStage,
    StageState,
    StageStatus,
    StartGateway,
    StartStage,
)
from fleet.errors import DeployError, ModelError
from fleet.manifest import Manifest, decode_manifest, encode_manifest
from fleet.process import GatewayConfig, StageConfig

_log = logging.getLogger("paceline.agent.deployments")
_MB = 1_000_000
MAX_STAGES = 256
"""That one agent holds at a time, on their way in or running; all of them must fit the answer to a heartbeat."""

Key = tuple[str, int | None]
"""A child: deployment and stage, or deployment and None for its gateway."""


_STAGE_STATES: dict[ChildState, StageState] = {
    "starting": "starting",
    "ready": "ready",
    "degraded": "ready",
    "restarting": "restarting",
    "failed": "failed",
    "stopping": "stopping",
    "stopped": "stopping",
}
_GATEWAY_STATES: dict[ChildState, GatewayState] = {
    "starting": "starting",
    "ready": "ready",
    "degraded": "degraded",
    "restarting": "starting",
    "failed": "failed",
    "stopping": "starting",
    "stopped": "starting",
}


@dataclass
class _Stage:
    """A stage of a deployment on this node."""

    manifest: Manifest
    controller: str
    reception: Reception | None = None
    record: StageRecord | None = None

    @property
    def received(self) -> bool:
        return self.reception is None or self.reception.complete


class Deployments:
    """All deployments of one agent. Methods belong into the event loop.

    Args:
        on_change: called when something changed that a status shows.
    """

    def __init__(
        self,
        facts: NodeFacts,
        store: ShardStore,
        records: RunRecords,
        fetcher: Fetcher,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._facts = facts
        self._store = store
        self._records = records
        self._fetcher = fetcher
        self._on_change = on_change
        self._supervisor: Supervisor[Key] = Supervisor(self._child_changed)
        self._stages: dict[tuple[str, int], _Stage] = {}
        self._gateways: dict[str, GatewayRecord] = {}
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    def restore(self, trusted_controllers: Collection[str]) -> None:
        """Go on with what ran when the agent last ended, for controllers that are still trusted."""
        published = self._store.published()
        for deployment, stage, manifest in published:
            record = self._records.stage(deployment, stage)
            if record is not None and record.controller in trusted_controllers:
                self._stages[deployment, stage] = _Stage(manifest, record.controller, record=record)
                self._run_stage(deployment, stage)
        # Never started, or nobody's any more. The files stay: asked for again, it is here at once.
        for deployment in {deployment for deployment, _, _ in published} - {key[0] for key in self._stages}:
            self._store.release(deployment)
        for deployment in {deployment for deployment, _ in self._stages}:
            gateway = self._records.gateway(deployment)
            if gateway is not None and gateway.controller in trusted_controllers:
                self._gateways[deployment] = gateway
                self._run_gateway(deployment)

    def prepare(self, request: PrepareStage, controller: str) -> None:
        """Begin to receive a stage.

        Raises:
            DeployError: it cannot be received here.
        """
        key = (request.deployment, request.stage)
        self._refuse_while_stopping(request.deployment)
        there = self._stages.get(key)
        if there is not None and (there.reception is None or there.reception.failure is None):
            return
        manifest = self._checked(request.manifest, request.stage)
        self._stages.pop(key, None)
        if len(self._stages) >= MAX_STAGES:
            raise DeployError(f"this PC has {MAX_STAGES} stages already, and that is the limit.")
        needed_bytes = manifest.stages[request.stage].bytes
        taken_bytes = self._loaded_bytes()
        if taken_bytes + needed_bytes > self._facts.memory_budget_bytes:
            raise DeployError(
                f"stage {request.stage} needs {needed_bytes / _MB:,.0f} MB of memory for its weights, and "
                f"{max(0, self._facts.memory_budget_bytes - taken_bytes) / _MB:,.0f} MB are left of the "
                f"{self._facts.memory_budget_bytes / _MB:,.0f} MB that this PC gives."
            )
        stage = self._stages[key] = _Stage(manifest, controller)
        stage.reception = Reception(
            self._store, self._fetcher, self._turn, request.deployment, manifest, request.stage, self._on_change
        )
        self._on_change()

    def start_stage(self, request: StartStage, controller: str) -> None:
        """Run a received stage.

        Raises:
            DeployError: it has not arrived.
        """
        self._refuse_while_stopping(request.deployment)
        stage = self._stages.get((request.deployment, request.stage))
        if stage is None or not stage.received:
            raise DeployError(f"stage {request.stage} has not arrived on this PC yet.")
        if stage.record is None or self._has_ended((request.deployment, request.stage)):
            port = stage.record.port if stage.record is not None else None
            stage.record = StageRecord(controller, request, port)
            stage.controller = controller
            self._records.keep_stage(request.deployment, request.stage, stage.record)
            self._run_stage(request.deployment, request.stage)

    def start_gateway(self, request: StartGateway, controller: str) -> None:
        """Run the gateway beside stage 0.

        Raises:
            DeployError: stage 0 is not here.
        """
        self._refuse_while_stopping(request.deployment)
        first = self._stages.get((request.deployment, 0))
        if first is None or first.record is None:
            raise DeployError("the gateway runs beside stage 0, which does not run on this PC.")
        if request.deployment not in self._gateways or self._has_ended((request.deployment, None)):
            record = GatewayRecord(controller, request)
            self._gateways[request.deployment] = record
            self._records.keep_gateway(request.deployment, record)
            self._run_gateway(request.deployment)

    def undeploy(self, deployment: str) -> None:
        """Stop whatever runs or arrives for a deployment; it is gone from the statuses when that is done."""
        known = deployment in self._gateways or any(key[0] == deployment for key in self._stages)
        if known and deployment not in self._stopping:
            task = asyncio.get_running_loop().create_task(self._stop(deployment), name=f"undeploy-{deployment}")
            self._stopping[deployment] = task

    def undeploy_of(self, controller: str) -> None:
        """Stop everything that a controller had deployed here."""
        for (deployment, _), stage in list(self._stages.items()):
            if stage.controller == controller:
                self.undeploy(deployment)

    async def close(self) -> None:
        """Stop all processes and receptions; the records stay, so that ``restore`` goes on with them."""
        receptions = [stage.reception for stage in self._stages.values() if stage.reception is not None]
        await asyncio.gather(*(reception.cancel() for reception in receptions if not reception.complete))
        if self._stopping:
            await asyncio.wait(list(self._stopping.values()))
        # Gateways first, so that they do not see their stages go and try to find them again.
        for stages_too in (False, True):
            keys = [key for key in self._supervisor.children if stages_too or key[1] is None]
            await asyncio.gather(*(self._supervisor.stop(key) for key in keys))

    def stage_statuses(self) -> tuple[StageStatus, ...]:
        """How every stage is."""
        return tuple(self._stage_status(deployment, number) for deployment, number in sorted(self._stages))

    def gateway_statuses(self) -> tuple[GatewayStatus, ...]:
        """How every gateway is."""
        return tuple(self._gateway_status(deployment) for deployment in sorted(self._gateways))

    def _stage_status(self, deployment: str, number: int) -> StageStatus:
        stage = self._stages[deployment, number]
        parts = stage.manifest.stages[number]
        child = self._supervisor.view((deployment, number))
        state: StageState = "received"
        detail, loaded, port, restarts, memory_bytes = "", "", None, 0, 0
        if deployment in self._stopping:
            state = "stopping"
        elif stage.reception is not None and stage.reception.failure is not None:
            state, detail = "failed", stage.reception.failure
        elif stage.reception is not None and not stage.reception.complete:
            state, detail = "receiving", stage.reception.detail
        elif child is not None:
            state = _STAGE_STATES[child.state]
            detail, loaded, port = child.detail, child.loaded, child.port
            restarts, memory_bytes = child.restarts, child.memory_bytes
        return StageStatus(
            deployment=deployment,
            model=stage.manifest.name[:256],
            stage=number,
            first_layer=parts.first_layer,
            end_layer=parts.end_layer,
            state=state,
            device=stage.record.request.device if stage.record is not None else "",
            detail=detail[:4096],
            loaded=loaded[:4096],
            progress=stage.reception.progress if stage.reception is not None else None,
            port=port,
            restarts=restarts,
            memory_bytes=memory_bytes,
        )

    def _gateway_status(self, deployment: str) -> GatewayStatus:
        record = self._gateways[deployment]
        child = self._supervisor.view((deployment, None))
        first = self._stages.get((deployment, 0))
        return GatewayStatus(
            deployment=deployment,
            model=first.manifest.name[:256] if first is not None else "",
            state=_GATEWAY_STATES[child.state] if child is not None else "starting",
            detail=child.detail[:4096] if child is not None else "",
            port=child.port if child is not None else None,
            http_port=child.http_port if child is not None else None,
            stages=len(record.request.stages),
        )

    def _run_stage(self, deployment: str, number: int) -> None:
        stage = self._stages[deployment, number]
        assert stage.record is not None
        request, facts = stage.record.request, self._facts
        folder = self._store.folder(deployment, number)

        def configuration(port: int, _: int) -> bytes:
            return msgspec.json.encode(
                StageConfig(
                    node_name=facts.name,
                    shard_folder=str(folder),
                    stage=number,
                    device=request.device,
                    kv_precision=request.kv_precision,
                    secret_key=facts.identity.secret_key,
                    public_key=facts.identity.public_key,
                    allowed_keys=request.allowed_keys,
                    port=port,
                    threads=request.threads,
                    cpus=request.cpus,
                    inference_precision="f32" if request.exact else "",
                    dynamic_quantization_group_size=0 if request.exact else None,
                    compiled_folder=str(facts.compiled_folder or ""),
                    keep_compiled=True,
                )
            )

        label = f"stage {number} of {stage.manifest.name}"
        self._supervisor.start(
            (deployment, number), ChildSpec(label, facts.stage_module, configuration, stage.record.port)
        )
        self._on_change()

    def _run_gateway(self, deployment: str) -> None:
        record, facts = self._gateways[deployment], self._facts
        first = self._stages[deployment, 0]
        assert first.record is not None
        kv_precision = first.record.request.kv_precision
        folder = self._store.folder(deployment, 0)
        wanted_http_port = record.request.http_port
        clients = dict.fromkeys((*record.request.allowed_keys, *facts.trusted_controllers(), facts.identity.public_key))

        def configuration(port: int, http_port: int) -> bytes:
            return msgspec.json.encode(
                GatewayConfig(
                    node_name=facts.name,
                    shard_folder=str(folder),
                    stages=record.request.stages,
                    kv_precision=kv_precision,
                    secret_key=facts.identity.secret_key,
                    public_key=facts.identity.public_key,
                    allowed_keys=tuple(clients),
                    port=port,
                    http_port=http_port or wanted_http_port,
                    context_tokens=record.request.context_tokens,
                    kv_capacity_tokens=record.request.kv_capacity_tokens,
                )
            )

        self._supervisor.start(
            (deployment, None),
            ChildSpec(
                f"gateway of {first.manifest.name}",
                facts.gateway_module,
                configuration,
                record.port,
                record.http_port,
            ),
        )
        self._on_change()

    def _child_changed(self, key: Key) -> None:
        """Keep the ports on disk, so that they are the same after a restart of the agent."""
        deployment, number = key
        child = self._supervisor.view(key)
        if child is not None and child.port is not None and deployment not in self._stopping:
            if number is None:
                gateway = self._gateways.get(deployment)
                if gateway is not None and (gateway.port, gateway.http_port) != (child.port, child.http_port):
                    gateway = msgspec.structs.replace(gateway, port=child.port, http_port=child.http_port)
                    self._gateways[deployment] = gateway
                    self._records.keep_gateway(deployment, gateway)
            else:
                stage = self._stages.get((deployment, number))
                if stage is not None and stage.record is not None and stage.record.port != child.port:
                    stage.record = msgspec.structs.replace(stage.record, port=child.port)
                    self._records.keep_stage(deployment, number, stage.record)
        self._on_change()

    async def _stop(self, deployment: str) -> None:
        try:
            await self._supervisor.stop((deployment, None))
            numbers = [number for key, number in self._stages if key == deployment]
            for number in numbers:
                reception = self._stages[deployment, number].reception
                if reception is not None and not reception.complete:
                    await reception.cancel()
            await asyncio.gather(*(self._supervisor.stop((deployment, number)) for number in numbers))
            await asyncio.to_thread(self._store.release, deployment)
            for number in numbers:
                del self._stages[deployment, number]
            self._gateways.pop(deployment, None)
        finally:
            del self._stopping[deployment]
            self._on_change()

    def _has_ended(self, key: Key) -> bool:
        child = self._supervisor.view(key)
        return child is None or child.state in ("failed", "stopped")

    def _refuse_while_stopping(self, deployment: str) -> None:
        if deployment in self._stopping:
            raise DeployError("this deployment is being stopped on this PC.")

    def _loaded_bytes(self) -> int:
        return sum(
            stage.manifest.stages[number].bytes
            for (_, number), stage in self._stages.items()
            if stage.reception is None or stage.reception.failure is None
        )

    def _checked(self, manifest: Manifest, stage: int) -> Manifest:
        """A manifest that came over the network, held to the same rules as one from a file."""
        try:
            checked = decode_manifest(encode_manifest(manifest), "the manifest sent")
        except ModelError as error:
            raise DeployError(str(error)) from None
        if stage >= len(checked.stages):
            raise DeployError(f"the manifest has {len(checked.stages)} stages, and stage {stage} was asked for.")
        return checked
