"""OpenAI requests become Generate messages or are refused by name, whatever they contain."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.codec import Decoder, encode
from fleet.gateway_messages import ChatMessage, Generate
from pipeline.gateway.http_requests import (
    BadRequest,
    ChatCompletionRequest,
    CompletionRequest,
    chat_generate,
    completion_generate,
    decode_request,
    load_sampling_defaults,
)

HELLO = [{"role": "user", "content": "Hello"}]


def chat(defaults: dict[str, float] | None = None, **fields: Any) -> Generate:
    body = msgspec.json.encode({"messages": HELLO, **fields})
    return chat_generate(decode_request(body, ChatCompletionRequest), 1, defaults or {})


def completion(**fields: Any) -> Generate:
    return completion_generate(decode_request(msgspec.json.encode(fields), CompletionRequest), 1, {})


def test_the_defaults_are_openais_and_the_models_own_come_before_them() -> None:
    assert chat().sampling.temperature == 1.0
    assert chat().sampling.top_p == 1.0
    assert chat().max_tokens is None
    assert completion(prompt="x").max_tokens == 16
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert chat(own).sampling.temperature == 0.6
    assert chat(own).sampling.top_k == 20
    assert chat(own, temperature=0).sampling.temperature == 0
    assert chat(temperature=None, max_tokens=None, stop=None, n=None, seed=None, stream=None) == chat()


def test_fields_of_other_makers_are_taken_over_or_ignored() -> None:
    generate = chat(
        top_k=-1,
        top_p=0,
        seed=-1,
        ignore_eos=True,
        stop=["a", "b"],
        logprobs=True,
        logit_bias={"5": -100},
        max_tokens=3,
        max_completion_tokens=4,
        user="me",
        metadata={"a": 1},
        service_tier="auto",
        parallel_tool_calls=False,
        response_format={"type": "text"},
        tools=[],
    )
    sampling = generate.sampling
    assert (sampling.top_k, sampling.seed, sampling.ignore_stop_ids, sampling.top_logprobs) == (0, 2**63 - 1, True, 0)
    assert 0 < sampling.top_p < 0.001
    assert sampling.logit_bias == {5: -100.0}
    assert (generate.stop, generate.max_tokens) == (("a", "b"), 4)


def test_messages() -> None:
    messages: Any = [
        {"role": "developer", "content": "a", "name": "x"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None},
    ]
    expected = (ChatMessage("system", "a"), ChatMessage("user", "b\nc"), ChatMessage("assistant", ""))
    assert chat(messages=messages).messages == expected
    assert completion(prompt=["x"]).prompt == "x"
    assert completion(prompt=[[1, 2]]).tokens == completion(prompt=[1, 2]).tokens == (1, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "Only one choice"),
        ({"tools": [{}]}, "does not call tools"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_p": 1.5}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"a": 1}}, "token ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
        ({"messages": "hello"}, "messages"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        chat(**fields)


@pytest.mark.parametrize("prompt", [["a", "b"], [["a"]], [1, "a"], [True], {"a": 1}, 5, [-1], None])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(BadRequest):
        completion(prompt=prompt)


names = st.sampled_from(
    [*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "role", "content", "type", "text"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@given(fields=st.dictionaries(names, values, max_size=8))
def test_any_json_is_refused_or_becomes_a_message_that_a_gateway_reads(fields: dict[str, Any]) -> None:
    for make in (chat, completion):
        with contextlib.suppress(BadRequest):
            generate = make(**fields) if make is chat else make(**{"prompt": "x", **fields})
            assert Decoder[Generate](Generate).decode(encode(generate)) == generate


@given(body=st.binary(max_size=60))
def test_any_bytes_are_refused_in_words(body: bytes) -> None:
    with pytest.raises(BadRequest, match="request"):
        decode_request(body, ChatCompletionRequest)


def test_the_models_own_sampling_is_read_where_it_makes_sense(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    for text, expected in (
        (
            '{"do_sample": true, "temperature": 0.7, "top_p": 0.8, "eos_token_id": [1, 2]}',
            {"temperature": 0.7, "top_p": 0.8},
        ),
        ('{"do_sample": false, "temperature": 0.7}', {"temperature": 0.0}),
        ('{"temperature": "hot", "top_k": true, "min_p": null}', {}),
        ('{"temperature": -3}', {}),
        ("[]", {}),
        ("nonsense", {}),
    ):
        file.write_text(text)
        assert load_sampling_defaults(tmp_path) == expected
