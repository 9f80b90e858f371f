"""Finding agents through mDNS: a hint of who may be where, and nothing more.

Anybody on the LAN can announce anything. What comes in is checked for form and capped in number; identity is proved by
CURVE when the controller connects, presence by the answers to its heartbeats. A record may outlive a PC by 75 minutes.
https://www.rfc-editor.org/rfc/rfc6762, https://www.rfc-editor.org/rfc/rfc6763
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import platform
import re
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from zeroconf import InterfaceChoice, IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from fleet.addresses import MAX_ADDRESSES, choose_addresses, local_interfaces
from fleet.codec import PROTOCOL_VERSION
from fleet.errors import UnreachableError
from fleet.identity import Identity, is_public_key, node_id_of
from fleet.node import NodeId

SERVICE_TYPE = "_paceline._tcp.local."
MAX_SEEN_NODES = 256
MAX_ANNOUNCEMENTS_OF_A_KEY = 4
MAX_RESOLVING = 512
RESOLVE_TIMEOUT_MS = 3_000
ADDRESS_POLL_S = 5.0
FLUSH_S = 1.5
"""An address that is no longer announced stays readable for a second (RFC 6762, section 10.2): look again after it."""
_MAX_LABEL_BYTES = 63
_NODE_ID = re.compile(r"[0-9a-f]{16}")

_log = logging.getLogger("paceline.discovery")


@dataclass(frozen=True)
class Place:
    """Where a node may be reached: control port and addresses."""

    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class SeenNode:
    """What an announcement says. ``fleet`` is the node id of the controller that it claims to belong to, or empty."""

    name: str
    node_id: NodeId
    public_key: str
    fleet: str
    addresses: tuple[str, ...]
    port: int
    operating_system: str = ""
    protocol: int = PROTOCOL_VERSION
    elsewhere: tuple[Place, ...] = ()
    """Where other announcements of the same key say that it is: one of them is an impostor's, or out of date."""

    @property
    def places(self) -> tuple[Place, ...]:
        """All places, that of this announcement first."""
        return tuple(dict.fromkeys((Place(self.addresses, self.port), *self.elsewhere)))


def instance_name(node_name: str, node_id: NodeId) -> str:
    """``<host>-<first 4 hex digits of the node id>`` as one DNS label of at most 63 bytes."""
    suffix = f"-{node_id[:4]}"
    name = "".join(character if character.isprintable() else " " for character in node_name).replace(".", "-").strip()
    room = _MAX_LABEL_BYTES - len(suffix)
    return (name.encode()[:room].decode(errors="ignore") or "node") + suffix


def read_announcement(
    label: str, properties: Mapping[bytes, bytes | None], addresses: Sequence[str], port: int | None
) -> SeenNode | None:
    """The node that an announcement describes; None where it is not one of ours in form.

    Args:
        label: the instance name without the service type.
        properties: the TXT record.
    """

    def text(key: bytes) -> str:
        return (properties.get(key) or b"").decode("utf-8", "replace")

    public_key, fleet, version = text(b"key"), text(b"fleet"), text(b"v")
    if not is_public_key(public_key) or not re.fullmatch(r"[0-9]{1,5}", version) or not port or not 0 < port < 65536:
        return None
    if fleet and not _NODE_ID.fullmatch(fleet):
        return None
    if not addresses:
        return None
    node_id = node_id_of(public_key)
    name = label.removesuffix(f"-{node_id[:4]}")
    name = "".join(character for character in name if character.isprintable())[:_MAX_LABEL_BYTES]
    return SeenNode(
        name=name or str(node_id),
        node_id=node_id,
        public_key=public_key,
        fleet=fleet,
        addresses=tuple(addresses[:MAX_ADDRESSES]),
        port=port,
        operating_system="".join(character for character in text(b"os") if character.isprintable())[:64],
        protocol=int(version),
    )


class SeenNodes:
    """The announcements that are known now, at most ``limit`` of them.

    When it is full, the one that was heard of the longest ago makes way, but never one that ``is_known``: a flood of
    invented nodes cannot push the fleet's own out. Nor can a flood of announcements with a node's own key push out
    its own: of one key, the first that came is kept, and the latest few.
    """

    def __init__(self, is_known: Callable[[str], bool] = lambda public_key: False, limit: int = MAX_SEEN_NODES) -> None:
        self._is_known = is_known
        self._limit = limit
        self._by_label: OrderedDict[str, SeenNode] = OrderedDict()
        self._arrivals: dict[str, int] = {}
        self._arrival_numbers = itertools.count()

    def add(self, label: str, node: SeenNode) -> bool:
        """Records an announcement; whether ``nodes`` differs now."""
        before = self._by_label.get(label)
        changed = before != node
        self._by_label[label] = node
        self._by_label.move_to_end(label)
        if before is None or before.public_key != node.public_key:
            self._arrivals[label] = next(self._arrival_numbers)
        of_its_key = [other for other, seen in self._by_label.items() if seen.public_key == node.public_key]
        if len(of_its_key) > MAX_ANNOUNCEMENTS_OF_A_KEY:
            self.remove(sorted(of_its_key, key=self._arrivals.__getitem__)[1])
        while len(self._by_label) > self._limit:
            oldest = next(
                (label for label, seen in self._by_label.items() if not self._is_known(seen.public_key)), None
            )
            if oldest is None:
                break
            self.remove(oldest)
        return changed

    def remove(self, label: str) -> bool:
        """Takes an announcement back; whether there was one."""
        self._arrivals.pop(label, None)
        return self._by_label.pop(label, None) is not None

    @property
    def nodes(self) -> tuple[SeenNode, ...]:
        """One entry per key, the latest announcement's; it has what the others of its key say in ``elsewhere``."""
        by_key: dict[str, list[SeenNode]] = {}
        for node in reversed(self._by_label.values()):
            by_key.setdefault(node.public_key, []).append(node)
        nodes = [
            replace(latest, elsewhere=tuple(Place(other.addresses, other.port) for other in others))
            for latest, *others in by_key.values()
        ]
        return tuple(sorted(nodes, key=lambda node: (node.name, node.node_id)))


class Announcer:
    """Announces an agent until it is closed, and follows the PC from network to network.

    ``addresses`` pins what is announced; otherwise the PC's LAN addresses are, and loopback where there is no LAN.
    ``interfaces`` (addresses) restricts where; None: everywhere. Lives in one selector event loop.
    """

    def __init__(
        self,
        identity: Identity,
        name: str,
        control_port: int,
        fleet: str = "",
        addresses: Sequence[str] | None = None,
        *,
        interfaces: Sequence[str] | None = None,
    ) -> None:
        """``fleet`` is the public key of the controller that the agent belongs to, or empty."""
        self._identity = identity
        self._label = instance_name(name, identity.node_id)
        self._port = control_port
        self._fleet = fleet
        self._pinned = tuple(addresses) if addresses is not None else None
        self._addresses: tuple[str, ...] = self._pinned or ()
        self._interfaces = list(interfaces) if interfaces is not None else None
        self._zeroconf: AsyncZeroconf | None = None
        self._follower: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()

    @property
    def addresses(self) -> tuple[str, ...]:
        """What is announced now."""
        return self._addresses

    async def start(self) -> None:
        """Begins to announce; returns once the name was found free and the announcement is on its way.

        Raises:
            UnreachableError: this PC cannot take part in mDNS.
        """
        found = await asyncio.to_thread(local_interfaces)
        if self._pinned is None:
            self._addresses = choose_addresses(found)
        self._zeroconf = _open_zeroconf(self._interfaces)
        info = self._info()
        await self._zeroconf.async_register_service(info, allow_name_change=True)
        self._label = info.name.removesuffix(f".{SERVICE_TYPE}")  # another one if the name was taken
        self._follower = asyncio.create_task(_follow_network(found, self._on_network), name="announcer")

    async def set_fleet(self, fleet: str) -> None:
        """Announces another controller's public key, or none."""
        if fleet != self._fleet:
            self._fleet = fleet
            await self._announce_again()

    async def close(self) -> None:
        """Says goodbye and ends. Safe to call twice."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
            self._follower = None
        if self._zeroconf is not None:
            zeroconf, self._zeroconf = self._zeroconf, None
            await zeroconf.async_close()

    def _info(self) -> AsyncServiceInfo:
        return AsyncServiceInfo(
            SERVICE_TYPE,
            f"{self._label}.{SERVICE_TYPE}",
            port=self._port,
            properties={
                "v": str(PROTOCOL_VERSION),
                "key": self._identity.public_key,
                "fleet": node_id_of(self._fleet) if self._fleet else "",
                "os": platform.system(),
            },
            server=f"paceline-{self._identity.node_id}.local.",
            addresses=[socket.inet_aton(address) for address in self._addresses],
        )

    async def _announce_again(self) -> None:
        async with self._changing:
            if self._zeroconf is not None:
                await self._zeroconf.async_update_service(self._info())

    async def _on_network(self, interfaces: Mapping[str, tuple[str, ...]]) -> None:
        if self._zeroconf is None:
            return
        await self._zeroconf.async_update_interfaces()
        if self._pinned is None:
            self._addresses = choose_addresses(interfaces)
        _log.info("the network changed; announcing %s", ", ".join(self._addresses))
        await self._announce_again()


class Browser:
    """Watches for agents until it is closed. Lives in one selector event loop.

    ``on_change`` is called in the loop with all nodes seen now, after every change. ``is_known`` tells the keys of the
    fleet's own nodes, which a flood of others cannot push out.
    """

    def __init__(
        self,
        on_change: Callable[[tuple[SeenNode, ...]], None],
        *,
        is_known: Callable[[str], bool] = lambda public_key: False,
        interfaces: Sequence[str] | None = None,
    ) -> None:
        self._on_change = on_change
        self._seen = SeenNodes(is_known)
        self._interfaces = list(interfaces) if interfaces is not None else None
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._follower: asyncio.Task[None] | None = None
        self._resolving: dict[str, asyncio.Task[None]] = {}
        self._resolve_again: set[str] = set()

    @property
    def nodes(self) -> tuple[SeenNode, ...]:
        """All nodes seen now."""
        return self._seen.nodes

    async def start(self) -> None:
        """Begins to watch.

        Raises:
            UnreachableError: this PC cannot take part in mDNS.
        """
        found = await asyncio.to_thread(local_interfaces)
        self._zeroconf = _open_zeroconf(self._interfaces)
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._on_service])
        self._follower = asyncio.create_task(_follow_network(found, self._on_network), name="browser")

    async def close(self) -> None:
        """Ends watching. Safe to call twice."""
        tasks = [*self._resolving.values(), *([self._follower] if self._follower else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._follower = None
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = None
        if self._zeroconf is not None:
            zeroconf, self._zeroconf = self._zeroconf, None
            await zeroconf.async_close()

    def _on_service(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        label = name.removesuffix(f".{SERVICE_TYPE}")
        if state_change is ServiceStateChange.Removed:
            task = self._resolving.pop(label, None)
            if task is not None:
                task.cancel()
            if self._seen.remove(label):
                self._on_change(self._seen.nodes)
            return
        if label in self._resolving:
            self._resolve_again.add(label)
            return
        if len(self._resolving) >= MAX_RESOLVING:
            # What has come with the announcement needs no question, so that a flood of empty ones hides no node.
            info = AsyncServiceInfo(SERVICE_TYPE, name)
            if info.load_from_cache(zeroconf):
                self._take(label, info)
            return
        task = asyncio.get_running_loop().create_task(self._resolve(zeroconf, label), name=f"resolve {label}")
        self._resolving[label] = task

    async def _resolve(self, zeroconf: Zeroconf, label: str) -> None:
        try:
            while True:
                self._resolve_again.discard(label)
                await self._look_at(zeroconf, label)
                await asyncio.sleep(FLUSH_S)
                await self._look_at(zeroconf, label)
                if label not in self._resolve_again:
                    return
        finally:
            if self._resolving.get(label) is asyncio.current_task():
                del self._resolving[label]

    async def _look_at(self, zeroconf: Zeroconf, label: str) -> None:
        info = AsyncServiceInfo(SERVICE_TYPE, f"{label}.{SERVICE_TYPE}")
        if not await info.async_request(zeroconf, RESOLVE_TIMEOUT_MS):
            _log.debug("%s did not resolve", label)
            return
        self._take(label, info)

    def _take(self, label: str, info: AsyncServiceInfo) -> None:
        node = read_announcement(label, info.properties, info.parsed_addresses(IPVersion.V4Only), info.port)
        if node is None:
            _log.debug("%s is not an announcement of ours", label)
        elif self._seen.add(label, node):
            self._on_change(self._seen.nodes)

    async def _on_network(self, interfaces: Mapping[str, tuple[str, ...]]) -> None:
        if self._zeroconf is not None:
            await self._zeroconf.async_update_interfaces()


async def _follow_network(
    settled: Mapping[str, tuple[str, ...]], on_change: Callable[[Mapping[str, tuple[str, ...]]], Awaitable[None]]
) -> None:
    """Calls back when the PC's addresses changed and stayed for two readings: a network comes up in several steps.

    ``settled`` are the addresses that the caller began with: a change while it began is a change.
    """
    before = settled
    while True:
        await asyncio.sleep(ADDRESS_POLL_S)
        now = await asyncio.to_thread(local_interfaces)
        if now == before and now != settled:
            try:
                await on_change(now)
                settled = now
            except OSError:
                # A network that goes away again while it is taken up; the next reading tries once more.
                _log.exception("the change of the network could not be followed")
        before = now


def _open_zeroconf(interfaces: list[str] | None) -> AsyncZeroconf:
    """On every IPv4 interface, loopback included, so that agents on one PC without a LAN find each other."""
    try:
        return AsyncZeroconf(interfaces=interfaces or InterfaceChoice.All, ip_version=IPVersion.V4Only)
    except OSError as error:
        raise UnreachableError(
            f"This PC cannot look for others by mDNS ({error.strerror}); check that UDP port 5353 may be used, "
            "or add PCs by their address."
        ) from None
