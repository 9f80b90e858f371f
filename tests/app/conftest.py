"""Window tests run without a screen; where Qt's system libraries are missing they are skipped by name."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["QT_QPA_PLATFORM"] = "offscreen"

from app.display import qt_fault
from fleet.control_messages import DeploymentId, Progress, StageState, StageStatus
from fleet.errors import PacelineError
from fleet.identity import Identity
from fleet.manifest import KvPrecision
from fleet.node import Device, Inventory, LiveLoad, NodeId, PeerAddress
from fleet.placement import Placement, PlacementNode
from fleet.views import DeploymentState, DeploymentView, FleetView, NodeState, NodeView, StageProgress

_FAULT = qt_fault("offscreen")
_FREE_OF_QT = {"test_conversation.py", "test_display.py", "test_draft.py", "test_segments.py", "test_tokens.py"}
GIB = 1 << 30


class _SkippedModule(pytest.Module):
    """A module that cannot even be imported without Qt."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        pytest.skip(_FAULT or "")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if _FAULT is None or module_path.name in _FREE_OF_QT:
        return None
    module: pytest.Module = _SkippedModule.from_parent(parent, path=module_path)
    return module


@pytest.fixture
def make_node() -> Callable[..., NodeView]:
    """Makes a node: its number, and what is special about it."""

    def make(
        number: int,
        state: NodeState = "ready",
        *,
        devices: tuple[Device, ...] = (Device("CPU", "Intel(R) Core(TM) Ultra 7 155H"),),
        total_bytes: int = 32 * GIB,
        free_bytes: int = 12 * GIB,
        faults: tuple[str, ...] = (),
        known: bool = True,
    ) -> NodeView:
        inventory = Inventory(
            cpu="Intel(R) Core(TM) Ultra 7 155H",
            cores=22,
            operating_system="Windows 11",
            openvino_version="2026.4.1",
            agent_version="0.1.0",
            memory_total_bytes=total_bytes,
            memory_budget_bytes=total_bytes // 2,
            disk_total_bytes=500 * GIB,
            devices=devices,
            faults=faults,
        )
        return NodeView(
            id=NodeId(f"{number:016x}"),
            name=f"pc-{number}",
            state=state,
            detail="",
            addresses=(f"192.168.1.{number}",),
            public_key="k" * 40,
            inventory=inventory if known else None,
            load=LiveLoad(12.5, free_bytes, 200 * GIB) if known else None,
        )

    return make


@pytest.fixture
def make_deployment() -> Callable[..., DeploymentView]:
    """Makes a deployment over two nodes."""

    def make(
        number: int = 1,
        state: DeploymentState = "ready",
        *,
        stage_state: StageState = "ready",
        progress: Progress | None = None,
        detail: str = "",
        http_port: int | None = 8642,
    ) -> DeploymentView:
        identity = DeploymentId(f"{number:012x}")
        stages = tuple(
            StageProgress(
                stage,
                NodeId(f"{stage:016x}"),
                f"pc-{stage}",
                StageStatus(
                    deployment=identity,
                    model="tiny",
                    stage=stage,
                    first_layer=stage * 15,
                    end_layer=stage * 15 + 15,
                    state=stage_state,
                    progress=progress,
                ),
            )
            for stage in range(2)
        )
        return DeploymentView(
            id=identity,
            model=f"tiny-{number}",
            state=state,
            detail=detail,
            stages=stages,
            gateway_node=NodeId(f"{0:016x}"),
            gateway_addresses=("127.0.0.1",),
            gateway_port=40000,
            gateway_public_key="g" * 40,
            http_port=http_port,
        )

    return make


class PlayedController:
    """Plays the fleet's controller: remembers what it is asked, and says what the test wants."""

    def __init__(self) -> None:
        self.identity = Identity.generate()
        self.view = FleetView()
        self.callbacks: list[Callable[[FleetView], None]] = []
        self.asked: list[tuple[str, object]] = []
        self.error: PacelineError | None = None
        self.nodes: list[PlacementNode] = []

    def subscribe(self, callback: Callable[[FleetView], None]) -> object:
        self.callbacks.append(callback)
        return callback

    def publish(self, view: FleetView) -> None:
        self.view = view
        for callback in self.callbacks:
            callback(view)

    def create_token(self, uses: int, expires_s: float) -> str:
        self._take("token", (uses, expires_s))
        return "paceline-token"

    def placement_nodes(self) -> list[PlacementNode]:
        return self.nodes

    def gateway_address(self, deployment: DeploymentId) -> PeerAddress:
        return PeerAddress("pc-0", ("127.0.0.1",), 40000, self.identity.public_key)

    async def deploy(
        self, shard_folder: Path, placement: Placement, *, kv_precision: KvPrecision, http_port: int = 0
    ) -> DeploymentId:
        self._take("deploy", (shard_folder, placement))
        return DeploymentId(f"{7:012x}")

    async def cancel(self, deployment: DeploymentId) -> None:
        self._take("cancel", deployment)

    async def undeploy(self, deployment: DeploymentId) -> None:
        self._take("undeploy", deployment)

    def _take(self, what: str, about: object) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append((what, about))


class PlayedNetwork:
    """A real thread with a real selector loop, around a played controller."""

    def __init__(self) -> None:
        self.controller = PlayedController()
        self.loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="played network", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(10)
            self.loop.close()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


@pytest.fixture(autouse=True)
def collect_in_this_thread() -> Iterator[None]:
    """As in the program: Qt objects in cyclic garbage must not be destroyed by the network's thread."""
    gc.disable()
    yield
    gc.collect()
    gc.enable()


@pytest.fixture
def network() -> Iterator[PlayedNetwork]:
    played = PlayedNetwork()
    yield played
    played.close()
