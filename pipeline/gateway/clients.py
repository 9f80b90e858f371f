"""Who is connected, and who has fallen silent: pure bookkeeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from fleet.codec import PROTOCOL_VERSION
from fleet.gateway_messages import SILENCE_S

MAX_CLIENTS = 4096
"""Connections that are remembered; the one that was silent the longest is forgotten first and must greet again."""


class Clients:
    """Connections (routing ids) that have exchanged protocol versions, and when each was last heard."""

    def __init__(self) -> None:
        self._heard_s: OrderedDict[bytes, float] = OrderedDict()

    def greet(self, client: bytes, protocol: int, now_s: float) -> bool:
        """A client has named its protocol version; whether that is one that is spoken here."""
        if protocol != PROTOCOL_VERSION:
            self._heard_s.pop(client, None)
            return False
        self._heard_s[client] = now_s
        self._heard_s.move_to_end(client)
        while len(self._heard_s) > MAX_CLIENTS:
            self._heard_s.popitem(last=False)
        return True

    def hear(self, client: bytes, now_s: float) -> bool:
        """A client has said something; whether it has greeted before."""
        if client not in self._heard_s:
            return False
        self._heard_s[client] = now_s
        self._heard_s.move_to_end(client)
        return True

    def forget(self, client: bytes) -> None:
        """The client is gone."""
        self._heard_s.pop(client, None)

    def silent(self, clients: Collection[bytes], now_s: float) -> list[bytes]:
        """Those of ``clients`` (which have requests running) that were not heard for ``SILENCE_S``."""
        return [client for client in clients if now_s - self._heard_s.get(client, -SILENCE_S) >= SILENCE_S]
