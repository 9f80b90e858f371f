"""The life of a child as a state machine, without processes and without waiting."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.child_machine import (
    LARGEST_BACK_OFF_S,
    QUICK_DEATHS_LIMIT,
    START_DEADLINE_S,
    STEADY_S,
    ChildMachine,
    CloseInput,
    Kill,
    Spawn,
    Terminate,
)
from fleet.process import ChildStatus


def ready_machine(now_s: float = 0.0) -> ChildMachine:
    machine = ChildMachine()
    assert machine.start(now_s) == [Spawn(None, None)]
    machine.status(ChildStatus(state="ready", port=5000), now_s)
    assert machine.state == "ready"
    return machine


def test_a_crash_is_followed_by_a_restart_on_the_same_port() -> None:
    machine = ready_machine()
    assert machine.exited("it was ended by signal 9", 10.0) == []
    assert machine.state == "restarting"
    assert "signal 9" in machine.detail
    assert machine.wake_at is not None
    assert machine.tick(machine.wake_at - 0.01) == []
    assert machine.tick(machine.wake_at) == [Spawn(5000, None)]
    machine.status(ChildStatus(state="ready", port=5000), 12.0)
    assert (str(machine.state), machine.restarts) == ("ready", 1)


def test_deaths_in_a_row_end_in_failed_with_growing_pauses() -> None:
    machine = ready_machine()
    now_s, pauses = 1.0, []
    while True:
        machine.exited("it crashed", now_s)
        if machine.state == "failed":
            break
        assert machine.wake_at is not None
        pauses.append(machine.wake_at - now_s)
        now_s = machine.wake_at
        assert machine.tick(now_s) == [Spawn(5000, None)]
    assert len(pauses) == QUICK_DEATHS_LIMIT - 1
    assert pauses == sorted(pauses)
    assert pauses[-1] <= LARGEST_BACK_OFF_S
    assert "5 times in a row" in machine.detail
    assert machine.finished


def test_a_long_steady_run_forgives_earlier_deaths() -> None:
    machine = ready_machine()
    now_s = 0.0
    for _ in range(3 * QUICK_DEATHS_LIMIT):
        now_s += STEADY_S
        machine.exited("it crashed", now_s)
        assert machine.wake_at is not None
        now_s = machine.wake_at
        machine.tick(now_s)
        machine.status(ChildStatus(state="ready", port=5000), now_s)
    assert machine.state == "ready"


def test_a_reason_given_before_it_ever_worked_is_final() -> None:
    machine = ChildMachine()
    machine.start(0.0)
    machine.status(ChildStatus(state="failed", detail="There is no device GPU."), 1.0)
    machine.exited("it ended with exit code 1", 1.1)
    assert machine.state == "failed"
    assert machine.detail == "There is no device GPU."


def test_a_child_that_never_gets_ready_is_killed() -> None:
    machine = ChildMachine()
    machine.start(0.0)
    assert machine.tick(START_DEADLINE_S) == [Kill()]
    machine.exited("it was ended by signal 9", START_DEADLINE_S)
    assert "not ready within" in machine.detail


def test_stop_escalates() -> None:
    machine = ready_machine()
    assert machine.stop(0.0) == [CloseInput()]
    assert machine.stop(0.0) == []
    assert machine.wake_at is not None
    assert machine.tick(machine.wake_at) == [Terminate()]
    assert machine.wake_at is not None
    assert machine.tick(machine.wake_at) == [Kill()]
    machine.exited("it was ended by signal 9", 20.0)
    assert machine.state == "stopped"
    assert machine.finished


def test_stop_between_two_lives() -> None:
    machine = ready_machine()
    machine.exited("it crashed", 1.0)
    assert machine.stop(1.1) == []
    assert machine.state == "stopped"
    assert machine.wake_at is None


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(["starting", "ready", "degraded", "failed", "exit", "tick", "stop", "refuse"]), max_size=40
    )
)
def test_any_history_keeps_at_most_one_process_and_always_ends_when_stopped(history: list[str]) -> None:
    machine, now_s, running, killed = ChildMachine(), 0.0, False, False

    def carry_out(instructions: list[object]) -> None:
        nonlocal running, killed
        for instruction in instructions:
            if isinstance(instruction, Spawn):
                assert not running
                running, killed = True, False
            else:
                assert running
                killed = killed or isinstance(instruction, Kill)

    carry_out(list(machine.start(now_s)))
    for event in history:
        now_s += 0.7
        if event == "tick":
            now_s = max(now_s, machine.wake_at or 0.0)
            carry_out(list(machine.tick(now_s)))
        elif event == "stop":
            carry_out(list(machine.stop(now_s)))
        elif event in ("exit", "refuse"):
            if running:
                running = False
                carry_out(list(machine.exited("gone", now_s)))
        else:
            carry_out(list(machine.status(ChildStatus(state=event, port=5000), now_s)))  # type: ignore[arg-type]
        assert not (machine.finished and machine.wake_at is not None and not running)
    carry_out(list(machine.stop(now_s)))
    while running and not killed:
        assert machine.wake_at is not None
        now_s = machine.wake_at
        carry_out(list(machine.tick(now_s)))
    if running:
        carry_out(list(machine.exited("killed", now_s)))
    assert machine.finished
    assert machine.state == "stopped"
