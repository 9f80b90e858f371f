"""Which of this PC's addresses other PCs should try, best first."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence

import psutil

MAX_ADDRESSES = 8
LOOPBACK = "127.0.0.1"

# Interfaces of virtual machines, containers and VPNs: their addresses often answer on this PC alone.
_VIRTUAL_PREFIXES = (
    "docker", "br-", "veth", "virbr", "vmnet", "vboxnet", "lxc", "lxd", "cni", "flannel", "podman",
    "tun", "tap", "wg", "tailscale", "zt", "ppp", "utun",
    "vethernet", "virtualbox", "vmware", "hyper-v", "wsl", "zerotier", "openvpn", "wireguard",
)  # fmt: skip


def choose_addresses(interfaces: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The IPv4 addresses to announce, best first, at most ``MAX_ADDRESSES``.

    LAN addresses first, those of virtual interfaces after them. Link-local addresses (169.254.x.x, which a PC gives
    itself when no router answers) only where there is no other, loopback only where there is nothing else.

    Args:
        interfaces: address texts by interface name, of interfaces that are up.
    """
    ranked: list[tuple[int, str, str]] = []
    for name, addresses in interfaces.items():
        virtual = name.lower().startswith(_VIRTUAL_PREFIXES)
        for text in addresses:
            try:
                address = ipaddress.IPv4Address(text)
            except ValueError:
                continue
            if address.is_loopback or address.is_unspecified or address.is_multicast:
                continue
            ranked.append((2 if address.is_link_local else 1 if virtual else 0, name, text))
    ranked.sort(key=lambda entry: entry[0])
    if ranked and ranked[0][0] < 2:
        ranked = [entry for entry in ranked if entry[0] < 2]
    chosen = tuple(dict.fromkeys(text for _, _, text in ranked))
    return chosen[:MAX_ADDRESSES] or (LOOPBACK,)


def local_interfaces() -> dict[str, tuple[str, ...]]:
    """IPv4 addresses by name of the interfaces that are up. Asks the operating system: not for an event loop."""
    states = psutil.net_if_stats()
    return {
        name: tuple(entry.address for entry in entries if entry.family == socket.AF_INET)
        for name, entries in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
