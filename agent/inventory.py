"""The machine as the agent describes it: processor, memory, disk, and every OpenVINO device.

OpenVINO itself is asked in a child process (:mod:`agent.inventory_probe`); everything else here is psutil and plain
functions.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from agent.inventory_probe import DeviceLine, DevicesLine, FaultLine, FinishedLine, ProbeLine, VersionLine
from fleet.child_process import describe_exit, start_child
from fleet.node import Device, Inventory

PROBE_DEADLINE_S = 90.0
"""A first start on Windows scans the runtime's libraries for viruses; a driver that hangs never ends."""

DEFAULT_MEMORY_SHARE = 0.7
MEMORY_HEADROOM_BYTES = 2 << 30
"""Left to the person who works on this PC, where that is less than the share leaves."""

_MEMORY_PROPERTIES = ("GPU_DEVICE_TOTAL_MEM_SIZE", "NPU_DEVICE_TOTAL_MEM_SIZE")
_DRIVER_PROPERTIES = ("GPU_DRIVER_VERSION", "NPU_DRIVER_VERSION")
_TEXT_LIMIT = 256


def default_memory_budget(total_bytes: int) -> int:
    """What stages may use when nobody said: 70 % of the RAM, and never the last 2 GiB of a small PC."""
    share = int(total_bytes * DEFAULT_MEMORY_SHARE)
    return max(min(share, total_bytes - MEMORY_HEADROOM_BYTES), total_bytes // 4)


def describe_devices(properties: Mapping[str, Mapping[str, Any]], memory_total_bytes: int) -> tuple[Device, ...]:
    """Devices from the properties that they tell (by OpenVINO name), in the order given.

    ``memory_bytes`` of an integrated device is its share of the PC's RAM: plugins report nominal figures (an NPU's can
    exceed the RAM that there is), which are cut to it.
    """
    return tuple(_describe_device(device, facts, memory_total_bytes) for device, facts in properties.items())


def _describe_device(device: str, facts: Mapping[str, Any], memory_total_bytes: int) -> Device:
    device_type = str(facts.get("DEVICE_TYPE", "")).rpartition(".")[2].upper()
    integrated = device_type != "DISCRETE"
    memory_bytes = next((int(facts[name]) for name in _MEMORY_PROPERTIES if _is_count(facts.get(name))), 0)
    if integrated:
        memory_bytes = min(memory_bytes, memory_total_bytes)
    capabilities = facts.get("OPTIMIZATION_CAPABILITIES", ())
    if isinstance(capabilities, str):
        capabilities = [part.strip() for part in capabilities.split(",")]
    return Device(
        device=device,
        name=str(facts.get("FULL_DEVICE_NAME", device))[:_TEXT_LIMIT],
        driver=next((str(facts[name])[:_TEXT_LIMIT] for name in _DRIVER_PROPERTIES if facts.get(name)), ""),
        memory_bytes=memory_bytes,
        architecture=str(facts.get("DEVICE_ARCHITECTURE", ""))[:_TEXT_LIMIT],
        integrated=integrated,
        capabilities=tuple(str(item)[:_TEXT_LIMIT] for item in list(capabilities)[:64]),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class ProbeFindings(msgspec.Struct):
    """What the probe process wrote before it ended, was killed, or crashed."""

    version: str = ""
    devices: dict[str, dict[str, Any]] = {}
    faults: list[str] = []


def read_findings(lines: Sequence[bytes], ending: str | None) -> ProbeFindings:
    """Findings from the probe's lines; ``ending`` says in words how it ended, None if it ended well."""
    findings = ProbeFindings()
    expected: tuple[str, ...] = ()
    finished = False
    decoder = msgspec.json.Decoder(ProbeLine)
    for line in lines:
        try:
            finding = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # a driver may print to standard output
        match finding:
            case VersionLine(version):
                findings.version = version
            case DevicesLine(names):
                expected = names
            case DeviceLine(device, properties):
                findings.devices[device] = dict(properties)
            case FaultLine(text):
                findings.faults.append(text[:_TEXT_LIMIT])
            case FinishedLine():
                finished = True
    if not finished and ending is not None:
        missing = [name for name in expected if name not in findings.devices]
        what = f"the device {missing[0]}" if missing else "the devices"
        findings.faults.append(f"OpenVINO could not read {what}: {ending}."[:_TEXT_LIMIT])
    return findings


def describe_machine(findings: ProbeFindings, data_dir: Path, memory_budget_bytes: int) -> Inventory:
    """The inventory of this PC with what the probe found."""
    memory_total_bytes = int(psutil.virtual_memory().total)
    devices = describe_devices(findings.devices, memory_total_bytes)
    cpu = next((device.name for device in devices if device.device == "CPU"), "") or cpu_name()
    return Inventory(
        cpu=cpu[:_TEXT_LIMIT],
        cores=psutil.cpu_count(logical=True) or 1,
        operating_system=f"{platform.system()} {platform.release()}"[:_TEXT_LIMIT],
        openvino_version=findings.version[:_TEXT_LIMIT],
        agent_version=importlib.metadata.version("paceline"),
        memory_total_bytes=memory_total_bytes,
        memory_budget_bytes=memory_budget_bytes,
        disk_total_bytes=int(psutil.disk_usage(str(data_dir)).total),
        devices=devices[:32],
        faults=tuple(findings.faults[:32]),
    )


class InventoryReader:
    """Runs the probe with a deadline. ``read`` blocks and belongs into a thread; ``stop`` ends it early."""

    def __init__(
        self,
        deadline_s: float = PROBE_DEADLINE_S,
        start: Callable[[], subprocess.Popen[bytes]] = lambda: start_child("agent.inventory_probe"),
    ) -> None:
        self._deadline_s = deadline_s
        self._start = start
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def stop(self) -> None:
        """End a running probe; ``read`` then returns what is known."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def read(self, data_dir: Path, memory_budget_bytes: int) -> Inventory:
        """The inventory. Never raises for what OpenVINO or a driver does: that becomes a fault text."""
        return describe_machine(self._probe(), data_dir, memory_budget_bytes)

    def _probe(self) -> ProbeFindings:
        with self._lock:
            if self._stopped:
                return ProbeFindings()
            try:
                process = self._process = self._start()
            except OSError as error:
                return read_findings((), f"its process did not start ({error.strerror})")
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        lines: list[bytes] = []
        last_error: list[bytes] = [b""]
        readers = [
            threading.Thread(target=_collect, args=(process.stdout, lines), name="inventory-output", daemon=True),
            threading.Thread(target=_keep_last, args=(process.stderr, last_error), name="inventory-log", daemon=True),
        ]
        for reader in readers:
            reader.start()
        ending: str | None = None
        try:
            code = process.wait(self._deadline_s)
            if code != 0:
                ending = describe_exit(code)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ending = f"it did not answer within {self._deadline_s:.0f} s"
        for reader in readers:
            reader.join(5.0)
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
        if ending is not None and last_error[0]:
            ending = f"{ending} ({last_error[0].decode(errors='replace')[:120]})"
        return read_findings(lines, ending)


def _collect(stream: IO[bytes], lines: list[bytes]) -> None:
    for line in stream:
        if len(lines) < 1000:
            lines.append(line[: 1 << 16])


def _keep_last(stream: IO[bytes], last: list[bytes]) -> None:
    for line in stream:
        if line.strip():
            last[0] = line.strip()


def cpu_name() -> str:
    """The processor's name as the operating system has it."""
    if sys.platform == "win32":
        import winreg

        path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux; the next line knows at least the architecture
    return platform.processor() or platform.machine()
