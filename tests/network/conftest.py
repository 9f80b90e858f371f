"""A LAN on one machine: hosts are network namespaces, joined by a bridge in a namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND_TIMEOUT_S = 30


def run(*command: str) -> None:
    """Run a command; its complaint is the test's."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Host:
    """A PC of the LAN with a temporary folder of its own."""

    def __init__(self, namespace: str, address: str, folder: Path) -> None:
        self.namespace = namespace
        self.address = address
        self.folder = folder
        folder.mkdir()
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        """Run a module of ours on this host; it ends with the test."""
        with (self.folder / f"{module}.log").open("w") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PACELINE_HOME": str(self.folder / "home")},
            )
        self._processes.append(process)
        return process

    def paceline(self, *arguments: str, timeout_s: float = 120) -> str:
        """What a subcommand prints on this host."""
        process = self.start("paceline", *arguments)
        output, _ = process.communicate(timeout=timeout_s)
        log = (self.folder / "paceline.log").read_text()
        assert process.returncode == 0, log
        return output

    def limit_rate(self, megabits_per_second: int) -> None:
        """Slow down what leaves this host."""
        run("ip", "netns", "exec", self.namespace, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
            "rate", f"{megabits_per_second}mbit", "burst", "64kb", "latency", "200ms")  # fmt: skip

    def cut_off(self) -> None:
        """Pull the cable."""
        run("ip", "netns", "exec", self.namespace, "ip", "link", "set", "eth0", "down")

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Three hosts: an admin's PC and two that take stages."""
    if sys.platform == "win32" or shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, iproute2 and root")
    prefix = f"pl{os.getpid()}"
    switch = f"{prefix}s"
    try:
        run("ip", "netns", "add", switch)
    except RuntimeError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    hosts: list[Host] = []
    folder = tmp_path_factory.mktemp("lan")
    try:
        run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge", "mcast_snooping", "0")
        run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for number in range(1, 4):
            namespace = f"{prefix}h{number}"
            address = f"10.77.0.{number}"
            run("ip", "netns", "add", namespace)
            hosts.append(Host(namespace, address, folder / f"host-{number}"))
            run("ip", "-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns",
                namespace)  # fmt: skip
            run("ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge0", "up")
            run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", namespace, "link", "set", "lo", "up")
            run("ip", "-n", namespace, "link", "set", "eth0", "up")
            run("ip", "-n", namespace, "route", "add", "default", "dev", "eth0")
        yield hosts
    finally:
        for host in hosts:
            host.close()
        for namespace in [host.namespace for host in hosts] + [switch]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=COMMAND_TIMEOUT_S)
