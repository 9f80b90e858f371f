"""Announcements: their form, the cap on unknown nodes, and real mDNS on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import DNSOutgoing, DNSPointer
from zeroconf.asyncio import AsyncZeroconf

from fleet.addresses import choose_addresses, local_interfaces
from fleet.discovery import (
    MAX_ANNOUNCEMENTS_OF_A_KEY,
    RESOLVE_TIMEOUT_MS,
    SERVICE_TYPE,
    Announcer,
    Browser,
    Place,
    SeenNode,
    SeenNodes,
    instance_name,
    read_announcement,
)
from fleet.identity import Identity
from fleet.node import NodeId

ONE, TWO, CONTROLLER = Identity.generate(), Identity.generate(), Identity.generate()
LOOPBACK_ONLY = ["127.0.0.1"]


@given(st.text(max_size=200), st.text("0123456789abcdef", min_size=16, max_size=16))
def test_every_host_name_makes_one_label(name: str, node_id: str) -> None:
    label = instance_name(name, NodeId(node_id))
    assert label.endswith(f"-{node_id[:4]}")
    assert len(label) > 5
    assert len(label.encode()) <= 63
    assert "." not in label
    assert label.isprintable()


@given(
    st.text(max_size=80),
    st.dictionaries(
        st.sampled_from([b"v", b"key", b"fleet", b"os", b"x"]),
        st.none() | st.binary(max_size=60) | st.sampled_from([b"1", b"99999", ONE.public_key.encode(), b"0" * 16]),
    ),
    st.lists(st.just("10.0.0.1"), max_size=20),
    st.none() | st.integers(-5, 70000),
)
def test_no_announcement_raises_and_what_is_taken_is_sound(
    label: str, properties: dict[bytes, bytes | None], addresses: list[str], port: int | None
) -> None:
    node = read_announcement(label, properties, addresses, port)
    if node is not None:
        assert node.public_key == ONE.public_key
        assert node.node_id == ONE.node_id
        assert 0 < node.port < 65536
        assert 0 < len(node.addresses) <= 8
        assert node.fleet in ("", "0" * 16)


def node(number: int) -> SeenNode:
    return SeenNode(f"PC-{number}", NodeId(f"{number:016x}"), f"key-{number}", "", ("10.0.0.1",), 1000)


def test_a_flood_of_unknown_nodes_does_not_push_out_the_known() -> None:
    seen = SeenNodes(is_known=lambda key: key in ("key-0", "key-1"), limit=10)
    for number in range(1000):
        assert seen.add(f"label-{number}", node(number))
    assert len(seen.nodes) == 10
    assert {0, 1, 999} <= {int(entry.node_id, 16) for entry in seen.nodes}
    assert not seen.add("label-999", node(999))
    assert seen.remove("label-999")
    assert not seen.remove("label-999")


def test_a_flood_with_a_known_nodes_key_stays_small_and_does_not_push_out_its_own() -> None:
    seen = SeenNodes(is_known=lambda key: True, limit=10)
    own = node(1)
    seen.add("own", own)
    for number in range(1000):
        seen.add(f"impostor-{number}", replace(own, addresses=(f"10.0.{number // 250}.{number % 250}",), port=666))
    [entry] = seen.nodes
    assert entry.places[0] == Place(("10.0.3.249",), 666)
    assert Place(own.addresses, own.port) in entry.places
    assert len(entry.places) == MAX_ANNOUNCEMENTS_OF_A_KEY
    for number in range(1000):
        seen.remove(f"impostor-{number}")
    assert seen.nodes == (own,)


@pytest.mark.parametrize(
    ("interfaces", "expected"),
    [
        ({"lo": ["127.0.0.1"]}, ("127.0.0.1",)),
        ({}, ("127.0.0.1",)),
        ({"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "eth0": ["192.168.1.5"]}, ("192.168.1.5", "172.17.0.1")),
        ({"Wi-Fi": ["169.254.7.7"]}, ("169.254.7.7",)),
        ({"Wi-Fi": ["169.254.7.7"], "Ethernet": ["10.1.2.3"]}, ("10.1.2.3",)),
        ({"vEthernet (WSL)": ["172.20.0.1"], "Ethernet": ["10.1.2.3"]}, ("10.1.2.3", "172.20.0.1")),
        ({"eth0": ["0.0.0.0", "fe80::1", "nonsense"]}, ("127.0.0.1",)),
    ],
)
def test_the_best_addresses_are_announced(interfaces: dict[str, list[str]], expected: tuple[str, ...]) -> None:
    assert choose_addresses(interfaces) == expected


def test_this_machine_has_addresses() -> None:
    assert choose_addresses(local_interfaces())


class Watch:
    """Collects what a browser reports and waits for a condition on it."""

    def __init__(self) -> None:
        self.nodes: tuple[SeenNode, ...] = ()
        self._changed = asyncio.Event()

    def __call__(self, nodes: tuple[SeenNode, ...]) -> None:
        self.nodes = nodes
        self._changed.set()

    async def until(self, condition: Callable[[dict[str, SeenNode]], bool]) -> dict[str, SeenNode]:
        async with asyncio.timeout(20):
            while not condition(by_key := {node.public_key: node for node in self.nodes}):
                self._changed.clear()
                await self._changed.wait()
        return by_key


def test_two_agents_are_seen_change_and_say_goodbye() -> None:
    async def main() -> None:
        watch = Watch()
        browser = Browser(watch, interfaces=LOOPBACK_ONLY)
        first = Announcer(ONE, "host", 4001, addresses=LOOPBACK_ONLY, interfaces=LOOPBACK_ONLY)
        second = Announcer(TWO, "host", 4002, CONTROLLER.public_key, LOOPBACK_ONLY, interfaces=LOOPBACK_ONLY)
        try:
            await browser.start()
            await asyncio.gather(first.start(), second.start())
            both = await watch.until(lambda nodes: {ONE.public_key, TWO.public_key} <= nodes.keys())
            assert both[ONE.public_key].name == "host"
            assert both[ONE.public_key].node_id == ONE.node_id
            assert both[ONE.public_key].fleet == ""
            assert both[ONE.public_key].addresses == ("127.0.0.1",)
            assert both[ONE.public_key].port == 4001
            assert both[TWO.public_key].fleet == CONTROLLER.node_id
            await first.set_fleet(CONTROLLER.public_key)
            await watch.until(lambda nodes: nodes[ONE.public_key].fleet == CONTROLLER.node_id)
            await second.close()
            left = await watch.until(lambda nodes: TWO.public_key not in nodes)
            assert ONE.public_key in left
        finally:
            await asyncio.gather(first.close(), second.close(), browser.close())
            await asyncio.gather(first.close(), browser.close())

    asyncio.run(main())


def test_a_flood_of_names_with_nothing_behind_them_hides_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.discovery.MAX_RESOLVING", 2)

    async def main() -> None:
        watch = Watch()
        browser = Browser(watch, interfaces=LOOPBACK_ONLY)
        announcer = Announcer(ONE, "host", 4001, addresses=LOOPBACK_ONLY, interfaces=LOOPBACK_ONLY)
        flood = AsyncZeroconf(interfaces=LOOPBACK_ONLY)
        try:
            await browser.start()
            await flood.zeroconf.async_wait_for_start()
            empty = DNSOutgoing(0x8400)
            for number in range(4):
                name = f"nothing-{number}.{SERVICE_TYPE}"
                empty.add_answer_at_time(DNSPointer(SERVICE_TYPE, 12, 1, 20, name), 0)
            flood.zeroconf.send(empty)
            began_s = asyncio.get_running_loop().time()
            await announcer.start()
            await watch.until(lambda nodes: ONE.public_key in nodes)
            assert len(browser._resolving) == 2, "the flood keeps the browser as busy as it may be"
            assert asyncio.get_running_loop().time() - began_s < RESOLVE_TIMEOUT_MS / 1000
        finally:
            await asyncio.gather(announcer.close(), browser.close(), flood.async_close())

    asyncio.run(main())


def test_a_new_network_is_announced_without_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces = {"Wi-Fi": ("169.254.1.1",)}
    monkeypatch.setattr("fleet.discovery.local_interfaces", lambda: dict(interfaces))
    monkeypatch.setattr("fleet.discovery.ADDRESS_POLL_S", 0.05)

    async def main() -> None:
        watch = Watch()
        browser = Browser(watch, interfaces=LOOPBACK_ONLY)
        announcer = Announcer(ONE, "laptop", 4003, interfaces=LOOPBACK_ONLY)
        try:
            await browser.start()
            await announcer.start()
            await watch.until(lambda nodes: ONE.public_key in nodes)
            interfaces["Wi-Fi"] = ("10.9.9.9",)
            # An address that was announced less than a second ago stays beside the new one for a while.
            await watch.until(lambda nodes: "10.9.9.9" in nodes[ONE.public_key].addresses)
            assert announcer.addresses == ("10.9.9.9",)
        finally:
            await asyncio.gather(announcer.close(), browser.close())

    asyncio.run(main())


def test_a_network_that_changes_while_the_announcer_begins_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [{"Wi-Fi": ("169.254.1.1",)}] * 2  # the browser's first, and the announcer's

    def read() -> dict[str, tuple[str, ...]]:
        return readings.pop() if readings else {"Wi-Fi": ("10.9.9.9",)}

    monkeypatch.setattr("fleet.discovery.local_interfaces", read)
    monkeypatch.setattr("fleet.discovery.ADDRESS_POLL_S", 0.05)

    async def main() -> None:
        watch = Watch()
        browser = Browser(watch, interfaces=LOOPBACK_ONLY)
        announcer = Announcer(ONE, "laptop", 4006, interfaces=LOOPBACK_ONLY)
        try:
            await browser.start()
            await announcer.start()
            await watch.until(lambda nodes: ONE.public_key in nodes and "10.9.9.9" in nodes[ONE.public_key].addresses)
        finally:
            await asyncio.gather(announcer.close(), browser.close())

    asyncio.run(main())


def test_two_agents_of_one_name_and_key_do_not_collide() -> None:
    async def main() -> None:
        watch = Watch()
        browser = Browser(watch, interfaces=LOOPBACK_ONLY)
        first = Announcer(ONE, "clone", 4004, addresses=LOOPBACK_ONLY, interfaces=LOOPBACK_ONLY)
        second = Announcer(ONE, "clone", 4005, addresses=LOOPBACK_ONLY, interfaces=LOOPBACK_ONLY)
        try:
            await browser.start()
            await first.start()
            await second.start()
            await second.set_fleet(CONTROLLER.public_key)
            await watch.until(lambda nodes: ONE.public_key in nodes and nodes[ONE.public_key].port == 4005)
        finally:
            await asyncio.gather(first.close(), second.close(), browser.close())

    asyncio.run(main())
