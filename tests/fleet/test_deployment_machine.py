"""A deployment's life as a state machine, without nodes and without waiting."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.control_messages import GatewayState, GatewayStatus, Progress, StageState, StageStatus
from fleet.deployment_machine import (
    LOST_NODE_PATIENCE_S,
    STALLED_S,
    Ask,
    AskGateway,
    AskPrepare,
    AskStart,
    AskUndeploy,
    DeploymentMachine,
    StageTarget,
)
from fleet.node import NodeId

ID = "0123456789ab"
A, B = NodeId("a" * 16), NodeId("b" * 16)
TARGETS = (StageTarget(0, A, "PC-1"), StageTarget(1, B, "PC-2"))


def stage(number: int, state: StageState, detail: str = "", done: int = 0) -> StageStatus:
    return StageStatus(
        deployment=ID, model="m", stage=number, first_layer=0, end_layer=1, state=state, detail=detail,
        progress=Progress(done_bytes=done, total_bytes=100),
    )  # fmt: skip


def gateway(state: GatewayState, detail: str = "") -> GatewayStatus:
    return GatewayStatus(deployment=ID, model="m", state=state, detail=detail, port=5000)


def received() -> DeploymentMachine:
    machine = DeploymentMachine(TARGETS, 0.0)
    assert machine.observe(A, [], None, 0.0) == [AskPrepare(0)]
    assert machine.observe(B, [], None, 0.0) == [AskPrepare(1)]
    machine.answered(AskPrepare(0), None, 0.1)
    machine.answered(AskPrepare(1), None, 0.1)
    return machine


def ready() -> DeploymentMachine:
    machine = received()
    machine.observe(A, [stage(0, "ready")], gateway("ready"), 1.0)
    machine.observe(B, [stage(1, "ready")], None, 1.0)
    assert machine.state == "ready"
    return machine


def test_the_whole_way() -> None:
    machine = received()
    assert machine.observe(A, [stage(0, "receiving", done=1)], None, 1.0) == []
    assert machine.state == "sending"
    assert machine.observe(A, [stage(0, "received")], None, 2.0) == []
    assert set(machine.observe(B, [stage(1, "received")], None, 3.0)) == {AskStart(0), AskStart(1)}
    assert machine.observe(B, [stage(1, "received")], None, 3.1) == [], "asked already"
    machine.answered(AskStart(0), None, 3.2)
    machine.answered(AskStart(1), None, 3.2)
    machine.observe(A, [stage(0, "ready")], None, 4.0)
    assert str(machine.state) == "starting"
    assert machine.observe(B, [stage(1, "ready")], None, 5.0) == [AskGateway()]
    machine.answered(AskGateway(), None, 5.1)
    machine.observe(A, [stage(0, "ready")], gateway("starting"), 6.0)
    assert str(machine.state) == "probing"
    machine.observe(A, [stage(0, "ready")], gateway("ready"), 7.0)
    assert str(machine.state) == "ready"


def test_a_refusal_ends_it_and_names_the_node() -> None:
    machine = DeploymentMachine(TARGETS, 0.0)
    machine.observe(B, [], None, 0.0)
    asks = machine.answered(AskPrepare(1), "PC-2: it has room for 1 GB and 2 GB are needed.", 0.1)
    assert set(asks) == {AskUndeploy(A), AskUndeploy(B)}
    assert machine.state == "failed"
    assert machine.detail == "PC-2: it has room for 1 GB and 2 GB are needed."


def test_a_stage_that_fails_ends_it() -> None:
    machine = received()
    asks = machine.observe(B, [stage(1, "failed", "no device GPU")], None, 1.0)
    assert set(asks) == {AskUndeploy(A), AskUndeploy(B)}
    assert machine.detail == "Stage 1 on PC-2 failed: no device GPU"


def test_a_node_restarted_in_between_is_asked_again() -> None:
    machine = received()
    machine.observe(B, [stage(1, "receiving", done=50)], None, 1.0)
    machine.lost(B, 2.0)
    assert "waiting for PC-2" in machine.detail
    assert machine.observe(B, [], None, 10.0) == [AskPrepare(1)]


def test_an_unanswered_request_is_repeated() -> None:
    machine = DeploymentMachine(TARGETS, 0.0)
    assert machine.observe(A, [], None, 0.0) == [AskPrepare(0)]
    machine.unanswered(AskPrepare(0), 1.0)
    assert machine.observe(A, [], None, 2.0) == [AskPrepare(0)]


def test_patience_with_a_lost_node_ends() -> None:
    machine = received()
    machine.observe(A, [stage(0, "received")], None, 1.0)
    machine.lost(B, 1.0)
    assert machine.tick(1.0 + LOST_NODE_PATIENCE_S - 0.1) == []
    assert set(machine.tick(1.0 + LOST_NODE_PATIENCE_S)) == {AskUndeploy(A), AskUndeploy(B)}
    assert "PC-2 has not answered" in machine.detail


def test_a_transfer_that_stalls_ends_it() -> None:
    machine = received()
    machine.observe(A, [stage(0, "receiving", done=1)], None, 1.0)
    machine.observe(A, [stage(0, "receiving", done=2)], None, 100.0)
    machine.observe(A, [stage(0, "receiving", done=2)], None, 100.0 + STALLED_S - 1)
    assert machine.state == "sending"
    machine.observe(A, [stage(0, "receiving", done=2)], None, 100.0 + STALLED_S)
    assert machine.detail == "Stage 0 on PC-1 has received nothing for 120 s."


def test_trouble_after_ready_degrades_and_heals() -> None:
    machine = ready()
    machine.observe(B, [stage(1, "restarting", "it crashed")], None, 2.0)
    assert str(machine.state) == "degraded"
    assert "stage 1 on PC-2 is restarting: it crashed" in machine.detail
    machine.observe(B, [stage(1, "ready")], None, 3.0)
    assert machine.state == "ready"
    machine.lost(A, 4.0)
    assert machine.tick(4.0 + 2 * LOST_NODE_PATIENCE_S) == []
    assert str(machine.state) == "degraded"


def test_cancel_undeploys_and_a_late_node_is_told_too() -> None:
    machine = received()
    assert set(machine.cancel()) == {AskUndeploy(A), AskUndeploy(B)}
    assert machine.cancel() == []
    machine.answered(AskUndeploy(A), None, 1.0)
    machine.unanswered(AskUndeploy(B), 1.0)
    assert machine.observe(A, [], None, 2.0) == []
    assert machine.observe(B, [stage(1, "receiving")], None, 60.0) == [AskUndeploy(B)]
    assert machine.state == "cancelled"


@dataclass
class SimulatedNode:
    """A node that does what it is asked, one step per heartbeat, and may forget everything."""

    stage_state: StageState | None = None
    gateway_state: GatewayState | None = None
    up: bool = True
    history: list[str] = field(default_factory=list)

    def step(self) -> None:
        if self.stage_state == "receiving":
            self.stage_state = "received"
        elif self.stage_state in ("starting", "restarting"):
            self.stage_state = "ready"
        if self.gateway_state == "starting":
            self.gateway_state = "ready"


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from(["beat", "reset", "down", "lose"])), max_size=40))
def test_whatever_nodes_forget_it_ends_up_ready(events: list[tuple[int, str]]) -> None:
    nodes = [SimulatedNode(), SimulatedNode()]
    ids = [A, B]
    machine, now_s = DeploymentMachine(TARGETS, 0.0), 0.0

    def carry_out(asks: list[Ask], answer: bool = True) -> None:
        for ask in asks:
            assert not isinstance(ask, AskUndeploy), machine.detail
            number = ask.stage if isinstance(ask, AskPrepare | AskStart) else 0
            if not nodes[number].up or not answer:
                machine.unanswered(ask, now_s)
                continue
            if isinstance(ask, AskPrepare):
                nodes[number].stage_state = nodes[number].stage_state or "receiving"
            elif isinstance(ask, AskStart):
                assert nodes[number].stage_state in ("received", None) or nodes[number].stage_state is not None
                if nodes[number].stage_state == "received":
                    nodes[number].stage_state = "starting"
            else:
                nodes[number].gateway_state = nodes[number].gateway_state or "starting"
            carry_out(machine.answered(ask, None, now_s))

    def beat(number: int, answer: bool = True) -> None:
        node = nodes[number]
        node.step()
        state, gateway_state = node.stage_state, node.gateway_state
        carry_out(
            machine.observe(
                ids[number],
                [stage(number, state)] if state else [],
                gateway(gateway_state) if gateway_state else None,
                now_s,
            ),
            answer,
        )

    for number, event in events:
        now_s += 0.1
        if event == "reset":
            nodes[number] = SimulatedNode()
        elif event == "down":
            nodes[number].up = False
            carry_out(machine.lost(ids[number], now_s))
        else:
            nodes[number].up = True
            beat(number, answer=event == "beat")
    for _ in range(20):
        now_s += 0.1
        for number in (0, 1):
            nodes[number].up = True
            beat(number)
    assert machine.state == "ready"


@pytest.mark.parametrize("state", ["cancelled", "stopped"])
def test_the_end_has_the_name_it_was_given(state: str) -> None:
    machine = ready()
    machine.cancel(state)  # type: ignore[arg-type]
    assert machine.state == state
    assert machine.finished
