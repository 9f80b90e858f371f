"""The official OpenAI client against a real pipeline, unchanged but for its address."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from pipeline.local import LocalPipeline

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a very long story about a dog and a cat."}]

SENTENCE = "The capital of France is"


def streamed_text(api: openai.OpenAI, **request: Any) -> str:
    with api.chat.completions.create(stream=True, **request) as stream:
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_an_answer_whole_and_in_pieces(api: openai.OpenAI, model: str) -> None:
    answer = api.chat.completions.create(model=model, messages=CAPITAL, temperature=0, max_tokens=32)
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert "<|im_end|>" not in (choice.message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    with api.chat.completions.create(
        model=model,
        messages=CAPITAL,
        temperature=0,
        max_completion_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage == answer.usage
    assert len(chunks) > 5, "it came in pieces"


def test_plain_completions(api: openai.OpenAI, model: str) -> None:
    text = api.completions.create(model=model, prompt=SENTENCE, temperature=0, max_tokens=8)
    assert text.choices[0].finish_reason == "length"
    assert "Paris" in text.choices[0].text
    assert text.usage is not None
    assert text.usage.completion_tokens == 8
    default = api.completions.create(model=model, prompt=[SENTENCE], temperature=0)
    assert default.usage is not None
    assert default.usage.completion_tokens == 16
    tokens = api.completions.create(model=model, prompt=[19556, 905], temperature=0, max_tokens=2)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 2
    with api.completions.create(model=model, prompt=SENTENCE, temperature=0, max_tokens=8, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == text.choices[0].text


def test_stop_strings_and_the_length_end_an_answer(api: openai.OpenAI, model: str) -> None:
    whole = api.chat.completions.create(model=model, messages=CAPITAL, temperature=0, max_tokens=32)
    text = whole.choices[0].message.content or ""
    stop = text[text.index("of") : text.index("of") + 6]
    stopped = api.chat.completions.create(model=model, messages=CAPITAL, temperature=0, stop=["absent", stop])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert streamed_text(api, model=model, messages=CAPITAL, temperature=0, stop=stop) == text[: text.index(stop)]
    short = api.chat.completions.create(model=model, messages=CAPITAL, temperature=0, max_tokens=2)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 2


def test_a_seed_makes_sampling_repeatable(api: openai.OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "messages": STORY, "max_tokens": 12}
    first, again, other = (streamed_text(api, seed=seed, **request) for seed in (7, 7, 8))
    assert first == again != other


def test_log_probabilities(api: openai.OpenAI, model: str) -> None:
    answer = api.chat.completions.create(
        model=model, messages=CAPITAL, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(one.token for one in logprobs.content) == answer.choices[0].message.content
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].token == one.token, "greedy takes the most probable one"
        assert one.logprob == pytest.approx(one.top_logprobs[0].logprob)


def test_two_clients_at_once_get_what_each_gets_alone(api: openai.OpenAI, model: str) -> None:
    prompts = [CAPITAL, STORY, [{"role": "user", "content": "Count from one to ten."}]]
    request: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 24}
    alone = [streamed_text(api, messages=messages, **request) for messages in prompts]
    together: dict[int, str] = {}

    def ask(index: int) -> None:
        together[index] = streamed_text(api, messages=prompts[index], **request)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[index] for index in range(len(prompts))] == alone


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_sequence_on_every_stage(
    pipeline: LocalPipeline,
    http: httpx.Client,
    model: str,
    wait_for_status: Callable[..., None],
    wait_for_sequences: Callable[[list[int]], None],
    stream: bool,
) -> None:
    request = {"model": model, "messages": STORY, "stream": stream, "ignore_eos": True, "max_tokens": 4000}
    url = f"http://127.0.0.1:{pipeline.http_port}/v1/chat/completions"
    if stream:
        with httpx.Client(timeout=60) as client, client.stream("POST", url, json=request) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            wait_for_status(running=1)
            wait_for_sequences([1, 1])
    else:
        with httpx.Client(timeout=1.5) as client, pytest.raises(httpx.ReadTimeout):
            client.post(url, json=request)
    wait_for_status(running=0, waiting=0)
    wait_for_sequences([0, 0])


def test_more_requests_than_places_wait_for_one(
    api: openai.OpenAI, model: str, wait_for_status: Callable[..., None]
) -> None:
    """The pipeline takes four at once."""
    texts: list[str] = []
    request: dict[str, Any] = {"model": model, "messages": CAPITAL, "temperature": 0, "max_tokens": 32}
    threads = [threading.Thread(target=lambda: texts.append(streamed_text(api, **request))) for _ in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(texts) == 7
    assert len(set(texts)) == 1
    wait_for_status(running=0, waiting=0)


def refused(api: openai.OpenAI, error: type[openai.APIStatusError], **request: Any) -> openai.APIStatusError:
    with pytest.raises(error) as caught:
        api.chat.completions.create(**request)
    body = caught.value.body
    assert isinstance(body, dict)
    assert set(body) >= {"message", "type", "param", "code"}
    return caught.value


def test_bad_requests_say_what_is_wrong(api: openai.OpenAI, model: str) -> None:
    bad = openai.BadRequestError
    assert "Only one choice" in str(refused(api, bad, model=model, messages=CAPITAL, n=2))
    assert "no messages" in str(refused(api, bad, model=model, messages=[]))
    assert "temperature" in str(refused(api, bad, model=model, messages=CAPITAL, temperature=-1))
    assert "max_tokens" in str(refused(api, bad, model=model, messages=CAPITAL, max_tokens=0))
    assert "stop" in str(refused(api, bad, model=model, messages=CAPITAL, stop=[""]))
    assert "logit_bias names token" in str(refused(api, bad, model=model, messages=CAPITAL, logit_bias={"900000": 1}))
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert "only text" in str(refused(api, bad, model=model, messages=picture))
    json_format: Any = {"type": "json_object"}
    assert "json_object" in str(refused(api, bad, model=model, messages=CAPITAL, response_format=json_format))
    unknown = refused(api, openai.NotFoundError, model="gpt-99", messages=CAPITAL)
    assert unknown.code == "model_not_found"
    assert model in str(unknown)
    assert api.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError, match="gpt-99"):
        api.models.retrieve("gpt-99")


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(api: openai.OpenAI, model: str) -> None:
    long: Any = [{"role": "user", "content": "fox " * 9000}]
    error = refused(api, openai.BadRequestError, model=model, messages=long)
    assert error.code == "context_length_exceeded"
    counted = str(error).split("context full: ")[1].split(" ")[0]
    tokens, context = counted.split("/")
    assert int(tokens) > 9000
    assert int(context) == 8192


def test_content_in_parts_and_the_developer_role(api: openai.OpenAI, model: str) -> None:
    messages: Any = [
        {"role": "developer", "content": "Answer in one word."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is the capital of"}, {"type": "text", "text": "France?"}],
        },
    ]
    answer = api.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=16, user="someone")
    assert answer.choices[0].message.content


def test_what_is_no_request_gets_an_openai_error(http: httpx.Client) -> None:
    for answer, status in (
        (http.post("/v1/chat/completions", content=b"{not json"), 400),
        (http.post("/v1/chat/completions", content=b"\xff\xfe"), 400),
        (http.post("/v1/chat/completions", json={"model": "x"}), 400),
        (http.post("/v1/completions", json={"prompt": [["a"], 1]}), 400),
        (http.post("/v1/completions", content=b"[" * 100_000), 400),
        (http.post("/v1/completions", content=b" " * ((8 << 20) + 1)), 413),
        (http.get("/v1/nothing"), 404),
        (http.get("/v1/completions"), 405),
    ):
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]


def test_health_and_status(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ready", "detail": ""}
    status = http.get("/v1/status").json()
    assert (status["state"], status["context_tokens"], status["has_chat_template"]) == ("ready", 8192, True)
    assert [(stage["node"], stage["connected"], stage["device"]) for stage in status["stages"]] == [
        ("stage-0", True, "CPU"),
        ("stage-1", True, "CPU"),
    ]
    assert all(stage["compute_ms"] > 0 for stage in status["stages"])


def test_web_pages_and_other_names_are_kept_out(http: httpx.Client) -> None:
    port = http.base_url.port
    for headers, status in (
        ({"Host": f"evil.example:{port}"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": f"localhost:{port}"}, 200),
        ({"Host": f"LOCALHOST:{port}", "Origin": f"http://127.0.0.1:{port}"}, 200),
    ):
        assert http.get("/v1/models", headers=headers).status_code == status, headers
