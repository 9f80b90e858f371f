"""A chat as data."""

from __future__ import annotations

import pytest

from app.chat.conversation import Conversation
from fleet.gateway_messages import ChatMessage, Delta, Failed, Finished, PrefillProgress


def test_an_answer_is_measured_while_it_grows() -> None:
    answer = Conversation().ask("Hi", 10.0).answer
    answer.take(PrefillProgress(1, 100, 400), 10.1)
    assert (answer.state, answer.read_tokens, answer.prompt_tokens) == ("reading", 100, 400)
    answer.take(Delta(1, "Hel", (1,)), 10.5)
    answer.take(Delta(1, "lo", (2, 3)), 11.5)
    assert answer.text == "Hello"
    assert answer.state == "writing"
    assert answer.time_to_first_token_s == pytest.approx(0.5)
    assert answer.tokens_per_second == pytest.approx(2.0)


def test_the_gateways_figures_replace_the_measured_ones() -> None:
    answer = Conversation().ask("Hi", 0.0).answer
    answer.take(Delta(1, "Hello", (1, 2)), 3.0)
    answer.take(Finished(1, "length", 20, 41, 0.25, 2.0), 4.0)
    assert answer.tokens_per_second == pytest.approx(20.0)
    assert answer.time_to_first_token_s == 0.25
    assert answer.cut_short
    assert not answer.running


def test_a_failure_keeps_what_was_written() -> None:
    answer = Conversation().ask("Hi", 0.0).answer
    answer.take(Delta(1, "Hel", (1,)), 0.1)
    answer.take(Failed(1, "stage_lost", "pc-2 went away.", "pc-2"), 0.2)
    assert (answer.state, answer.text, answer.error) == ("failed", "Hel", "pc-2 went away.")
    assert "pc-2" in answer.error_details
    assert "stage_lost" in answer.error_details


def test_the_model_reads_all_turns_but_those_without_an_answer() -> None:
    conversation = Conversation()
    conversation.ask("one", 0.0).answer.take(Delta(1, "eins", (1,)), 0.1)
    conversation.ask("two", 0.0).answer.fail("gone")
    conversation.ask("three", 0.0)
    assert conversation.messages(" Be brief. ") == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "one"),
        ChatMessage("assistant", "eins"),
        ChatMessage("user", "three"),
    )


def test_asking_again_drops_the_answer() -> None:
    conversation = Conversation()
    conversation.ask("one", 0.0).answer.take(Delta(1, "eins", (1,)), 0.1)
    turn = conversation.ask_again(5.0)
    assert (turn.question, turn.answer.text, turn.answer.asked_s) == ("one", "", 5.0)
    assert conversation.messages("") == (ChatMessage("user", "one"),)


def test_a_stopped_answer_takes_no_end_but_its_own() -> None:
    answer = Conversation().ask("one", 0.0).answer
    answer.stop()
    assert answer.state == "stopped"
    answer.fail("late")
    answer.stop()
    assert answer.state == "failed"
