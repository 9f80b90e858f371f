"""A gateway between stages that are played here and send it rubbish beside what they should."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import zmq

from fleet.codec import PROTOCOL_VERSION, Decoder, encode
from fleet.gateway_messages import AskStatus, Finished, GatewayMessage, Generate, ServiceStatus
from fleet.identity import Identity
from fleet.manifest import Manifest, load_manifest
from fleet.node import PeerAddress
from fleet.sockets import AllowList, bind_tcp, curve_client_socket, curve_server_socket, start_zap
from pipeline.gateway.scheduler import SchedulerLimits
from pipeline.gateway.service import Gateway
from pipeline.gateway.tokenizer import ModelTokenizer
from pipeline.messages import Attach, Attached, Fault, Ping, Pong, Sampled, StageMessage, StageTiming, Step, StepResult

MutatedMessages = Callable[[Sequence[bytes], int], Sequence[list[bytes]]]
DEADLINE_S = 60.0
SEND_TIMEOUT_MS = 10_000


class PlayedStages:
    """Two stages in a thread; the last answers each step with token 5 for everybody, and both with ``rubbish``."""

    def __init__(self, manifest: Manifest, gateway_key: str) -> None:
        self.rubbish: Sequence[list[bytes]] = ()
        self.rubbish_sent = threading.Event()
        self.sent = 0
        self._manifest = manifest
        self._identity = Identity.generate()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = start_zap(self._context, AllowList([gateway_key]))
        self._sockets = [curve_server_socket(self._context, zmq.ROUTER, self._identity) for _ in manifest.stages]
        self.addresses = tuple(
            PeerAddress(f"PC-{number}", ("127.0.0.1",), bind_tcp(socket, "127.0.0.1"), self._identity.public_key)
            for number, socket in enumerate(self._sockets)
        )
        self._gateway = [b""] * len(self._sockets)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="played stages")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._zap.close()
        self._context.destroy(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in self._sockets:
            socket.set(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
            poller.register(socket, zmq.POLLIN)
        decoder: Decoder[StageMessage] = Decoder(StageMessage)
        while not self._stop.is_set():
            for socket, _ in poller.poll(20):
                connection, frame = socket.recv_multipart()
                number = self._sockets.index(socket)
                self._gateway[number] = connection
                self._answer(number, decoder.decode(frame))
            if self.rubbish and not self.rubbish_sent.is_set():
                for index, frames in enumerate(self.rubbish):
                    self._send(index % len(self._sockets), frames)
                self.rubbish_sent.set()

    def _answer(self, number: int, message: StageMessage) -> None:
        part = self._manifest.stages[number]
        match message:
            case Attach(epoch=epoch):
                attached = Attached(
                    PROTOCOL_VERSION, epoch, number, "PC", "CPU", part.first_layer, part.end_layer,
                    self._manifest.model_id,
                )  # fmt: skip
                self._send(number, [encode(attached)])
            case Ping():
                self._send(number, [encode(Pong(message.number, 0, 0))])
            case Step():
                sampled = tuple(Sampled(entry.sequence, (5,)) for entry in message.entries if entry.sampled_positions)
                result = StepResult(message.epoch, message.step, sampled, (StageTiming(number, 1.0),))
                self._send(-1, [encode(result)])

    def _send(self, number: int, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the gateway is about to connect anew
            self._sockets[number].send_multipart([self._gateway[number], *frames])
            self.sent += 1


@pytest.fixture
def hostile(smollm2_two_stages: Path) -> Iterator[tuple[Gateway, PlayedStages, Identity]]:
    identity, client = Identity.generate(), Identity.generate()
    manifest = load_manifest(smollm2_two_stages)
    stages = PlayedStages(manifest, identity.public_key)
    stopping, ready = threading.Event(), threading.Event()
    gateway = Gateway(
        manifest,
        ModelTokenizer(smollm2_two_stages, 256),
        SchedulerLimits(stages=2, context_tokens=256, max_sequences=4, prefill_chunk_tokens=64),
        stages.addresses,
        identity,
        AllowList([client.public_key]),
        stopping,
        kv_precision="f16",
        on_state=lambda state, detail: ready.set() if state == "ready" else None,
    )
    thread = threading.Thread(target=gateway.run, name="gateway")
    thread.start()
    try:
        assert ready.wait(DEADLINE_S)
        yield gateway, stages, client
        assert thread.is_alive(), "the gateway has not survived"
    finally:
        stopping.set()
        thread.join(DEADLINE_S)
        stages.close()


def test_ten_thousand_mutated_answers_of_stages_do_not_harm_the_gateway(
    hostile: tuple[Gateway, PlayedStages, Identity], mutated_messages: MutatedMessages
) -> None:
    gateway, stages, identity = hostile
    now = time.time_ns()
    resident_before = psutil.Process().memory_info().rss
    good = [
        encode(StepResult(now, 1, (Sampled(1, (5,), ((-0.5, ((5, -0.5),)),)),), (StageTiming(0, 1.5),))),
        encode(Fault(now, 0, "PC", (1, 2), "no", epoch_over=True)),
        encode(Attached(PROTOCOL_VERSION, now, 0, "PC", "CPU", 0, 15, "m")),
        encode(Pong(1, now, 0)),
    ]
    stages.rubbish = mutated_messages(good, 8)
    assert stages.rubbish_sent.wait(DEADLINE_S)
    assert stages.sent > len(stages.rubbish)
    decoder: Decoder[GatewayMessage] = Decoder(GatewayMessage)
    with (
        zmq.Context() as context,
        curve_client_socket(context, zmq.DEALER, identity, gateway.address.public_key) as socket,
    ):
        socket.set(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        socket.set(zmq.RCVTIMEO, SEND_TIMEOUT_MS)
        socket.connect(f"tcp://127.0.0.1:{gateway.port}")
        deadline = time.monotonic() + DEADLINE_S
        state = ""
        while state != "ready":
            assert time.monotonic() < deadline
            socket.send(encode(AskStatus(1, PROTOCOL_VERSION)))
            message = decoder.decode(socket.recv())
            state = message.state if isinstance(message, ServiceStatus) else state
        socket.send(encode(Generate(2, tokens=(1, 2, 3), max_tokens=3)))
        while not isinstance(message := decoder.decode(socket.recv()), Finished):
            assert time.monotonic() < deadline
        assert message.completion_tokens == 3
    assert psutil.Process().memory_info().rss - resident_before < 64 << 20
