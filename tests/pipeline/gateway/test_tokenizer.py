"""Tokenizer, detokenizer and stop strings with the real tokenizer of the small model."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ModelError
from fleet.gateway_messages import ChatMessage, Generate
from pipeline.gateway.answer_text import Answer, IncrementalDetokenizer, StopFilter
from pipeline.gateway.intake import RequestRefused, ServedModel, prompt_tokens
from pipeline.gateway.tokenizer import ModelTokenizer, TemplateError

CONTEXT_TOKENS = 8192
VOCABULARY = 49152
HARD_TEXT = "Zoë said: “naïve 日本語テスト 😀👩‍👩‍👧‍👦 नमस्ते   \t\n\r\n end</s> ﷽ \u200b x\ufffdy"


@pytest.fixture(scope="module")
def tokenizer(smollm2_two_stages: Path) -> ModelTokenizer:
    return ModelTokenizer(smollm2_two_stages, CONTEXT_TOKENS)


@pytest.fixture(scope="module")
def fragments(tokenizer: ModelTokenizer) -> list[int]:
    """Tokens that are no whole characters."""
    found = [token for token in range(0, VOCABULARY, 7) if tokenizer.decode([token]) == ""]
    assert len(found) > 20
    return found


def streamed(decode: object, tokens: Sequence[int], **options: bool) -> str:
    detokenizer = IncrementalDetokenizer(decode, **options)  # type: ignore[arg-type]
    return "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()


def test_text_comes_back_and_special_tokens_do_not(tokenizer: ModelTokenizer) -> None:
    tokens = tokenizer.encode(HARD_TEXT, add_special_tokens=False)
    assert tokenizer.decode(tokens) == HARD_TEXT
    chat = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n", add_special_tokens=False)
    assert (chat[0], chat[-2]) == (1, 2)
    assert streamed(tokenizer.decode, chat) == "user\nhi\n"


def test_a_prompt_longer_than_the_tokenizers_own_limit_is_not_cut_off(tokenizer: ModelTokenizer) -> None:
    words = 20_000
    tokens = tokenizer.encode("fox " * words, add_special_tokens=False)
    assert words <= len(tokens) <= 2 * words + 1
    assert tokenizer.longest_prompt_tokens > CONTEXT_TOKENS


def test_a_long_prompt_does_not_hold_the_interpreters_lock(tokenizer: ModelTokenizer) -> None:
    text = "".join(chr(97 + index * index % 26) for index in range(1_500_000))
    begin_s = time.perf_counter()
    worker = threading.Thread(target=tokenizer.encode, args=(text,), kwargs={"add_special_tokens": False})
    worker.start()
    longest_s, last_s = 0.0, time.perf_counter()
    while worker.is_alive():
        time.sleep(0.001)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    took_s = time.perf_counter() - begin_s
    assert longest_s < took_s / 2, f"another thread waited {longest_s:.3f} s of {took_s:.3f} s"


def test_what_is_no_text_is_encoded_all_the_same(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.encode("", add_special_tokens=True) == ()
    assert tokenizer.decode(tokenizer.encode("a\0b", add_special_tokens=False)) == "a\0b"
    assert tokenizer.decode(tokenizer.encode("a\ud800b", add_special_tokens=False)) == "a?b"


def test_threads_encode_side_by_side(tokenizer: ModelTokenizer) -> None:
    results: dict[int, tuple[int, ...]] = {}

    def encode(number: int) -> None:
        for _ in range(20):
            results[number] = tokenizer.encode(f"number {number} " * 50, add_special_tokens=False)

    threads = [threading.Thread(target=encode, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, tokens in results.items():
        assert tokenizer.decode(tokens) == f"number {number} " * 50


def test_chat_template(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.has_chat_template
    prompt = tokenizer.render_chat([ChatMessage("system", "Be brief."), ChatMessage("user", "Hello")])
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def with_template(folder: Path, target: Path, template: str) -> ModelTokenizer:
    target.mkdir()
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        for ending in ("xml", "bin"):
            shutil.copy(folder / f"{name}.{ending}", target)
    graph = target / "openvino_tokenizer.xml"
    text, count = re.subn(r'<chat_template value="[^"]*"', f'<chat_template value="{template}"', graph.read_text())
    assert count == 1
    graph.write_text(text)
    return ModelTokenizer(target, CONTEXT_TOKENS)


def test_a_template_that_refuses_a_chat_says_why(smollm2_two_stages: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 2 %}{{ raise_exception('too long a chat') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer = with_template(smollm2_two_stages, tmp_path / "picky", template)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat([ChatMessage("user", "Hello")]) == "Hello"
    with pytest.raises(TemplateError, match="refuses this chat: too long a chat"):
        tokenizer.render_chat([ChatMessage("user", "Hello")] * 3)


def test_a_template_that_never_works_counts_as_none(smollm2_two_stages: Path, tmp_path: Path) -> None:
    tokenizer = with_template(smollm2_two_stages, tmp_path / "broken", "{{ raise_exception('never') }}")
    assert not tokenizer.has_chat_template
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.render_chat([ChatMessage("user", "Hello")])


def test_a_chat_with_a_model_without_a_template_is_plain_text_where_that_is_asked_for(
    smollm2_two_stages: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(smollm2_two_stages, tmp_path / "broken", "{{ raise_exception('never') }}")
    chat = Generate(number=1, messages=(ChatMessage("system", "Be brief."), ChatMessage("user", "Hello")))
    model = ServedModel("model", VOCABULARY)
    with pytest.raises(RequestRefused, match="/v1/completions") as refused:
        prompt_tokens(chat, model, tokenizer)
    assert refused.value.code == "template"
    tokens = prompt_tokens(msgspec.structs.replace(chat, plain_without_template=True), model, tokenizer)
    assert tokenizer.decode(tokens) == "Be brief.\n\nHello"


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        ModelTokenizer(tmp_path, CONTEXT_TOKENS)
    (tmp_path / "openvino_tokenizer.xml").write_text("<net/>")
    with pytest.raises(ModelError, match="cannot be loaded"):
        ModelTokenizer(tmp_path, CONTEXT_TOKENS)


@given(data=st.data())
def test_the_stream_is_the_whole_text(tokenizer: ModelTokenizer, fragments: list[int], data: st.DataObject) -> None:
    token = st.one_of(st.integers(0, VOCABULARY - 1), st.sampled_from(fragments))
    tokens = data.draw(st.lists(token, max_size=120))
    assert streamed(tokenizer.decode, tokens) == tokenizer.decode(tokens)


@given(text=st.text(max_size=200))
def test_any_text_streams(tokenizer: ModelTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer.decode, tokens) == tokenizer.decode(tokens)


@given(data=st.binary(max_size=100))
def test_incomplete_characters_are_held_back_where_a_detokenizer_shows_them(data: bytes) -> None:
    def decode(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    pieces: list[str] = []
    detokenizer = IncrementalDetokenizer(decode)
    for byte in data:
        pieces.append(detokenizer.push(byte))
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == decode(data)


def test_an_emoji_comes_whole_or_not_at_all() -> None:
    detokenizer = IncrementalDetokenizer(lambda tokens: bytes(tokens).decode("utf-8", "replace"))
    assert [detokenizer.push(byte) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert detokenizer.push(0xF0) == ""
    assert detokenizer.flush() == "\ufffd"


@given(
    words=st.lists(
        st.sampled_from([" do", " n", "'t", " ,", " .", ".", " 's", " ve", "x", " ", "'", " '"]), max_size=90
    )
)
def test_spaces_that_are_cleaned_up_later_are_held_back(words: list[str]) -> None:
    def decode(tokens: Sequence[int]) -> str:
        text = "".join(words[token] for token in tokens)
        return re.sub(r" ([.?!,]|n't|'[ms]|'ve|'re)", r"\1", text)

    tokens = list(range(len(words)))
    assert streamed(decode, tokens, cleans_up_spaces=True) == decode(tokens)


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_string_ends_the_text_before_it_however_it_is_split(pieces: list[str], stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    streamed_text = ""
    for piece in pieces:
        streamed_text += stop_filter.push(piece)
        assert not any(stop in streamed_text for stop in stops)
        if stop_filter.stopped:
            break
    streamed_text += stop_filter.flush()
    whole = "".join(pieces)
    positions = [whole.find(stop) for stop in stops if stop in whole]
    assert stop_filter.stopped == bool(positions)
    if positions:
        assert whole.startswith(streamed_text)
        assert any(whole.startswith(stop, len(streamed_text)) for stop in stops)
    else:
        assert streamed_text == whole


def test_stop_strings_over_real_tokens(tokenizer: ModelTokenizer) -> None:
    tokens = tokenizer.encode("One. Two.\nThree 😀 Four", add_special_tokens=False)
    for stops, expected in (
        (["\nThr"], "One. Two."),
        (["ee 😀"], "One. Two.\nThr"),
        (["absent", "Four!"], "One. Two.\nThree 😀 Four"),
    ):
        answer = Answer(tokenizer, stops)
        text = ""
        for token in tokens:
            text += answer.push(token)
            if answer.stopped:
                break
        text += answer.flush()
        assert text == expected


def test_log_probabilities_come_with_the_tokens_texts(tokenizer: ModelTokenizer) -> None:
    hello, world = tokenizer.encode("hello world", add_special_tokens=False)
    described = Answer(tokenizer, []).describe((hello, world), ((-0.5, ()), (-1.0, ((hello, -1.5), (world, -1.0)))))
    assert [(one.token, one.text, one.logprob) for one in described] == [
        (hello, "hello", -0.5),
        (world, " world", -1.0),
    ]
    assert described[1].top == ((hello, "hello", -1.5), (world, " world", -1.0))
