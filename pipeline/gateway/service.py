"""The data path of the gateway: one thread, blocking sockets, one poll.

It owns the connections to the stages and the clients' ROUTER, feeds the scheduler with what comes in and carries its
instructions out. Prompts are turned into tokens in other threads and come back through a mailbox, as do the
addresses of stages that were looked for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import zmq

from fleet.codec import MAX_CONTROL_BYTES, PROTOCOL_VERSION, Decoder, encode
from fleet.errors import MessageError, UnreachableError
from fleet.gateway_messages import (
    AskStatus,
    Cancel,
    ClientMessage,
    Failed,
    Finished,
    GatewayMessage,
    Generate,
    ServiceStatus,
    StageReport,
)
from fleet.identity import Identity
from fleet.limited_log import LimitedLog
from fleet.manifest import KvPrecision, Manifest
from fleet.node import PeerAddress
from fleet.sockets import AllowList, authorised_sender, bind_tcp, curve_server_socket, pick_address, start_zap
from pipeline.gateway.clients import Clients
from pipeline.gateway.instructions import (
    BeginEpoch,
    ChainClosed,
    ChainOpened,
    Instruction,
    SendRelease,
    SendStep,
    ToClient,
)
from pipeline.gateway.intake import Intake, Prepared, ServedModel
from pipeline.gateway.mailbox import Mailbox
from pipeline.gateway.scheduler import Scheduler, SchedulerLimits
from pipeline.gateway.sequence import RequestKey
from pipeline.gateway.stage_link import ExpectedStage, Resolved, StageLink
from pipeline.gateway.tokenizer import ModelTokenizer
from pipeline.messages import Fault, StepResult

TICK_S = 0.1
RESOLVE_TIMEOUT_S = 5.0
CLIENT_HIGH_WATER_MARK = 4096
"""Messages that wait for a client that reads slowly; one that lets more pile up counts as gone."""
MAX_PREPARING = 256
"""Requests whose prompts are being turned into tokens."""
MAX_FRAMES = 1
MESSAGES_IN_A_ROW = 64
"""Of clients, before the stages are looked at again."""
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}

State = Literal["starting", "ready", "degraded"]
_log = logging.getLogger(__name__)


class Gateway:
    """Serves a model over its stages until ``stopping`` is set.

    Args:
        stages: where the stages listen, in their order.
        identity: the node's; stages must know it, clients expect it.
        allow_list: keys of the clients.
        on_state: called from the data thread at each change of state, with the reason in words.

    Raises:
        UnreachableError: the port is taken.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: ModelTokenizer,
        limits: SchedulerLimits,
        stages: tuple[PeerAddress, ...],
        identity: Identity,
        allow_list: AllowList,
        stopping: threading.Event,
        *,
        kv_precision: KvPrecision,
        bind_address: str = "0.0.0.0",
        port: int = 0,
        on_state: Callable[[State, str], None],
    ) -> None:
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._kv_precision = kv_precision
        self._allow_list = allow_list
        self._stopping = stopping
        self._on_state = on_state
        self._said: tuple[State, str] | None = None
        self._was_open = False
        # Stages that outlive a gateway follow the next one because the clock has gone on.
        self._scheduler = Scheduler(limits, frozenset(manifest.stop_token_ids), first_epoch=time.time_ns())
        self._clients = Clients()
        self._preparing: dict[RequestKey, bool] = {}
        """Requests at the intake; False once they were cancelled."""
        self._instructions: deque[Instruction] = deque()
        self._is_carrying_out = False
        self._decoder: Decoder[ClientMessage] = Decoder(ClientMessage)
        self._limited_log = LimitedLog(_log)
        self._mailbox: Mailbox[Prepared | Resolved] = Mailbox()
        self._intake = Intake(ServedModel(manifest.name, manifest.vocabulary_size), tokenizer, self._mailbox.post)
        self._resolver = ThreadPoolExecutor(len(stages), thread_name_prefix="resolver")
        self._poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._zap = start_zap(self._context, allow_list)
            self._router = curve_server_socket(
                self._context,
                zmq.ROUTER,
                identity,
                high_water_mark=CLIENT_HIGH_WATER_MARK,
                max_message_bytes=MAX_CONTROL_BYTES,
            )
            self.port = bind_tcp(self._router, bind_address, port)
        except BaseException:
            self._close_threads()
            self._context.destroy(0)
            raise
        self.address = PeerAddress(
            "this PC", (LOOPBACK_OF.get(bind_address, bind_address),), self.port, identity.public_key
        )
        """For clients on this PC."""
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._mailbox.wake, zmq.POLLIN)
        self._links = [
            StageLink(
                ExpectedStage(number, stage.first_layer, stage.end_layer, manifest.model_id),
                peer,
                stages[number + 1] if number + 1 < len(stages) else None,
                identity,
                self._context,
                self._poller,
                resolve=self._resolve,
                on_lost=self._link_lost,
                on_connected=self._link_connected,
                on_attached=self._link_attached,
            )
            for number, (stage, peer) in enumerate(zip(manifest.stages, stages, strict=True))
        ]

    def run(self) -> None:
        """Serve, then close everything."""
        try:
            next_tick_s = 0.0
            while not self._stopping.is_set():
                wait_s = max(0.0, next_tick_s - time.monotonic())
                ready = dict(self._poller.poll(math.ceil(wait_s * 1e3)))
                self._look_at(ready)
                now_s = time.monotonic()
                if now_s >= next_tick_s:
                    next_tick_s = now_s + TICK_S
                    self._tick(now_s)
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets and end the threads."""
        self._close_threads()
        for link in self._links:
            link.close()
        self._zap.close()
        self._context.destroy(0)
        self._mailbox.close()

    def _close_threads(self) -> None:
        self._intake.close()
        # A search for an address takes its time; nothing waits for it.
        self._resolver.shutdown(wait=False, cancel_futures=True)

    def _look_at(self, ready: dict[Any, int]) -> None:
        # What became of the connections comes first: it says which node is at fault, where a stage only reports that
        # the one after it is gone.
        for link in self._links:
            if any(link.owns(socket) == "monitor" for socket in ready):
                link.watch(time.monotonic())
        for link in self._links:
            if any(link.owns(socket) == "data" for socket in ready):
                self._receive_from(link)
        if self._mailbox.wake.fileno() in ready or self._mailbox.wake in ready:
            self._open_mail()
        if self._router in ready:
            for _ in range(MESSAGES_IN_A_ROW):
                if not self._receive_from_client():
                    break

    def _tick(self, now_s: float) -> None:
        for link in self._links:
            link.tick(now_s)
        busy = self._scheduler.clients() | {key.client for key in self._preparing}
        for client in self._clients.silent(busy, now_s):
            _log.info("a client has fallen silent; its requests are cancelled")
            self._client_gone(client)
        self._carry_out(self._scheduler.tick(now_s))

    # Stages

    def _resolve(self, peer: PeerAddress, stage: int, attempt: int) -> None:
        def search() -> None:
            try:
                self._mailbox.post(Resolved(stage, attempt, pick_address(peer, RESOLVE_TIMEOUT_S)))
            except UnreachableError as error:
                self._mailbox.post(Resolved(stage, attempt, error=f"Stage {stage}: {error}"))

        self._resolver.submit(search)

    def _receive_from(self, link: StageLink) -> None:
        for message in link.receive(time.monotonic()):
            now_s = time.monotonic()
            if isinstance(message, StepResult):
                self._carry_out(self._scheduler.result(message, now_s))
            elif isinstance(message, Fault):
                if message.epoch_over:
                    for other in self._links:
                        other.watch(now_s)
                self._carry_out(self._scheduler.fault(message, now_s))

    def _link_lost(self, link: StageLink, reason: str) -> None:
        self._carry_out(self._scheduler.stage_lost(link.peer.node_name, reason, time.monotonic()))

    def _link_connected(self, link: StageLink) -> None:
        if all(each.is_connected for each in self._links):
            self._carry_out(self._scheduler.stages_connected(time.monotonic()))

    def _link_attached(self, link: StageLink) -> None:
        if all(each.attached_epoch == link.attached_epoch for each in self._links):
            self._carry_out(self._scheduler.all_attached(link.attached_epoch, time.monotonic()))

    # Clients

    def _open_mail(self) -> None:
        for item in self._mailbox.take():
            now_s = time.monotonic()
            if isinstance(item, Resolved):
                self._links[item.stage].resolved(item, now_s)
                continue
            wanted = self._preparing.pop(item.key, False)
            if not wanted:
                continue
            if item.request is not None:
                self._carry_out(self._scheduler.submit(item.request, now_s))
            elif item.refused is not None:
                refused = Failed(item.key.number, item.refused.code, str(item.refused))
                self._send_to(item.key.client, refused)

    def _receive_from_client(self) -> bool:
        """Take one message; False where there is none."""
        try:
            routing_id = self._router.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        frames: list[zmq.Frame] = []
        more = routing_id.more
        while more:
            frame = self._router.recv(copy=False)
            more = frame.more
            if len(frames) <= MAX_FRAMES:
                frames.append(frame)
        if len(frames) != MAX_FRAMES:
            self._limited_log.warning("dropped a client's message that has not exactly one frame")
        elif authorised_sender(frames[0], self._allow_list) is None:
            self._limited_log.warning("dropped a message of a client that is not allowed here")
        else:
            try:
                message = self._decoder.decode(frames[0].buffer)
            except MessageError as error:
                self._limited_log.warning(f"dropped a client's message: {error}")
            else:
                self._take(routing_id.bytes, message, time.monotonic())
        return True

    def _take(self, client: bytes, message: ClientMessage, now_s: float) -> None:
        if isinstance(message, AskStatus):
            self._clients.greet(client, message.protocol, now_s)
            self._send_to(client, self._status(message.number))
            return
        if not self._clients.hear(client, now_s):
            text = f"A connection begins with a status request that names protocol version {PROTOCOL_VERSION}."
            self._send_to(client, Failed(message.number, "bad_request", text))
        elif isinstance(message, Generate):
            self._begin(RequestKey(client, message.number), message, now_s)
        else:
            self._cancel(RequestKey(client, message.number), message, now_s)

    def _begin(self, key: RequestKey, generate: Generate, now_s: float) -> None:
        if key in self._preparing or self._scheduler.knows(key):
            text = f"Request number {key.number} is running already."
            self._send_to(key.client, Failed(key.number, "bad_request", text))
        elif len(self._preparing) >= MAX_PREPARING:
            self._send_to(key.client, Failed(key.number, "overloaded", "Too many requests at once; try again later."))
        else:
            self._preparing[key] = True
            self._intake.prepare(key, generate, now_s)

    def _cancel(self, key: RequestKey, message: Cancel, now_s: float) -> None:
        if self._preparing.get(key):
            self._preparing[key] = False
            self._send_to(key.client, Finished(message.number, "cancelled", 0, 0, 0.0, 0.0))
        else:
            self._carry_out(self._scheduler.cancel(key, now_s))

    def _client_gone(self, client: bytes) -> None:
        self._clients.forget(client)
        for key in self._preparing:
            if key.client == client:
                self._preparing[key] = False
        self._carry_out(self._scheduler.client_gone(client, time.monotonic()))

    def _send_to(self, client: bytes, message: GatewayMessage) -> None:
        try:
            self._router.send_multipart([client, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._client_gone(client)

    # Carrying out

    def _carry_out(self, instructions: list[Instruction]) -> None:
        """Carry out, in the order in which the scheduler decided.

        A client or a stage that turns out to be gone makes the scheduler decide again, in the middle of a list. What
        that brings must not overtake the rest of the list: a Release would reach the stages before the step.
        """
        self._instructions.extend(instructions)
        if self._is_carrying_out:
            return
        self._is_carrying_out = True
        try:
            while self._instructions:
                self._carry_out_one(self._instructions.popleft(), time.monotonic())
        finally:
            self._is_carrying_out = False

    def _carry_out_one(self, instruction: Instruction, now_s: float) -> None:
        match instruction:
            case SendStep(step):
                self._links[0].send(step, now_s)
            case SendRelease(release):
                self._links[0].send(release, now_s)
            case ToClient(client, message):
                self._send_to(client, message)
            case BeginEpoch(epoch):
                for link in self._links:
                    link.attach(epoch, now_s)
            case ChainOpened():
                self._was_open = True
                self._say("ready", "")
            case ChainClosed(_, text):
                self._say(self._closed_state, text)

    @property
    def _closed_state(self) -> State:
        return "degraded" if self._was_open else "starting"

    def _say(self, state: State, detail: str) -> None:
        if self._said != (state, detail):
            self._said = (state, detail)
            self._on_state(state, detail)

    def _status(self, number: int) -> ServiceStatus:
        scheduler = self._scheduler
        is_open = scheduler.state == "open"
        stages = tuple(
            StageReport(
                link.expected.number,
                link.peer.node_name,
                link.expected.first_layer,
                link.expected.end_layer,
                link.is_connected,
                link.device,
                round(scheduler.costs.decode_ms.get(link.expected.number, 0.0), 3),
            )
            for link in self._links
        )
        return ServiceStatus(
            number=number,
            protocol=PROTOCOL_VERSION,
            model=self._manifest.name,
            state="ready" if is_open else self._closed_state,
            detail="" if is_open else scheduler.closed_message,
            context_tokens=scheduler.limits.context_tokens,
            has_chat_template=self._tokenizer.has_chat_template,
            kv_precision=self._kv_precision,
            running=scheduler.running,
            waiting=scheduler.waiting + len(self._preparing),
            stages=stages,
            tokens_total=scheduler.tokens_total,
        )
