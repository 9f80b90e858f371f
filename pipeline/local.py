"""A chain of stages, and a gateway if wanted, as processes of this PC: for benchmarks, tests, and a trial of a cut.

No agents and no fleet: every process gets an identity that is thrown away, and listens on loopback only.
"""

from __future__ import annotations

import collections
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

from fleet.child_process import start_child
from fleet.errors import ModelError, PacelineError, UnreachableError
from fleet.identity import Identity
from fleet.manifest import KvPrecision, load_manifest
from fleet.node import PeerAddress, Port
from fleet.process import ChildStatus, GatewayConfig, StageConfig

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 3.0
"""How long a child may take to end once its input is closed, before it is killed."""
KEPT_LOG_LINES = 40
SHOWN_LOG_LINES = 8

_log = logging.getLogger(__name__)


class ChildProcess:
    """A child that speaks the language of :mod:`fleet.process`: started at once, stopped with ``stop``.

    Its status lines are read by a thread of its own, its log by another, so that neither pipe ever fills.
    """

    def __init__(self, module: str, name: str, config: msgspec.Struct) -> None:
        self.name = name
        self.statuses: queue.SimpleQueue[ChildStatus | None] = queue.SimpleQueue()
        """Status lines as they come; None once the child has ended."""
        self._log_lines: collections.deque[str] = collections.deque(maxlen=KEPT_LOG_LINES)
        self._process = start_child(module)
        self._threads = [
            threading.Thread(target=target, name=f"{name} {what}", daemon=True)
            for target, what in ((self._read_statuses, "status"), (self._read_log, "log"))
        ]
        for thread in self._threads:
            thread.start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")
            self._process.stdin.flush()
        except OSError:
            # It ended before it read its configuration; the caller learns why from its statuses and log.
            _log.debug("%s did not read its configuration", name)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def last_log_lines(self) -> tuple[str, ...]:
        """The end of its standard error."""
        return tuple(self._log_lines)

    def wait_until_ready(self, deadline: float) -> ChildStatus:
        """The status line that says ``ready``.

        Args:
            deadline: of ``time.monotonic``.

        Raises:
            ModelError: the child failed; the text has its own words or the end of its log.
            UnreachableError: it is not ready by the deadline.
        """
        while True:
            try:
                status = self.statuses.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise UnreachableError(f"{self.name} did not get ready in time.{self._log_tail()}") from None
            if status is None:
                raise ModelError(f"{self.name} ended with exit code {self._process.wait()}.{self._log_tail()}")
            if status.state == "ready":
                return status
            if status.state == "failed":
                raise ModelError(f"{self.name} cannot start: {status.detail}")

    def kill(self) -> None:
        """End it where it stands, as a crash would."""
        self._process.kill()
        self._process.wait()

    def stop(self, deadline: float) -> None:
        """Close its input, wait until it ends, and kill it at the deadline (of ``time.monotonic``)."""
        self.close_input()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _log.warning("%s did not end by itself", self.name)
            self.kill()
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def close_input(self) -> None:
        """Tell it to end."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                _log.debug("%s is gone already", self.name)

    def _read_statuses(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self.statuses.put(msgspec.json.decode(line, type=ChildStatus))
            except msgspec.MsgspecError:
                _log.warning("%s wrote a line that is not a status", self.name)
        self.statuses.put(None)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._log_lines.append(text)
            _log.debug("%s: %s", self.name, text)

    def _log_tail(self) -> str:
        self._threads[1].join(1.0)
        lines = self.last_log_lines[-SHOWN_LOG_LINES:]
        return " It said last:\n" + "\n".join(lines) if lines else ""


class LocalPipeline:
    """Starts the stages of a shard folder, and a gateway if ``gateway``, waits until all are ready, ends them at exit.

    Args:
        shard_folder: with a manifest.
        kv_precision: of the KV caches; None for the manifest's.
        gateway: also start ``python -m pipeline.gateway``.
        pin: run each stage on a processor of its own (as far as there are enough), with one thread.
        exact: f32 inference without dynamic quantization, to compare with other runs number by number.
        threads: inference threads per stage; 0: the device's choice.
        device: OpenVINO's name of the device that all stages run on.
        http_port: of the gateway; 0 takes a free one.
        max_sequences: requests that the gateway runs at once; None: its own default.
        prefill_chunk_tokens: None: the gateway's own default.
        allowed_keys: further keys that may connect to the gateway.

    Raises (from ``start`` and on entering):
        ModelError: the shards cannot be served; the text has the failed child's words.
        UnreachableError: not ready within ``start_timeout_s``.
    """

    def __init__(
        self,
        shard_folder: Path,
        *,
        kv_precision: KvPrecision | None = None,
        gateway: bool = False,
        pin: bool = False,
        exact: bool = False,
        threads: int = 0,
        device: str = "CPU",
        http_port: int = 0,
        max_sequences: int | None = None,
        prefill_chunk_tokens: int | None = None,
        allowed_keys: Sequence[str] = (),
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.identity = Identity.generate()
        """Of the client: it may talk to the gateway, and to the stages as a gateway would."""
        self.stage_processes: list[ChildProcess] = []
        self.gateway_process: ChildProcess | None = None
        self.stage_addresses: tuple[PeerAddress, ...] = ()
        self.http_port: Port | None = None
        self._gateway_address: PeerAddress | None = None
        self._folder = shard_folder
        self._manifest = load_manifest(shard_folder)
        self._kv_precision: KvPrecision = kv_precision or self._manifest.kv_precision
        self._with_gateway = gateway
        self._pin = pin
        self._exact = exact
        self._threads = threads or (1 if pin else 0)
        self._device = device
        self._wanted_http_port = http_port
        self._max_sequences = max_sequences
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._allowed_keys = tuple(allowed_keys)
        self._stage_configs: list[StageConfig] = []
        self._start_timeout_s = start_timeout_s

    @property
    def gateway_address(self) -> PeerAddress:
        """Where the gateway listens.

        Raises:
            PacelineError: no gateway was asked for, or it does not run.
        """
        if self._gateway_address is None:
            raise PacelineError("This local pipeline runs no gateway.")
        return self._gateway_address

    def __enter__(self) -> LocalPipeline:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start everything and wait until it is ready; where that fails, nothing is left running."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def restart_stage(self, number: int) -> None:
        """Start a stage that has ended again, with the key and the port that it had, and wait until it is ready."""
        config = msgspec.structs.replace(self._stage_configs[number], port=self.stage_addresses[number].port)
        self.stage_processes[number].stop(time.monotonic())
        self.stage_processes[number] = ChildProcess("pipeline.stage", f"Stage {number}", config)
        self.stage_processes[number].wait_until_ready(time.monotonic() + self._start_timeout_s)

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        processes = [*([self.gateway_process] if self.gateway_process else []), *self.stage_processes]
        for process in processes:
            process.close_input()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            process.stop(deadline)
        self.stage_processes = []
        self._stage_configs = []
        self.gateway_process = None
        self._gateway_address = None
        self.http_port = None

    def _start(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        gateway_identity = Identity.generate()
        identities = [Identity.generate() for _ in self._manifest.stages]
        processors = psutil.Process().cpu_affinity() if self._pin and sys.platform != "darwin" else []
        for number, identity in enumerate(identities):
            allowed = [gateway_identity.public_key, self.identity.public_key]
            if number:
                allowed.append(identities[number - 1].public_key)
            config = StageConfig(
                node_name=f"stage-{number}",
                shard_folder=str(self._folder),
                stage=number,
                device=self._device,
                kv_precision=self._kv_precision,
                secret_key=identity.secret_key,
                public_key=identity.public_key,
                allowed_keys=tuple(allowed),
                bind_address=LOOPBACK,
                threads=self._threads,
                cpus=(processors[number % len(processors)],) if processors else (),
                inference_precision="f32" if self._exact else "",
                dynamic_quantization_group_size=0 if self._exact else None,
                low_priority=False,
            )
            self._stage_configs.append(config)
            self.stage_processes.append(ChildProcess("pipeline.stage", f"Stage {number}", config))
        self.stage_addresses = tuple(
            _address(f"stage-{number}", process.wait_until_ready(deadline), identity)
            for number, (process, identity) in enumerate(zip(self.stage_processes, identities, strict=True))
        )
        if self._with_gateway:
            self._start_gateway(gateway_identity, deadline)

    def _start_gateway(self, identity: Identity, deadline: float) -> None:
        config = GatewayConfig(
            node_name="gateway",
            shard_folder=str(self._folder),
            stages=self.stage_addresses,
            kv_precision=self._kv_precision,
            secret_key=identity.secret_key,
            public_key=identity.public_key,
            allowed_keys=(self.identity.public_key, *self._allowed_keys),
            bind_address=LOOPBACK,
            http_port=self._wanted_http_port,
            low_priority=False,
        )
        if self._max_sequences is not None:
            config = msgspec.structs.replace(config, max_sequences=self._max_sequences)
        if self._prefill_chunk_tokens is not None:
            config = msgspec.structs.replace(config, prefill_chunk_tokens=self._prefill_chunk_tokens)
        self.gateway_process = ChildProcess("pipeline.gateway", "The gateway", config)
        status = self.gateway_process.wait_until_ready(deadline)
        self._gateway_address = _address("gateway", status, identity)
        self.http_port = status.http_port


def _address(name: str, status: ChildStatus, identity: Identity) -> PeerAddress:
    if status.port is None:
        raise ModelError(f"{name} is ready but does not say at which port.")
    return PeerAddress(node_name=name, addresses=(LOOPBACK,), port=status.port, public_key=identity.public_key)
