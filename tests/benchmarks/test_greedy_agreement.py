"""The stages say what OpenVINO GenAI says with the whole model, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.greedy_agreement import Agreement, compare, load_prompts

PROMPTS = (1, 13, 16)
TOKENS = 40


@pytest.fixture(scope="module")
def whole_model(smollm2_gguf: Path, converted_models: Path) -> Path:
    from shard_builder.sources.ways_in import open_source

    return open_source(smollm2_gguf, converted_models).folder


def test_two_stages_say_what_the_whole_model_says(whole_model: Path, smollm2_two_stages: Path) -> None:
    prompts = [load_prompts()[index] for index in PROMPTS]
    found = compare(whole_model, smollm2_two_stages, prompts, TOKENS, "f32", threads=1)
    assert found.same_tokens == (TOKENS,) * len(prompts)


def test_there_are_twenty_prompts_and_differences_are_counted() -> None:
    assert len(set(load_prompts())) == 20
    assert Agreement("f16", (5, 10, 10), 10).same_prompts == 2
