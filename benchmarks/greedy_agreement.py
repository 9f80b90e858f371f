"""Whether a model cut in stages says what the whole model says, token by token.

    python -m benchmarks.greedy_agreement MODEL [--stages 2] [--tokens 100] [--prompts N] [--json]

MODEL is a GGUF file or an OpenVINO IR folder. The reference is OpenVINO GenAI's LLMPipeline on the whole model with the
SDPA attention backend; the candidate is a local pipeline of stages and a gateway. Both infer in f32 without dynamic
quantization, take the same chat template, choose the most probable token, and go on past stop ids. They are compared
with an f32 KV cache, where every token must be the same, and with an f16 one, the default, where sums that are grouped
in another way may round to another token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import openvino_genai

from fleet.errors import PacelineError
from fleet.gateway_client import GatewayClient
from fleet.gateway_messages import ChatMessage, Delta, Failed, Generate, Sampling
from fleet.manifest import KvPrecision
from pipeline.local import LocalPipeline
from shard_builder import build
from shard_builder.sources.ways_in import open_source

PROMPTS = Path(__file__).parent.parent / "resources" / "prompts" / "greedy_agreement.json"
NEW_TOKENS = 100
EXACT: KvPrecision = "f32"
DEFAULT: KvPrecision = "f16"


class PromptFile(msgspec.Struct):
    prompts: list[str]


@dataclass(frozen=True)
class Agreement:
    """How far two lists of answers are the same."""

    kv_precision: str
    same_tokens: tuple[int, ...]
    """Per prompt: tokens before the first difference."""
    tokens: int
    """New tokens per prompt."""

    @property
    def same_prompts(self) -> int:
        """Prompts whose answers are the same to the last token."""
        return sum(same == self.tokens for same in self.same_tokens)


def load_prompts(count: int | None = None) -> list[str]:
    """The prompts of the file in the repository, or the first ``count`` of them."""
    return msgspec.json.decode(PROMPTS.read_bytes(), type=PromptFile).prompts[:count]


def whole_model_tokens(
    model_folder: Path, prompts: Sequence[str], tokens: int, kv_precision: KvPrecision, threads: int = 0
) -> list[list[int]]:
    """``tokens`` greedy tokens for each prompt, from the whole model."""
    options: dict[str, object] = {
        "ATTENTION_BACKEND": "SDPA",
        "KV_CACHE_PRECISION": kv_precision,
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    if threads:
        options["INFERENCE_NUM_THREADS"] = threads
    pipeline = openvino_genai.LLMPipeline(model_folder, "CPU", **options)
    tokenizer = pipeline.get_tokenizer()
    # Not min_new_tokens: it would forbid the stop ids, where they are only not to end the answer.
    config = openvino_genai.GenerationConfig(
        max_new_tokens=tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
    )
    answers: list[list[int]] = []
    for prompt in prompts:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
        inputs = tokenizer.encode(chat, add_special_tokens=False)
        answers.append([int(token) for token in pipeline.generate(inputs, config).tokens[0]])
    return answers


def pipeline_tokens(pipeline: LocalPipeline, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    """``tokens`` greedy tokens for each prompt, from the stages."""

    async def ask_all() -> list[list[int]]:
        async with GatewayClient(pipeline.identity, pipeline.gateway_address) as client:
            return [await ask(client, prompt) for prompt in prompts]

    async def ask(client: GatewayClient, prompt: str) -> list[int]:
        request = Generate(
            client.next_number(),
            messages=(ChatMessage("user", prompt),),
            sampling=Sampling(ignore_stop_ids=True),
            max_tokens=tokens,
        )
        answer: list[int] = []
        async for message in client.generate(request):
            if isinstance(message, Delta):
                answer += message.tokens
            elif isinstance(message, Failed):
                raise PacelineError(message.message)
        return answer

    def selector_loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(selectors.DefaultSelector())

    with asyncio.Runner(loop_factory=selector_loop) as runner:
        return runner.run(ask_all())


def compare(
    model_folder: Path,
    shard_folder: Path,
    prompts: Sequence[str],
    tokens: int,
    kv_precision: KvPrecision,
    threads: int = 0,
) -> Agreement:
    """Runs both and counts."""
    expected = whole_model_tokens(model_folder, prompts, tokens, kv_precision, threads)
    with LocalPipeline(shard_folder, gateway=True, exact=True, kv_precision=kv_precision, threads=threads) as pipeline:
        found = pipeline_tokens(pipeline, prompts, tokens)
    same = tuple(_common_start(one, other) for one, other in zip(expected, found, strict=True))
    return Agreement(kv_precision, same, tokens)


def _common_start(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def main() -> int:
    """Prints the agreement at both precisions; 1 where it is not complete in f32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file or an OpenVINO IR folder")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="new tokens per prompt")
    parser.add_argument("--prompts", type=int, help="only the first N prompts")
    parser.add_argument("--threads", type=int, default=0, help="inference threads of each process")
    parser.add_argument("--json", action="store_true", help="one JSON document and nothing else")
    arguments = parser.parse_args()
    prompts = load_prompts(arguments.prompts)
    with tempfile.TemporaryDirectory() as work:
        shards = Path(work) / "shards"
        build(arguments.model, shards, stages=arguments.stages, work_folder=Path(work))
        model_folder = open_source(arguments.model, Path(work)).folder
        precisions: tuple[KvPrecision, ...] = (EXACT, DEFAULT)
        agreements = [
            compare(model_folder, shards, prompts, arguments.tokens, precision, arguments.threads)
            for precision in precisions
        ]
    if arguments.json:
        print(json.dumps([{**msgspec.to_builtins(one), "same_prompts": one.same_prompts} for one in agreements]))
    else:
        for one in agreements:
            print(f"KV cache {one.kv_precision}: {one.same_prompts} of {len(prompts)} answers are the same")
            for prompt, same in zip(prompts, one.same_tokens, strict=True):
                if same != one.tokens:
                    print(f"  differs at token {same + 1} of {one.tokens}: {prompt[:70]!r}")
    return 0 if agreements[0].same_prompts == len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
