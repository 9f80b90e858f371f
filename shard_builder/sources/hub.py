"""Models by their id on the Hugging Face hub: what an id looks like, and which files of a repository are needed.

The download itself runs in a child process (``shard_builder.sources.fetch_model``) and goes into the hub's own cache
folder, so that a model that is there already, for whatever program, is not fetched again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from shard_builder.sources.child_work import WorkProgress, run_child_work
from shard_builder.sources.model_files import (
    CHECKPOINT_INDEXES,
    CHECKPOINT_WEIGHTS,
    CONFIGURATION,
    MODEL_GRAPH,
    MODEL_WEIGHTS,
    TOKENIZER_FILES,
    is_companion,
    is_tokenizer_source,
)

_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_FILE_SUFFIXES = (".gguf", ".xml", ".bin", ".safetensors")
MAIN_REVISION = "main"


@dataclass(frozen=True)
class HubModel:
    """A repository of the hub at a revision: a branch, a tag or a commit."""

    repository: str
    revision: str = MAIN_REVISION

    def __str__(self) -> str:
        return self.repository if self.revision == MAIN_REVISION else f"{self.repository}@{self.revision}"


class Fetched(msgspec.Struct, frozen=True):
    """Where a repository's files are, and the commit that they belong to."""

    folder: str
    commit: str


def parse_hub_id(text: str) -> HubModel | None:
    """The repository that ``organisation/name`` or ``organisation/name@revision`` names; None for anything else.

    A text that ends as the name of a model's file does is a path.
    """
    found = _ID.fullmatch(text)
    if found is None or text.endswith(_FILE_SUFFIXES) or ".." in text or "--" in found[1]:
        return None
    return HubModel(found[1], found[2] or MAIN_REVISION)


def first_files(names: Collection[str]) -> list[str]:
    """Of a repository's files, all that are needed but the weights. Nothing in a folder of the repository is.

    A repository that holds an OpenVINO model needs nothing else; of the others, the index says which weights there are.
    """
    wanted = {name for name in names if is_companion(name)}
    if MODEL_GRAPH in names:
        wanted |= {name for name in (MODEL_GRAPH, *TOKENIZER_FILES) if name in names}
        if not wanted >= set(TOKENIZER_FILES):
            wanted |= {name for name in names if is_tokenizer_source(name)}
    else:
        wanted |= {name for name in names if is_tokenizer_source(name)}
        index = _first(CHECKPOINT_INDEXES, names)
        if index is not None:
            wanted.add(index)
    return sorted(wanted, key=lambda name: (name != CONFIGURATION, name))


def weight_files(names: Collection[str], read: Callable[[str], bytes]) -> list[str]:
    """The files that hold the weights, in one of the forms that the repository may have them in; none if it has none.

    ``read`` gives the content of one of ``first_files``.

    Raises:
        ValueError: the index of the weights is damaged.
    """
    if MODEL_GRAPH in names:
        return [MODEL_WEIGHTS] if MODEL_WEIGHTS in names else []
    whole = _first(CHECKPOINT_WEIGHTS[:1], names)
    index = None if whole else _first(CHECKPOINT_INDEXES, names)
    if index is not None:
        return index_files(read(index))
    found = whole or _first(CHECKPOINT_WEIGHTS, names)
    return [found] if found else []


def index_files(index: bytes) -> list[str]:
    """The files that an index of a checkpoint's weights names.

    Raises:
        ValueError: it is not such an index.
    """
    content = json.loads(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError("no weight_map")
    return sorted(set(places.values()))


def _first(candidates: Sequence[str], names: Collection[str]) -> str | None:
    return next((name for name in candidates if name in names), None)


def fetch(model: HubModel, on_progress: Callable[[WorkProgress], None], cancelled: Callable[[], bool]) -> Fetched:
    """Downloads what is needed of a repository, or finds it in the hub's cache on this PC.

    A download that broke off or was stopped goes on from where it was.

    Raises:
        ModelError: there is no such model, it is gated, or the hub cannot be reached.
        CancelledError: ``cancelled`` said so.
    """
    value = run_child_work(
        "shard_builder.sources.fetch_model",
        (model.repository, model.revision),
        complaint=f"{model} cannot be downloaded",
        on_progress=on_progress,
        cancelled=cancelled,
    )
    return msgspec.json.decode(value, type=Fetched)
