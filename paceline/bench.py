"""Measures a pipeline: rounds of simultaneous users, the numbers of users alternated within each round."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import msgspec

from fleet.errors import PacelineError
from fleet.gateway_client import GatewayClient
from fleet.gateway_messages import Delta, Failed, Generate, Sampling
from fleet.manifest import KvPrecision, load_manifest
from paceline.measure import RequestTimes, Round, Run, summarise
from pipeline.local import LocalPipeline


class BenchPlan(msgspec.Struct, frozen=True):
    """What is measured: each of ``users`` once per round; prompts are random token ids."""

    users: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    kv_precision: KvPrecision
    rounds: int
    seed: int


class BenchReport(msgspec.Struct, frozen=True):
    """The figures, with what they were measured on."""

    model: str
    stages: int
    kv_precision: KvPrecision
    prompt_tokens: int
    output_tokens: int
    runs: list[Run]


def run_bench(shard_folder: Path, plan: BenchPlan) -> BenchReport:
    """Start the pipeline of a shard folder on this PC, measure it, and stop it.

    Raises:
        PacelineError: the pipeline did not start, or a request failed.
    """
    manifest = load_manifest(shard_folder)
    needed_tokens = plan.prompt_tokens + plan.output_tokens
    if manifest.context_tokens and needed_tokens > manifest.context_tokens:
        raise PacelineError(
            f"{manifest.name} holds {manifest.context_tokens} tokens of context; {plan.prompt_tokens} prompt and "
            f"{plan.output_tokens} output tokens exceed that. Ask for fewer."
        )
    with (
        LocalPipeline(
            shard_folder,
            kv_precision=plan.kv_precision,
            pin=True,
            gateway=True,
            max_sequences=max(plan.users),
        ) as pipeline,
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
    ):
        rounds = runner.run(_measure(pipeline, plan, manifest.vocabulary_size))
    return BenchReport(
        model=manifest.name,
        stages=len(manifest.stages),
        kv_precision=plan.kv_precision,
        prompt_tokens=plan.prompt_tokens,
        output_tokens=plan.output_tokens,
        runs=[summarise([one for one in rounds if one.users == users]) for users in plan.users],
    )


async def _measure(pipeline: LocalPipeline, plan: BenchPlan, vocabulary_size: int) -> list[Round]:
    chooser = random.Random(plan.seed)
    rounds = []
    async with GatewayClient(pipeline.identity, pipeline.gateway_address) as client:
        await _round(
            client, plan, 1, chooser, vocabulary_size
        )  # the first inference of each shard prepares its kernels
        for _ in range(plan.rounds):
            for users in plan.users:
                rounds.append(await _round(client, plan, users, chooser, vocabulary_size))
    return rounds


async def _round(
    client: GatewayClient, plan: BenchPlan, users: int, chooser: random.Random, vocabulary_size: int
) -> Round:
    prompts = [tuple(chooser.randrange(vocabulary_size) for _ in range(plan.prompt_tokens)) for _ in range(users)]
    return Round(users, tuple(await asyncio.gather(*(_request(client, plan, prompt) for prompt in prompts))))


async def _request(client: GatewayClient, plan: BenchPlan, prompt: tuple[int, ...]) -> RequestTimes:
    request = Generate(
        number=client.next_number(),
        tokens=prompt,
        sampling=Sampling(ignore_stop_ids=True),
        max_tokens=plan.output_tokens,
    )
    sent_s = time.perf_counter()
    arrived_s: list[float] = []
    async for message in client.generate(request):
        match message:
            case Delta(tokens=tokens):
                arrived_s += [time.perf_counter()] * len(tokens)
            case Failed(message=reason):
                raise PacelineError(reason)
    if len(arrived_s) != plan.output_tokens:
        raise PacelineError(
            f"A request gave {len(arrived_s)} of {plan.output_tokens} tokens; see the log with --debug."
        )
    return RequestTimes(sent_s, tuple(arrived_s))
