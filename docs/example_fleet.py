"""A made-up fleet for the screenshots. The devices are property sets recorded on real machines (test data)."""

from __future__ import annotations

import json
from pathlib import Path

from agent.inventory import default_memory_budget, describe_devices
from fleet.control_messages import DeploymentId, Progress, StageState, StageStatus
from fleet.manifest import Layer, Manifest, ModelId
from fleet.node import Device, Inventory, LiveLoad, NodeId
from fleet.placement import PlacementNode
from fleet.views import DeploymentState, DeploymentView, FleetView, NodeState, NodeView, StageProgress

PROPERTIES = Path(__file__).parent.parent / "tests" / "agent" / "device_properties"
GIB = 1 << 30
MIB = 1 << 20
MODEL = "Llama-3.1-8B-Instruct-int4"
SMALL_MODEL = "SmolLM2-135M-Instruct.Q4_1"
READY_DEPLOYMENT = DeploymentId("5d0c6f1a9e42")
SENDING_DEPLOYMENT = DeploymentId("9b41e07c33d8")
FAILED_DEPLOYMENT = DeploymentId("c27a1f6d0be5")
PUBLIC_KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"


def fleet_view() -> FleetView:
    """Six PCs in every state that matters, and three deployments."""
    return FleetView(nodes=_nodes(), deployments=(_sending(), _failed(), _ready()))


def placement_nodes() -> list[PlacementNode]:
    """The PCs that may take layers."""
    return [
        PlacementNode(_identity(0), "reception-1", "CPU", round(9.6 * GIB)),
        PlacementNode(_identity(1), "design-laptop", "CPU", round(5.4 * GIB)),
        PlacementNode(_identity(2), "lab-3", "CPU", round(3.2 * GIB)),
    ]


def manifest() -> Manifest:
    """An 8B model in INT4: 32 layers of grouped-query attention."""
    layer_bytes = round(0.118 * GIB)
    kv_elements = 2 * 8 * 128
    return Manifest(
        manifest_version=1,
        model_id=ModelId("8b"),
        name=MODEL,
        architecture="llama",
        hidden_size=4096,
        vocabulary_size=128_256,
        context_tokens=131_072,
        kv_precision="f16",
        layers=tuple(Layer(index, layer_bytes, kv_elements, kv_elements * 2) for index in range(32)),
        runs=(),
        stages=(),
        tokenizer=(),
        stop_token_ids=(128_009,),
    )


def _nodes() -> tuple[NodeView, ...]:
    lunar, meteor, arrow = (
        _devices(name)
        for name in ("lunar_lake_core_ultra_9_288v", "meteor_lake_core_ultra_7_155h", "arrow_lake_core_ultra_7_270k")
    )
    plain = (
        Device("CPU", "12th Gen Intel(R) Core(TM) i5-12500", architecture="intel64", capabilities=("FP32", "INT8")),
    )
    return (
        _node(0, "reception-1", "ready", "192.168.10.21", lunar, 32, 18.4, 14, stages=(_stage(0, "ready", 0, 15),)),
        _node(1, "design-laptop", "ready", "192.168.10.34", meteor, 32, 9.1, 38, stages=(_stage(1, "ready", 15, 30),)),
        _node(2, "lab-3", "ready", "192.168.10.52", arrow, 64, 41.7, 6),
        _node(3, "meeting-room", "paused", "192.168.10.60", meteor, 16, 6.2, 22, detail="Its owner paused it."),
        _node(
            4,
            "office-12",
            "lost",
            "192.168.10.77",
            plain,
            16,
            7.9,
            0,
            detail="No answer since 14:02. Is the PC switched on and in the network?",
            faults=("OpenVINO could not read the device NPU: its process ended with code -11.",),
        ),
        NodeView(
            _identity(5),
            "training-4",
            "found",
            "Seen on the network. Start its agent with an enrolment token to add it.",
            ("192.168.10.91",),
            PUBLIC_KEY,
        ),
    )


def _devices(name: str) -> tuple[Device, ...]:
    recorded = json.loads((PROPERTIES / f"{name}.json").read_text(encoding="utf-8"))
    return describe_devices(recorded["devices"], recorded["memory_total_bytes"])


def _identity(number: int) -> NodeId:
    return NodeId(f"{0x3FA9_07C4_51D2_E860 + number * 0x0101_2021_0103_0501:016x}")


def _node(
    number: int,
    name: str,
    state: NodeState,
    address: str,
    devices: tuple[Device, ...],
    memory_gib: int,
    free_gib: float,
    cpu_percent: float,
    *,
    detail: str = "",
    stages: tuple[StageStatus, ...] = (),
    faults: tuple[str, ...] = (),
) -> NodeView:
    cpu = next((device.name for device in devices if device.device == "CPU"), "Intel(R) Core(TM) Ultra 7 155H")
    inventory = Inventory(
        cpu=cpu,
        cores=16,
        operating_system="Windows 11" if number % 2 == 0 else "Linux 6.8",
        openvino_version="2026.4.1",
        agent_version="0.1.0",
        memory_total_bytes=memory_gib * GIB,
        memory_budget_bytes=default_memory_budget(memory_gib * GIB),
        disk_total_bytes=512 * GIB,
        devices=devices,
        faults=faults,
    )
    load = LiveLoad(cpu_percent, round(free_gib * GIB), 187 * GIB, number == 1, 81.0 if number == 1 else None)
    return NodeView(
        _identity(number), name, state, detail, (address, f"fe80::{number + 1}"), PUBLIC_KEY, inventory, load, stages
    )


def _stage(
    stage: int,
    state: StageState,
    first_layer: int,
    end_layer: int,
    *,
    model: str = SMALL_MODEL,
    progress: Progress | None = None,
    detail: str = "",
    deployment: DeploymentId = READY_DEPLOYMENT,
) -> StageStatus:
    return StageStatus(
        deployment=deployment,
        model=model,
        stage=stage,
        first_layer=first_layer,
        end_layer=end_layer,
        state=state,
        device="CPU" if state == "ready" else "",
        detail=detail,
        progress=progress,
        memory_bytes=(212 + 9 * stage) * MIB if state == "ready" else 0,
    )


def _deployment(
    identity: DeploymentId,
    model: str,
    state: DeploymentState,
    stages: tuple[tuple[str, StageStatus], ...],
    *,
    detail: str = "",
    http_port: int | None = None,
) -> DeploymentView:
    return DeploymentView(
        id=identity,
        model=model,
        state=state,
        detail=detail,
        stages=tuple(StageProgress(status.stage, _identity(status.stage), name, status) for name, status in stages),
        gateway_node=_identity(0),
        gateway_addresses=("192.168.10.21",),
        gateway_port=40123 if http_port else None,
        gateway_public_key=PUBLIC_KEY if http_port else "",
        http_port=http_port,
    )


def _ready() -> DeploymentView:
    return _deployment(
        READY_DEPLOYMENT,
        SMALL_MODEL,
        "ready",
        (("reception-1", _stage(0, "ready", 0, 15)), ("design-laptop", _stage(1, "ready", 15, 30))),
        http_port=8642,
    )


def _sending() -> DeploymentView:
    def part(number: int, first: int, end: int, done: float, total: float, state: StageState) -> StageStatus:
        progress = Progress(round(done * GIB), round(total * GIB), round(0.4 * GIB) if number == 2 else 0)
        return _stage(number, state, first, end, model=MODEL, progress=progress, deployment=SENDING_DEPLOYMENT)

    return _deployment(
        SENDING_DEPLOYMENT,
        MODEL,
        "sending",
        (
            ("reception-1", part(0, 0, 17, 2.3, 2.3, "received")),
            ("design-laptop", part(1, 17, 26, 0.71, 1.06, "receiving")),
            ("lab-3", part(2, 26, 32, 0.52, 1.3, "receiving")),
        ),
    )


def _failed() -> DeploymentView:
    reason = (
        "office-12 has 1.2 GiB of free disk space, stage 1 needs 1.9 GiB. Free some space there, or place fewer "
        "layers on it."
    )
    return _deployment(
        FAILED_DEPLOYMENT,
        "Qwen3-4B-int4",
        "failed",
        (
            ("reception-1", _stage(0, "received", 0, 18, model="Qwen3-4B-int4", deployment=FAILED_DEPLOYMENT)),
            (
                "office-12",
                _stage(1, "failed", 18, 36, model="Qwen3-4B-int4", detail=reason, deployment=FAILED_DEPLOYMENT),
            ),
        ),
        detail=reason,
    )
