"""What the window needs of the network side. The real ones are the controller and its thread; tests have their own."""

from __future__ import annotations

import concurrent.futures
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fleet.control_messages import DeploymentId
from fleet.gateway_messages import GatewayMessage, Generate
from fleet.identity import Identity
from fleet.manifest import KvPrecision
from fleet.node import PeerAddress
from fleet.placement import Placement, PlacementNode
from fleet.views import FleetView

Result = TypeVar("Result")


class Controller(Protocol):
    """What is asked of the fleet's controller; only ever called in its own thread."""

    @property
    def identity(self) -> Identity: ...

    @property
    def view(self) -> FleetView: ...

    def subscribe(self, callback: Callable[[FleetView], None]) -> object: ...

    def create_token(self, uses: int, expires_s: float) -> str: ...

    def placement_nodes(self) -> Sequence[PlacementNode]: ...

    def gateway_address(self, deployment: DeploymentId) -> PeerAddress: ...

    async def deploy(
        self, shard_folder: Path, placement: Placement, *, kv_precision: KvPrecision, http_port: int = 0
    ) -> DeploymentId: ...

    async def cancel(self, deployment: DeploymentId) -> None: ...

    async def undeploy(self, deployment: DeploymentId) -> None: ...


class NetworkThread(Protocol):
    """A thread with an event loop in which the controller lives."""

    @property
    def controller(self) -> Controller: ...

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Run a coroutine in the thread's loop."""
        ...

    def close(self) -> None:
        """Close the controller, then end the thread; waits for both."""
        ...


class Chat(Protocol):
    """What is asked of a gateway's client; only ever called in the controller's thread."""

    def next_number(self) -> int: ...

    def generate(self, request: Generate) -> AsyncGenerator[GatewayMessage, None]: ...

    async def close(self) -> None: ...
