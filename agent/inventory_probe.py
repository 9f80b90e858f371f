"""Child process that asks OpenVINO what devices there are: ``python -m agent.inventory_probe``.

Drivers are loaded here and nowhere else in the agent, so that a driver that crashes or hangs takes only this process
with it. One JSON line per finding is written as soon as it is known: first the version, then the CPU, then the list of
devices, then each other device. What was read before a crash is therefore kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fleet.telemetry import forbid_openvino_telemetry

PROPERTIES = (
    "FULL_DEVICE_NAME",
    "DEVICE_TYPE",
    "DEVICE_ARCHITECTURE",
    "OPTIMIZATION_CAPABILITIES",
    "DEVICE_GOPS",
    "DEVICE_UUID",
    "GPU_DEVICE_TOTAL_MEM_SIZE",
    "GPU_EXECUTION_UNITS_COUNT",
    "GPU_UARCH_VERSION",
    "GPU_DRIVER_VERSION",
    "NPU_DEVICE_TOTAL_MEM_SIZE",
    "NPU_DRIVER_VERSION",
    "NPU_COMPILER_VERSION",
    "NPU_MAX_TILES",
)
"""Read where the device lists them as supported (openvino/runtime/properties.hpp, intel_gpu, intel_npu)."""

ESSENTIAL = frozenset({"FULL_DEVICE_NAME"})
"""A device that cannot say this is reported as a fault; older drivers lack many of the others."""

Scalar = str | int | float | bool
PropertyValue = Scalar | list[Scalar] | dict[str, Scalar]


class VersionLine(msgspec.Struct, frozen=True, tag_field="type", tag="version"):
    """The OpenVINO version."""

    version: str


class DevicesLine(msgspec.Struct, frozen=True, tag_field="type", tag="devices"):
    """The names of all devices; what is known of each follows."""

    names: tuple[str, ...]


class DeviceLine(msgspec.Struct, frozen=True, tag_field="type", tag="device"):
    """What one device says of itself."""

    device: str
    properties: dict[str, PropertyValue]


class FaultLine(msgspec.Struct, frozen=True, tag_field="type", tag="fault"):
    """What could not be read, in words."""

    text: str


class FinishedLine(msgspec.Struct, frozen=True, tag_field="type", tag="finished"):
    """Everything was read."""


ProbeLine = VersionLine | DevicesLine | DeviceLine | FaultLine | FinishedLine


def plain(value: Any) -> PropertyValue:
    """A property's value as JSON can carry it; types and enumerations by their names."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {_name(key): _scalar(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_scalar(item) for item in value]
    return _name(value)


def _scalar(value: Any) -> Scalar:
    return value if isinstance(value, bool | int | float | str) else _name(value)


def _name(value: Any) -> str:
    """``Type.INTEGRATED`` for an enumeration, ``f16`` for an element type."""
    if type(value).__name__ == "Type" and hasattr(value, "to_string"):
        return str(value.to_string())
    return str(value)


def read_device(core: Any, device: str, fault: Callable[[str], None]) -> dict[str, PropertyValue]:
    """Every property of a device that it supports, each read on its own."""
    try:
        supported = set(core.get_property(device, "SUPPORTED_PROPERTIES"))
    except RuntimeError as error:
        fault(f"{device} does not list its properties: {first_line(error)}")
        supported = set(PROPERTIES)
    properties: dict[str, PropertyValue] = {}
    for name in PROPERTIES:
        if name not in supported and name not in ESSENTIAL:
            continue
        try:
            properties[name] = plain(core.get_property(device, name))
        except (RuntimeError, TypeError) as error:
            # A driver may list a property and then refuse it; pybind has no Python type for some.
            if name in ESSENTIAL:
                fault(f"{device} does not tell its {name}: {first_line(error)}")
    return properties


def first_line(error: BaseException) -> str:
    """OpenVINO's messages begin with source positions; the last line says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:160] if lines else type(error).__name__


def probe(write: Callable[[ProbeLine], None]) -> None:
    """Ask OpenVINO and write a line per finding."""

    def fault(text: str) -> None:
        write(FaultLine(text))

    forbid_openvino_telemetry()
    import openvino

    write(VersionLine(str(openvino.get_version())))
    core = openvino.Core()
    # The CPU first: this loads only its own plugin, so that it is known even if another device's driver crashes.
    write(DeviceLine("CPU", read_device(core, "CPU", fault)))
    names = tuple(str(name) for name in core.available_devices)
    write(DevicesLine(names))
    for name in names:
        if name != "CPU":
            write(DeviceLine(name, read_device(core, name, fault)))
    write(FinishedLine())


def main() -> int:
    """Run the probe; what goes wrong as a whole is one more line."""
    encoder = msgspec.json.Encoder()

    def write(line: ProbeLine) -> None:
        sys.stdout.buffer.write(encoder.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    try:
        probe(write)
    except (ImportError, OSError, RuntimeError) as error:
        write(FaultLine(f"OpenVINO cannot be used: {first_line(error)}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
