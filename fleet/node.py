"""What a node is and says of itself: identity, address, inventory, live load."""

from __future__ import annotations

from typing import Annotated, NewType

import msgspec

NodeId = NewType("NodeId", str)
"""First 16 hex digits of the SHA-256 of the node's CURVE public key."""

Text = Annotated[str, msgspec.Meta(max_length=256)]
PublicKey = Annotated[str, msgspec.Meta(min_length=40, max_length=40)]
"""A CURVE public key, Z85."""
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]


class PeerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a CURVE server listens and the key that it must prove. Addresses are tried in order."""

    node_name: Text
    addresses: Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=16)]
    port: Port
    public_key: PublicKey


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One OpenVINO device as it describes itself.

    ``device`` is OpenVINO's name (``CPU``, ``GPU``, ``GPU.1``, ``NPU``). ``memory_bytes`` is 0 where the device does
    not say; an iGPU's and an NPU's memory is a share of the PC's RAM and must not be counted twice.
    """

    device: Text
    name: Text
    driver: Text = ""
    memory_bytes: Bytes = 0
    architecture: Text = ""
    integrated: bool = True
    capabilities: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)] = ()


class Inventory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What changes rarely: the machine."""

    cpu: Text
    cores: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    operating_system: Text
    openvino_version: Text
    agent_version: Text
    memory_total_bytes: Bytes
    memory_budget_bytes: Bytes
    """The most that the agent may give to stages."""
    disk_total_bytes: Bytes
    devices: Annotated[tuple[Device, ...], msgspec.Meta(max_length=32)]
    faults: Annotated[tuple[Text, ...], msgspec.Meta(max_length=32)] = ()
    """What could not be read, in words."""


class LiveLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What changes all the time."""

    cpu_percent: Annotated[float, msgspec.Meta(ge=0, le=100)]
    memory_free_bytes: Bytes
    disk_free_bytes: Bytes
    on_battery: bool = False
    battery_percent: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
