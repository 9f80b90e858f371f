"""The inventory: what recorded machines look like, and what becomes of a probe that crashes or hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent.inventory import InventoryReader, default_memory_budget, describe_devices, read_findings
from agent.inventory_probe import first_line, plain
from agent.live_load import LoadReader
from fleet.node import Device

RECORDED = Path(__file__).parent / "device_properties"
GIB = 1 << 30


def recorded(name: str) -> tuple[dict[str, Device], dict[str, Any]]:
    facts = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    devices = describe_devices(facts["devices"], facts["memory_total_bytes"])
    return {device.device: device for device in devices}, facts


def script(text: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe, stderr=pipe)


def test_meteor_lake() -> None:
    devices, facts = recorded("meteor_lake_core_ultra_7_155h")
    gpu, npu = devices["GPU"], devices["NPU"]
    assert gpu.name == "Intel(R) Arc(TM) Graphics (iGPU)"
    assert gpu.architecture == "GPU: vendor=0x8086 arch=v12.71.4"
    assert gpu.integrated
    assert gpu.memory_bytes == 30477434880
    assert "FP16" in gpu.capabilities
    assert npu.name == "Intel(R) AI Boost"
    assert npu.architecture == "3720"
    assert npu.driver == "1738334590"
    assert npu.integrated
    assert npu.memory_bytes <= facts["memory_total_bytes"]


def test_lunar_lake_whose_npu_driver_tells_little() -> None:
    devices, _ = recorded("lunar_lake_core_ultra_9_288v")
    assert "GPU_HW_MATMUL" in devices["GPU"].capabilities
    assert devices["NPU"] == Device(device="NPU", name="Intel(R) AI Boost", architecture="4000")


def test_a_discrete_gpu_is_told_from_the_integrated_one() -> None:
    devices, _ = recorded("arrow_lake_core_ultra_7_270k")
    assert list(devices) == ["CPU", "GPU.0", "GPU.1", "NPU"]
    assert devices["GPU.0"].integrated
    assert not devices["GPU.1"].integrated
    assert devices["GPU.1"].memory_bytes == 34190458880


def test_an_npu_that_claims_more_memory_than_there_is() -> None:
    devices, facts = recorded("arrow_lake_npu_with_16_gb")
    assert devices["NPU"].memory_bytes == facts["memory_total_bytes"]
    assert devices["NPU"].capabilities == ("FP16", "INT8", "EXPORT_IMPORT")


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_sets_say_that_they_are_test_data(path: Path) -> None:
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert "tests only" in facts["test_data"]
    assert facts["source"]


@pytest.mark.parametrize(
    ("total", "budget"),
    [(64 * GIB, int(64 * GIB * 0.7)), (4 * GIB, 2 * GIB), (2 * GIB, GIB // 2)],
)
def test_default_budget_leaves_room_for_the_person(total: int, budget: int) -> None:
    assert default_memory_budget(total) == budget


def test_this_machine(tmp_path: Path) -> None:
    inventory = InventoryReader().read(tmp_path, 123)
    assert inventory.faults == ()
    assert inventory.memory_total_bytes == psutil.virtual_memory().total
    assert inventory.memory_budget_bytes == 123
    assert [device.device for device in inventory.devices if device.device == "CPU"] == ["CPU"]
    assert inventory.openvino_version.startswith("20")
    assert inventory.cpu


def test_a_crash_keeps_what_was_read_before_it(tmp_path: Path) -> None:
    lines = (
        '{"type":"version","version":"2026.4"}\n'
        '{"type":"device","device":"CPU","properties":{"FULL_DEVICE_NAME":"A processor"}}\n'
        '{"type":"devices","names":["CPU","GPU"]}\n'
    )
    crash = f"import os, sys; sys.stdout.write({lines!r}); sys.stdout.flush(); os.abort()"
    inventory = InventoryReader(start=lambda: script(crash)).read(tmp_path, 1)
    assert inventory.cpu == "A processor"
    assert [device.device for device in inventory.devices] == ["CPU"]
    assert len(inventory.faults) == 1
    assert "GPU" in inventory.faults[0]


def test_a_probe_that_hangs_is_ended(tmp_path: Path) -> None:
    reader = InventoryReader(deadline_s=1.0, start=lambda: script("import time; time.sleep(60)"))
    inventory = reader.read(tmp_path, 1)
    assert inventory.devices == ()
    assert inventory.cpu
    assert "within 1 s" in inventory.faults[0]


def test_stop_ends_the_probe_and_later_ones(tmp_path: Path) -> None:
    reader = InventoryReader(start=lambda: pytest.fail("no probe may start"))
    reader.stop()
    assert reader.read(tmp_path, 1).devices == ()


def test_noise_of_a_driver_is_ignored() -> None:
    findings = read_findings([b"hello from a driver\n", b'{"type":"version","version":"1"}\n', b"\xff\n"], None)
    assert findings.version == "1"
    assert findings.faults == []


def test_property_values_become_json() -> None:
    import openvino

    assert plain({openvino.Type.f16: 1.5}) == {"f16": 1.5}
    assert plain((1, 2)) == [1, 2]
    assert plain(True) is True
    assert first_line(RuntimeError("Exception from a.cpp:1:\nDevice is lost\n")) == "Device is lost"


def test_live_load(tmp_path: Path) -> None:
    load = LoadReader(tmp_path).read()
    assert 0 <= load.cpu_percent <= 100
    assert 0 < load.memory_free_bytes <= psutil.virtual_memory().total
    assert load.disk_free_bytes > 0
