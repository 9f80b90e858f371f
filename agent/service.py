"""The agent: announces this PC, says how it is, receives stages and runs them, for the controllers that it trusts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import psutil
import zmq.asyncio

from agent.agent_state import keep_state, load_state, lock_data_dir
from agent.deployments import Deployments, NodeFacts
from agent.inventory import InventoryReader, ProbeFindings, default_memory_budget, describe_machine
from agent.live_load import LoadReader
from agent.run_records import RunRecords
from agent.shard_store import ShardStore
from agent.tray_process import TrayProcess
from fleet.codec import PROTOCOL_VERSION
from fleet.control import ControlServer
from fleet.control_messages import (
    ControlReply,
    ControlRequest,
    Done,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Leave,
    NodeStatus,
    PrepareStage,
    Quit,
    SetPaused,
    StartGateway,
    StartStage,
    Undeploy,
    Welcome,
)
from fleet.discovery import Announcer
from fleet.enrolment import parse_token
from fleet.errors import DeployError, EnrolmentError, UnreachableError
from fleet.identity import load_or_create_identity
from fleet.transfer import TransferReceiver
from fleet.trust import TrustStore
from fleet.zap import AllowList, start_zap

_log = logging.getLogger("paceline.agent")
INVENTORY_HEAD_START_S = 10.0
"""An agent is announced when its devices are known, or after so long in any case: a driver may hang."""
SIGNAL_CHECK_S = 0.5


@dataclass(frozen=True)
class AgentOptions:
    """How an agent is started. The budget None stands for a share of this PC's memory."""

    data_dir: Path
    name: str
    enrolment_token: str | None = None
    memory_budget_bytes: int | None = None
    tray: bool = False
    stop_with_stdin: bool = False
    stage_module: str = "pipeline.stage"
    gateway_module: str = "pipeline.gateway"


class AgentService:
    """One agent, in the running event loop: ``await run()`` until ``stop()``."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._data_dir = options.data_dir
        total_bytes = int(psutil.virtual_memory().total)
        self._budget_bytes = min(options.memory_budget_bytes or default_memory_budget(total_bytes), total_bytes)
        self._stopped = asyncio.Event()
        self._inventory_reader = InventoryReader()
        self._inventory_number = 0

    def stop(self) -> None:
        """End ``run``. Call it in the event loop."""
        self._stopped.set()

    async def run(self) -> None:
        """Serve until ``stop`` is called.

        Raises:
            DataFolderError: the data folder cannot be used, or another agent uses it.
            EnrolmentError: the enrolment token is not one.
            UnreachableError: no port can be opened.
        """
        with lock_data_dir(self._data_dir):
            self._identity = load_or_create_identity(self._data_dir)
            self._trust = TrustStore(self._data_dir)
            # The announcement names one controller. A new one must see itself named, to look at the enrolment; others
            # know this PC already.
            self._fleet = next(iter(self._trust.controllers()), "")
            if self._options.enrolment_token is not None:
                token = parse_token(self._options.enrolment_token)
                self._trust.trust_controller(token.controller_key, token=token)
                self._fleet = token.controller_key
            self._state = load_state(self._data_dir)
            context = zmq.asyncio.Context()
            try:
                async with contextlib.AsyncExitStack() as stack:
                    await self._serve(context, stack)
            finally:
                context.destroy(linger=0)

    async def _serve(self, context: zmq.asyncio.Context, stack: contextlib.AsyncExitStack) -> None:
        identity, name = self._identity, self._options.name
        self._allow_list = AllowList(self._allowed_keys())
        stack.callback(start_zap(context, self._allow_list).close)
        self._load = LoadReader(self._data_dir)
        self._inventory = describe_machine(
            ProbeFindings(faults=["The devices of this PC are still being read."]), self._data_dir, self._budget_bytes
        )
        reading = asyncio.create_task(self._read_inventory(), name="inventory")
        stack.push_async_callback(self._end_reading, reading)

        store_folder = self._data_dir / "store"
        store = await asyncio.to_thread(ShardStore, store_folder)
        receiver = TransferReceiver(context, identity, self._allow_list)
        stack.push_async_callback(receiver.close)
        facts = NodeFacts(
            name,
            identity,
            self._budget_bytes,
            self._data_dir / "cache",
            self._trust.controllers,
            self._options.stage_module,
            self._options.gateway_module,
        )
        self._deployments = Deployments(facts, store, RunRecords(store_folder / "deployments"), receiver)
        stack.push_async_callback(self._deployments.close)
        self._deployments.restore(self._trust.controllers())

        server = ControlServer(context, identity, self._allow_list, self.handle)
        stack.push_async_callback(server.close)
        control_port = _start_on(server.start, self._state.control_port)
        self._transfer_port = _start_on(receiver.start, self._state.transfer_port)
        self._state = msgspec.structs.replace(self._state, control_port=control_port, transfer_port=self._transfer_port)
        keep_state(self._data_dir, self._state)

        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait([reading, stopped], timeout=INVENTORY_HEAD_START_S, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if self._stopped.is_set():
            return
        announcer = Announcer(identity, name, control_port, self._fleet)
        await announcer.start()
        stack.push_async_callback(announcer.close)
        if self._options.tray:
            tray = TrayProcess(self._data_dir)
            stack.callback(tray.close)
        _log.info(
            "agent %s (%s) listens on port %d%s",
            name,
            identity.node_id,
            control_port,
            "" if self._fleet else "; it is in no fleet yet: start it with --enrol TOKEN",
        )
        await self._stopped.wait()
        _log.info("agent %s ends", name)

    async def handle(self, request: ControlRequest, sender: str) -> ControlReply:
        """Carry out a request of the controller (or owner) that holds the key ``sender``."""
        owner = sender == self._identity.public_key
        done = Done(number=request.number)
        match request:
            case Hello():
                return self._welcome(request, sender)
            case Heartbeat():
                return HeartbeatReply(number=request.number, status=self._status())
            case SetPaused() | Quit() if not owner:
                raise EnrolmentError("Only the owner of this PC may ask for that.")
            case SetPaused(paused=paused):
                self._state = msgspec.structs.replace(self._state, paused=paused)
                keep_state(self._data_dir, self._state)
            case Quit():
                # After the answer is on its way.
                asyncio.get_running_loop().call_later(0.2, self.stop)
            case PrepareStage():
                if self._state.paused:
                    raise DeployError("this PC is paused by its owner and takes no new stages.")
                self._deployments.prepare(request, sender)
            case StartStage():
                self._deployments.start_stage(request, sender)
            case StartGateway():
                self._deployments.start_gateway(request, sender)
            case Undeploy(deployment=deployment):
                self._deployments.undeploy(deployment)
            case Leave():
                self._trust.forget_controller(sender)
                self._deployments.undeploy_of(sender)
                self._allow_list.replace(self._allowed_keys())
        return done

    def _welcome(self, request: Hello, sender: str) -> Welcome:
        token_id, token_proof = "", ""
        controller = self._trust.controllers().get(sender)
        if controller is not None:
            token_id, token_proof = controller.token_id, controller.prove(self._identity.public_key, request.nonce)
            if controller.name != request.controller_name:
                self._trust.trust_controller(sender, request.controller_name)
        return Welcome(
            number=request.number,
            protocol=PROTOCOL_VERSION,
            name=self._options.name[:256],
            inventory=self._inventory,
            transfer_port=self._transfer_port,
            token_id=token_id,
            token_proof=token_proof,
        )

    def _status(self) -> NodeStatus:
        return NodeStatus(
            load=self._load.read(),
            paused=self._state.paused,
            inventory_number=self._inventory_number,
            stages=self._deployments.stage_statuses(),
            gateways=self._deployments.gateway_statuses(),
        )

    def _allowed_keys(self) -> set[str]:
        """The controllers', and this node's own: the tray asks with it."""
        return {*self._trust.controllers(), self._identity.public_key}

    async def _read_inventory(self) -> None:
        inventory = await asyncio.to_thread(self._inventory_reader.read, self._data_dir, self._budget_bytes)
        if self._stopped.is_set():
            return
        self._inventory = inventory
        self._inventory_number += 1
        for fault in self._inventory.faults:
            _log.warning("%s", fault)

    async def _end_reading(self, reading: asyncio.Task[None]) -> None:
        self._inventory_reader.stop()
        await asyncio.wait([reading])


def _start_on(start: Callable[..., int], port: int | None) -> int:
    """Open the port that was used before, or another one where that is taken."""
    if port is not None:
        with contextlib.suppress(UnreachableError):
            return start(port=port)
    return start()


def run_agent(
    data_dir: Path,
    *,
    name: str | None = None,
    enrolment_token: str | None = None,
    memory_budget_bytes: int | None = None,
    tray: bool = False,
    stop_with_stdin: bool = False,
) -> None:
    """Run an agent in this process until a signal (SIGINT, SIGTERM, Ctrl-Break), its tray or its input's end ends it.

    Raises:
        PacelineError: it cannot be started; see ``AgentService.run``.
    """
    options = AgentOptions(
        data_dir=data_dir,
        name=name or socket.gethostname(),
        enrolment_token=enrolment_token,
        memory_budget_bytes=memory_budget_bytes,
        tray=tray,
        stop_with_stdin=stop_with_stdin,
    )
    # ZeroMQ's asyncio sockets need a selector loop, which is not Windows' own.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(_run_until_told(options))


async def _run_until_told(options: AgentOptions) -> None:
    loop = asyncio.get_running_loop()
    service = AgentService(options)

    def told(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
            loop.call_soon_threadsafe(service.stop)

    def on_signal(number: int, frame: FrameType | None) -> None:
        told()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, on_signal)
        signal.signal(signal.SIGTERM, on_signal)
        if sys.platform == "win32":
            signal.signal(signal.SIGBREAK, on_signal)
    if options.stop_with_stdin:
        threading.Thread(target=_wait_for_end_of_input, args=(told,), name="input", daemon=True).start()
    ended = asyncio.Event()
    waking = asyncio.create_task(_keep_waking(ended), name="signals") if sys.platform == "win32" else None
    try:
        await service.run()
    finally:
        ended.set()
        if waking is not None:
            await waking


def _wait_for_end_of_input(then: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    then()


async def _keep_waking(ended: asyncio.Event) -> None:
    """Python runs signal handlers between bytecodes, and on Windows nothing wakes a selector that waits."""
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), SIGNAL_CHECK_S)
