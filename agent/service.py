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

import psutil
import zmq.asyncio

from agent.agent_state import load_state, lock_data_dir
from agent.deployments import Deployments
from agent.inventory import InventoryReader, ProbeFindings, default_memory_budget, describe_machine
from agent.live_load import LoadReader
from agent.node_facts import NodeFacts
from agent.request_handler import RequestHandler, allowed_keys
from agent.run_records import RunRecords
from agent.shard_store import ShardStore
from agent.tray_process import TrayProcess
from fleet.control import ControlServer
from fleet.discovery import Announcer
from fleet.enrolment import parse_token
from fleet.errors import UnreachableError
from fleet.identity import Identity, load_or_create_identity
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
    compiled_folder: Path | None = None
    stage_module: str = "pipeline.stage"
    gateway_module: str = "pipeline.gateway"


class AgentService:
    """One agent, in the running event loop: ``await run()`` until ``stop()``."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        total_bytes = int(psutil.virtual_memory().total)
        self._budget_bytes = min(options.memory_budget_bytes or default_memory_budget(total_bytes), total_bytes)
        self._stopped = asyncio.Event()
        self._inventory_reader = InventoryReader()

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
        data_dir = self._options.data_dir
        with lock_data_dir(data_dir):
            identity, trust = load_or_create_identity(data_dir), TrustStore(data_dir)
            fleet = self._join(trust)
            context = zmq.asyncio.Context()
            try:
                async with contextlib.AsyncExitStack() as stack:
                    await self._serve(context, stack, identity, trust, fleet)
            finally:
                context.destroy(linger=0)

    def _join(self, trust: TrustStore) -> str:
        """Trust the token's controller, and return the key of the one to announce.

        The announcement names one controller. A new one must see itself named, to look at the enrolment; others know
        this PC already.
        """
        if self._options.enrolment_token is None:
            return next(iter(trust.controllers()), "")
        token = parse_token(self._options.enrolment_token)
        trust.trust_controller(token.controller_key, token=token)
        return token.controller_key

    async def _serve(
        self,
        context: zmq.asyncio.Context,
        stack: contextlib.AsyncExitStack,
        identity: Identity,
        trust: TrustStore,
        fleet: str,
    ) -> None:
        """Start the parts one after another; ``stack`` ends them in the reverse order."""
        options, data_dir = self._options, self._options.data_dir
        allow_list = AllowList(allowed_keys(trust, identity))
        stack.callback(start_zap(context, allow_list).close)
        state = load_state(data_dir)

        store_folder = data_dir / "store"
        store = await asyncio.to_thread(ShardStore, store_folder)
        receiver = TransferReceiver(context, identity, allow_list)
        stack.push_async_callback(receiver.close)
        facts = NodeFacts(
            options.name,
            identity,
            self._budget_bytes,
            options.compiled_folder,
            trust.controllers,
            options.stage_module,
            options.gateway_module,
        )
        deployments = Deployments(facts, store, RunRecords(store_folder / "deployments"), receiver)
        stack.push_async_callback(deployments.close)
        deployments.restore(trust.controllers())

        handler = RequestHandler(
            name=options.name,
            data_dir=data_dir,
            identity=identity,
            trust=trust,
            allow_list=allow_list,
            deployments=deployments,
            load=LoadReader(data_dir),
            inventory=describe_machine(
                ProbeFindings(faults=["The devices of this PC are still being read."]), data_dir, self._budget_bytes
            ),
            state=state,
            quit_agent=self.stop,
        )
        server = ControlServer(context, identity, allow_list, handler.handle)
        stack.push_async_callback(server.close)
        transfer_port = _start_on(receiver.start, state.transfer_port)
        control_port = _start_on(server.start, state.control_port)
        handler.listens_on(control_port, transfer_port)

        reading = asyncio.create_task(self._read_inventory(handler), name="inventory")
        stack.push_async_callback(self._end_reading, reading)
        await self._stopped_before(reading)
        if self._stopped.is_set():
            return
        announcer = Announcer(identity, options.name, control_port, fleet)
        await announcer.start()
        stack.push_async_callback(announcer.close)
        announcing: set[asyncio.Task[None]] = set()

        def announce(controller: str) -> None:
            task = asyncio.get_running_loop().create_task(announcer.set_fleet(controller))
            announcing.add(task)
            task.add_done_callback(announcing.discard)

        handler.announce = announce
        if options.tray:
            stack.callback(TrayProcess(data_dir).close)
        _log.info(
            "agent %s (%s) listens on port %d%s",
            options.name,
            identity.node_id,
            control_port,
            "" if fleet else "; it is in no fleet yet: start it with --enrol TOKEN",
        )
        await self._stopped.wait()
        _log.info("agent %s ends", options.name)

    async def _stopped_before(self, reading: asyncio.Task[None]) -> None:
        """Wait until the inventory is read, or for as long as that may hold up the start, or until ``stop``."""
        stopped = asyncio.create_task(self._stopped.wait(), name="stopped")
        await asyncio.wait([reading, stopped], timeout=INVENTORY_HEAD_START_S, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def _read_inventory(self, handler: RequestHandler) -> None:
        inventory = await asyncio.to_thread(self._inventory_reader.read, self._options.data_dir, self._budget_bytes)
        if self._stopped.is_set():
            return
        handler.renew_inventory(inventory)
        for fault in inventory.faults:
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
    compiled_folder: Path | None = None,
) -> None:
    """Run an agent in this process until a signal (SIGINT, SIGTERM, Ctrl-Break), its tray or its input's end ends it.

    ``compiled_folder`` is where its stages look for shards that were compiled beforehand.

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
        compiled_folder=compiled_folder,
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
