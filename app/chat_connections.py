"""The gateways that the chat window talks to. Lives in the network thread; free of Qt."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from app.backend import Chat, Controller
from fleet.control_messages import DeploymentId
from fleet.gateway_client import GatewayClient
from fleet.gateway_messages import GatewayMessage, Generate
from fleet.identity import Identity
from fleet.node import PeerAddress

MakeClient = Callable[[Identity, PeerAddress], Chat]


class ChatConnections:
    """One client per deployment, made when it is first needed and made anew when its gateway has moved."""

    def __init__(self, controller: Controller, make_client: MakeClient = GatewayClient) -> None:
        self._controller = controller
        self._make_client = make_client
        self._clients: dict[DeploymentId, tuple[PeerAddress, Chat]] = {}

    async def answer(self, deployment: DeploymentId, request: Generate, sink: Callable[[GatewayMessage], None]) -> None:
        """Hand every message about the request to ``sink``. Being cancelled cancels the request at the gateway.

        The request's number is replaced by one that its connection has free.

        Raises:
            UnreachableError: the gateway cannot be reached, or was lost on the way.
        """
        client = await self._client(deployment)
        numbered = msgspec.structs.replace(request, number=client.next_number())
        async with contextlib.aclosing(client.generate(numbered)) as messages:
            async for message in messages:
                sink(message)

    async def close(self) -> None:
        """Close all connections."""
        clients = [client for _address, client in self._clients.values()]
        self._clients.clear()
        for client in clients:
            await client.close()

    async def _client(self, deployment: DeploymentId) -> Chat:
        address = self._controller.gateway_address(deployment)
        known = self._clients.get(deployment)
        if known is not None:
            if known[0] == address:
                return known[1]
            del self._clients[deployment]
            await known[1].close()
        client = self._make_client(self._controller.identity, address)
        self._clients[deployment] = (address, client)
        return client
