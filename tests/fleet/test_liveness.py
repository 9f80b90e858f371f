from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet.liveness import Liveness, LivenessSettings, ResumeDetector

SETTINGS = LivenessSettings()


def alive_peer() -> Liveness:
    peer = Liveness()
    assert peer.next_instruction(0) == "connect"
    peer.on_authenticated(0.1)
    assert peer.state == "authenticated"
    assert peer.next_instruction(0.1) == "heartbeat"
    peer.on_answer(0.2)
    assert peer.state == "alive"
    return peer


def test_a_peer_that_answers_stays_alive() -> None:
    peer = alive_peer()
    now_s = 0.2
    for _ in range(100):
        now_s = peer.next_time_s()
        assert peer.next_instruction(now_s) == "heartbeat"
        assert peer.next_instruction(now_s) is None
        peer.on_answer(now_s)
        assert peer.state == "alive"
    assert 190 < now_s < 210


def test_silence_makes_suspect_then_lost_then_a_new_connection() -> None:
    peer = alive_peer()
    peer.next_instruction(0.2 + SETTINGS.suspect_after_s)
    assert peer.state == "suspect"
    lost_s = 0.2 + SETTINGS.lost_after_s
    assert peer.next_instruction(lost_s) == "disconnect"
    assert peer.state == "lost"
    assert peer.next_instruction(lost_s) is None
    assert peer.next_time_s() == lost_s + SETTINGS.first_retry_s
    assert peer.next_instruction(peer.next_time_s()) == "connect"


def test_an_answer_in_time_ends_the_suspicion() -> None:
    peer = alive_peer()
    peer.next_instruction(5.0)
    assert peer.state == "suspect"
    peer.on_answer(5.5)
    assert peer.state == "alive"


def test_retries_slow_down_and_start_afresh_after_an_answer() -> None:
    peer = Liveness()
    now_s = 0.0
    pauses = []
    for _ in range(8):
        assert peer.next_instruction(now_s) == "connect"
        peer.on_disconnected(now_s)
        assert peer.next_instruction(now_s) == "disconnect"
        pauses.append(peer.next_time_s() - now_s)
        now_s = peer.next_time_s()
    assert pauses == [0.5, 1, 2, 4, 8, 10, 10, 10]
    peer.next_instruction(now_s)
    peer.on_authenticated(now_s)
    peer.on_answer(now_s)
    peer.on_disconnected(now_s)
    peer.next_instruction(now_s)
    assert peer.next_time_s() - now_s == 0.5


def test_a_refusal_is_asked_again_later_or_at_once_after_approval() -> None:
    peer = Liveness()
    peer.next_instruction(0)
    peer.on_refused(1)
    assert peer.state == "refused"
    assert peer.next_instruction(1) == "disconnect"
    assert peer.next_instruction(1) is None
    assert peer.next_time_s() == 1 + SETTINGS.refused_retry_s
    peer.on_seen(2)
    assert peer.next_instruction(2) == "connect"


def test_a_handshake_that_never_ends_is_given_up() -> None:
    peer = Liveness()
    peer.next_instruction(0)
    assert peer.next_time_s() == SETTINGS.connect_timeout_s
    assert peer.next_instruction(SETTINGS.connect_timeout_s) == "disconnect"
    assert peer.state == "lost"


def test_after_a_sleep_nothing_is_known() -> None:
    peer = alive_peer()
    peer.on_resumed(3600)
    assert peer.state == "unknown"
    assert peer.next_instruction(3600) == "disconnect"
    assert peer.next_instruction(3600) == "connect"


def test_a_late_answer_of_a_lost_peer_does_not_revive_it() -> None:
    peer = alive_peer()
    peer.next_instruction(100)
    peer.on_answer(100)
    assert peer.state == "lost"


@given(st.lists(st.tuples(st.sampled_from("aswdrn"), st.floats(0, 20)), max_size=60))
def test_whatever_happens_the_machine_comes_to_rest_and_never_stays_stale(events: list[tuple[str, float]]) -> None:
    peer = Liveness()
    now_s = 0.0
    last_answer_s = float("-inf")
    connected = False
    for event, passed_s in events:
        now_s += passed_s
        {
            "a": peer.on_authenticated,
            "s": peer.on_seen,
            "w": peer.on_answer,
            "d": peer.on_disconnected,
            "r": peer.on_refused,
            "n": peer.on_resumed,
        }[event](now_s)
        if event == "w":
            last_answer_s = now_s
        for _ in range(5):
            instruction = peer.next_instruction(now_s)
            if instruction == "connect":
                assert not connected
                connected = True
            elif instruction == "disconnect":
                assert connected
                connected = False
            elif instruction is None:
                break
        else:
            raise AssertionError("instructions do not end")
        assert peer.next_time_s() > now_s
        if peer.state == "alive":
            assert now_s - last_answer_s < SETTINGS.suspect_after_s


def test_sleep_is_seen_whether_or_not_the_monotonic_clock_stands_still() -> None:
    detector = ResumeDetector(0, 1000)
    assert not detector.resumed(5, 1005)
    assert detector.resumed(10, 5000)
    assert not detector.resumed(15, 5005)
    assert detector.resumed(4000, 9000)
    assert not detector.resumed(4005, 2000)
