"""Sampling against a plain reference that sorts everything, in f64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fleet.gateway_messages import Sampling
from pipeline.stage.sampling import (
    LogitsError,
    SequenceSampler,
    candidates,
    draw,
    top_logprobs,
    uniform,
)

EDGE = 1e-5
"""Cases in which rounding alone decides on which side of a limit a token lies are left out."""

logit_arrays = st.lists(
    st.one_of(st.integers(-20, 20).map(float), st.floats(-30, 30, width=32)), min_size=1, max_size=300
).map(lambda values: np.array(values, np.float32))
cuts = st.builds(
    Sampling,
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 40),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
)


def reference_candidates(logits: np.ndarray, sampling: Sampling) -> dict[int, float]:
    """Tokens and probabilities by the book; None of the shortcuts."""
    scaled = logits.astype(np.float64) / sampling.temperature
    ranked = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    weights = [math.exp(scaled[token] - scaled[ranked[0]]) for token in ranked]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if sampling.top_p < 1.0:
        kept = 0
        mass = 0.0
        while kept < len(ranked) and mass < sampling.top_p:
            mass += shares[kept]
            assume(abs(mass - sampling.top_p) > EDGE)
            kept += 1
        ranked, shares = ranked[:kept], shares[:kept]
    if sampling.min_p:
        for share in shares:
            assume(share == shares[0] or abs(share / shares[0] - sampling.min_p) > EDGE)
        count = sum(1 for share in shares if share >= sampling.min_p * shares[0])
        ranked, shares = ranked[:count], shares[:count]
    total = sum(shares)
    return {token: share / total for token, share in zip(ranked, shares, strict=True)}


@given(logit_arrays, cuts)
def test_the_candidates_are_those_of_a_full_sort(logits: np.ndarray, sampling: Sampling) -> None:
    expected = reference_candidates(logits, sampling)
    tokens, weights = candidates(logits, sampling)
    found = range(len(logits)) if tokens is None else tokens.tolist()
    shares = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    actual = dict(zip(found, shares.tolist(), strict=True))
    # A weight that underflows to 0 in f32 is as good as absent.
    assert {token for token, share in actual.items() if share > 1e-30} == {
        token for token, share in expected.items() if share > 1e-30
    }
    for token, share in expected.items():
        assert actual.get(token, 0.0) == pytest.approx(share, rel=1e-4, abs=1e-7)


def test_top_k_and_top_p_find_their_tokens_in_a_large_vocabulary() -> None:
    random = np.random.default_rng(3)
    logits = random.standard_normal(128_256).astype(np.float32) * 4
    for sampling in (
        Sampling(temperature=1.0, top_k=50),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=20.0, top_p=0.6),
    ):
        tokens, _ = candidates(logits, sampling)
        assert tokens is not None
        order = np.argsort(-logits, kind="stable")
        assert set(tokens.tolist()) == set(order[: len(tokens)].tolist())
    assert len(candidates(logits, Sampling(temperature=1.0, top_k=50))[1]) == 50


@given(logit_arrays, st.floats(0, 1, exclude_max=True))
def test_a_draw_never_leaves_the_candidates(logits: np.ndarray, number: float) -> None:
    sampling = Sampling(temperature=0.3, top_p=0.7)
    tokens, weights = candidates(logits, sampling)
    assert tokens is not None
    assert draw(tokens, weights, number) in tokens
    everything, all_weights = candidates(logits, Sampling(temperature=0.3))
    assert all_weights[draw(everything, all_weights, number)] > 0


def test_draws_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler_counts = np.zeros(4)
    for seed in range(4000):
        token, _ = SequenceSampler(Sampling(temperature=1.0, seed=seed)).sample(logits)
        sampler_counts[token] += 1
    # Four standard deviations of a binomial share at 4,000 draws are 0.032.
    assert np.abs(sampler_counts / 4000 - np.array([0.5, 0.3, 0.15, 0.05])).max() < 0.032


@given(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 99), min_size=1, max_size=20))
def test_the_same_seed_gives_the_same_tokens_also_in_a_replay(seed: int, prompt: list[int]) -> None:
    logits = np.random.default_rng(len(prompt)).standard_normal((6, 100)).astype(np.float32)
    sampling = Sampling(temperature=1.2, top_p=0.95, seed=seed, presence_penalty=0.5, frequency_penalty=0.25)

    def answer(sampler: SequenceSampler, rows: np.ndarray) -> list[int]:
        tokens = []
        for row in rows:
            tokens.append(sampler.sample(row)[0])
            sampler.extend([tokens[-1]])
        return tokens

    first = SequenceSampler(sampling)
    first.extend(prompt)
    tokens = answer(first, logits)
    replayed = SequenceSampler(sampling, prompt_tokens=len(prompt))
    replayed.extend([*prompt, *tokens[:3]])
    assert answer(replayed, logits[3:]) == tokens[3:]


def test_draws_without_a_seed_differ_between_sequences() -> None:
    logits = np.zeros(1000, np.float32)
    drawn = {SequenceSampler(Sampling(temperature=1.0)).sample(logits)[0] for _ in range(8)}
    assert len(drawn) > 1


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int) -> None:
    number = uniform(seed, position)
    assert 0 <= number < 1
    assert number == uniform(seed, position)
    assert number != uniform(seed, position + 1)


@given(
    logit_arrays,
    st.lists(st.integers(0, 299), max_size=200),
    st.lists(st.integers(0, 299), max_size=200),
    st.floats(0.5, 2.0),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(st.integers(0, 299), st.floats(-100, 100), max_size=5),
)
def test_bias_and_penalties_are_those_of_their_formulas(
    logits: np.ndarray,
    prompt: list[int],
    answer: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> None:
    size = len(logits)
    prompt = [token % size for token in prompt]
    answer = [token % size for token in answer]
    bias = {token % size: value for token, value in bias.items()}
    expected = logits.astype(np.float64)
    for token, value in bias.items():
        expected[token] += value
    for token in {*prompt, *answer}:
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(answer):
        expected[token] -= frequency * answer.count(token) + presence
    sampler = SequenceSampler(
        Sampling(
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias=bias,
            top_logprobs=0,
        ),
        prompt_tokens=len(prompt),
    )
    # In uneven pieces, as a prompt's chunks and an answer's tokens come.
    tokens = [*prompt, *answer]
    for begin in range(0, len(tokens), 7):
        sampler.extend(tokens[begin : begin + 7])
    before = logits.copy()
    chosen, logprob = sampler.sample(logits)
    assert expected[chosen] == pytest.approx(expected.max(), abs=1e-3)
    np.testing.assert_array_equal(logits, before)
    # Log-probabilities are the model's, whatever was added.
    raw = logits.astype(np.float64)
    assert logprob is not None
    assert logprob[0] == pytest.approx(raw[chosen] - np.logaddexp.reduce(raw), abs=1e-3)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    assert SequenceSampler(Sampling()).sample(np.array([1, 3, 3, 2], np.float32))[0] == 1


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    logits = np.array([1, 1.0001, 0.5], np.float32)
    assert SequenceSampler(Sampling(temperature=1e-30)).sample(logits)[0] == 1


@given(logit_arrays, st.integers(0, 20))
def test_top_logprobs_are_the_largest_in_order(logits: np.ndarray, wanted: int) -> None:
    chosen, top = top_logprobs(logits, 0, wanted)
    raw = logits.astype(np.float64)
    expected = raw - np.logaddexp.reduce(raw)
    assert chosen == pytest.approx(expected[0], abs=1e-4)
    assert len(top) == min(wanted, len(logits))
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    assert [token for token, _ in top] == ranked[: len(top)]
    assert [value for _, value in top] == pytest.approx(expected[ranked[: len(top)]].tolist(), abs=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    logits = np.array([0, bad, 1], np.float32)
    with pytest.raises(LogitsError, match="not numbers"):
        SequenceSampler(Sampling()).sample(logits)


def test_tokens_that_the_model_rules_out_are_never_drawn() -> None:
    logits = np.array([-math.inf, 0, -math.inf], np.float32)
    for seed in range(20):
        assert SequenceSampler(Sampling(temperature=2.0, seed=seed)).sample(logits)[0] == 1
