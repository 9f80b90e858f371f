"""The data path of a stage: one thread, blocking sockets, one message after the other.

Messages come from the attached gateway and from the previous stage, over one ROUTER. The state machine decides, this
module carries out. Whatever an allowed peer sends, a message that cannot be read is dropped; a stranger does not get
past the CURVE handshake.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from fleet.codec import MAX_TENSOR_BYTES, Decoder, encode, read_tensor, tensor_frame
from fleet.errors import MessageError, UnreachableError
from fleet.identity import Identity
from fleet.limited_log import LimitedLog
from fleet.sockets import AllowList, authorised_sender, bind_tcp, curve_server_socket, start_zap
from pipeline.messages import Attach, Release, StageMessage, Step
from pipeline.stage.execution import Outcome, StepExecutor
from pipeline.stage.machine import (
    Compute,
    Connect,
    Disconnect,
    Drop,
    Free,
    FreeAll,
    Instruction,
    PassOn,
    Send,
    StageMachine,
)
from pipeline.stage.next_stage import HIGH_WATER_MARK, NextStage

POLL_MS = 200
"""How soon the loop sees that it shall end."""
GATEWAY_SEND_TIMEOUT_MS = 5_000
MAX_FRAMES = 2
"""Header and tensor."""

_log = logging.getLogger(__name__)


class StageServer:
    """Serves one stage until ``stopping`` is set. Everything but the constructor's bind happens in ``run``.

    Args:
        identity: of this node.
        allow_list: keys of the gateway and of the node of the previous stage.
        on_device_state: called with what went wrong when the device failed, and with "" when it works again.

    Raises:
        UnreachableError: the port is taken.
    """

    def __init__(
        self,
        machine: StageMachine,
        executor: StepExecutor,
        identity: Identity,
        allow_list: AllowList,
        stopping: threading.Event,
        *,
        bind_address: str = "0.0.0.0",
        port: int = 0,
        on_device_state: Callable[[str], None] | None = None,
    ) -> None:
        self._machine = machine
        self._executor = executor
        self._identity = identity
        self._allow_list = allow_list
        self._stopping = stopping
        self._on_device_state = on_device_state
        self._device_failed = False
        self._decoder: Decoder[StageMessage] = Decoder(StageMessage)
        self._limited_log = LimitedLog(_log)
        self._next: NextStage | None = None
        self._tensor: NDArray[Any] | None = None
        self._hidden: NDArray[np.float32] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        try:
            self._zap = start_zap(self._context, allow_list)
            self._router = curve_server_socket(
                self._context,
                zmq.ROUTER,
                identity,
                high_water_mark=HIGH_WATER_MARK,
                max_message_bytes=MAX_TENSOR_BYTES,
            )
            self._router.set(zmq.SNDTIMEO, GATEWAY_SEND_TIMEOUT_MS)
            self._poller.register(self._router, zmq.POLLIN)
            self.port = bind_tcp(self._router, bind_address, port)
        except BaseException:
            self._context.destroy(0)
            raise

    def run(self) -> None:
        """Serve until ``stopping`` is set, then close everything."""
        try:
            while not self._stopping.is_set():
                ready = dict(self._poller.poll(POLL_MS))
                if self._next is not None and self._next.monitor_socket in ready:
                    self._check_next()
                if self._router in ready:
                    self._receive()
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets and free the KV caches."""
        self._disconnect()
        self._executor.free_all()
        self._zap.close()
        self._context.destroy(0)

    def _receive(self) -> None:
        """Take one message and do what it asks."""
        connection, frames = self._read_frames()
        if not 1 <= len(frames) <= MAX_FRAMES:
            self._limited_log.warning("dropped a message that has not one or two frames")
            return
        if authorised_sender(frames[0], self._allow_list) is None:
            self._limited_log.warning("dropped a message of a peer that is not allowed here")
            return
        try:
            message = self._decoder.decode(frames[0].buffer)
        except MessageError as error:
            self._limited_log.warning(f"dropped a message: {error}")
            return
        if isinstance(message, Step):
            self._receive_step(connection, message, frames[1].buffer if len(frames) == MAX_FRAMES else None)
        elif len(frames) == MAX_FRAMES:
            self._limited_log.warning("dropped a message with a tensor that it should not have")
        elif isinstance(message, Attach):
            self._carry_out(self._machine.attach(connection, message))
        elif isinstance(message, Release):
            self._carry_out(self._machine.release(connection, message))
        else:
            self._carry_out(self._machine.ping(connection, message))

    def _read_frames(self) -> tuple[bytes, list[zmq.Frame]]:
        """Routing id and frames of a message; frames beyond one too many are let go as they come."""
        routing_id = self._router.recv(copy=False)
        frames: list[zmq.Frame] = []
        more = routing_id.more
        while more:
            frame = self._router.recv(copy=False)
            more = frame.more
            if len(frames) <= MAX_FRAMES:
                frames.append(frame)
        return routing_id.bytes, frames

    def _receive_step(self, connection: bytes, message: Step, frame: memoryview | None) -> None:
        tensor: NDArray[Any] | None = None
        fault = ""
        if (message.tensor is None) != (frame is None):
            fault = "the hidden states and their description do not come together"
        elif message.tensor is not None and frame is not None:
            try:
                tensor = read_tensor(message.tensor, frame)
            except MessageError as error:
                fault = str(error)
        self._tensor = tensor
        try:
            shape = None if tensor is None else tensor.shape
            self._carry_out(self._machine.step(connection, message, shape, fault))
        finally:
            self._tensor = None
            self._hidden = None

    def _carry_out(self, instructions: list[Instruction]) -> None:
        queue = list(instructions)
        while queue:
            instruction = queue.pop(0)
            # What an instruction brings about is dealt with before the rest.
            queue[:0] = self._carry_out_one(instruction)

    def _carry_out_one(self, instruction: Instruction) -> list[Instruction]:
        match instruction:
            case Compute():
                return self._compute(instruction)
            case PassOn():
                return self._pass_on(instruction.message)
            case Send():
                return self._send(instruction)
            case Free():
                self._executor.free(instruction.sequences)
            case FreeAll():
                self._executor.free_all()
            case Connect():
                return self._connect(instruction)
            case Disconnect():
                self._disconnect()
            case Drop():
                self._limited_log.warning(f"dropped a message: {instruction.reason}")
        return []

    def _compute(self, compute: Compute) -> list[Instruction]:
        outcome = self._executor.run(compute, self._tensor)
        self._hidden = outcome.hidden
        self._report_device(outcome)
        return self._machine.computed(compute, outcome.failed, outcome.compute_ms, outcome.sampled)

    def _report_device(self, outcome: Outcome) -> None:
        if outcome.device_failed == self._device_failed or self._on_device_state is None:
            return
        self._device_failed = outcome.device_failed
        self._on_device_state(next(iter(outcome.failed.values())) if outcome.device_failed else "")

    def _pass_on(self, message: Step | Release) -> list[Instruction]:
        if self._next is None:
            return []
        frames: list[Any] = []
        if isinstance(message, Step) and self._hidden is not None:
            header, tensor = tensor_frame(self._hidden)
            frames = [encode(msgspec.structs.replace(message, tensor=header)), tensor]
        else:
            frames = [encode(message)]
        try:
            self._next.send(frames)
        except UnreachableError as error:
            return self._machine.next_lost(str(error))
        return []

    def _send(self, send: Send) -> list[Instruction]:
        frames = [send.connection, encode(send.message)]
        try:
            self._router.send_multipart(frames, 0 if send.must_arrive else zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if send.connection != self._machine.gateway or not send.must_arrive:
                return []
            _log.warning("the gateway is gone or takes no results; its sequences are freed")
            return self._machine.gateway_lost()
        return []

    def _connect(self, connect: Connect) -> list[Instruction]:
        self._disconnect()
        try:
            self._next = NextStage(self._context, self._identity, connect.peer, self._stopping)
        except UnreachableError as error:
            return self._machine.next_lost(str(error))
        self._poller.register(self._next.monitor_socket, zmq.POLLIN)
        return self._machine.next_ready()

    def _disconnect(self) -> None:
        if self._next is not None:
            self._poller.unregister(self._next.monitor_socket)
            self._next.close()
            self._next = None

    def _check_next(self) -> None:
        if self._next is None:
            return
        try:
            self._next.check()
        except UnreachableError as error:
            self._carry_out(self._machine.next_lost(str(error)))
