"""A model's tokenizer in OpenVINO's form: converted where it is not in it, and checked against the model."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np

from fleet.errors import ModelError
from shard_builder.reporting import Reporter
from shard_builder.sources.child_work import run_child_work
from shard_builder.sources.export_extra import EXPORT_PACKAGES, require_export_extra
from shard_builder.sources.kept_models import conversion_key, keep
from shard_builder.sources.model_files import TOKENIZER_FILES, is_tokenizer_source

TOKENIZER_GRAPH, _, DETOKENIZER_GRAPH, _ = TOKENIZER_FILES
_VOCABULARY_PORT, _SKIPPED_PORT = "1", "4"


def find_tokenizer(folder: Path, names: set[str], work_folder: Path, reporter: Reporter) -> Path:
    """The folder with the tokenizer's graphs: the model's own, or one kept aside where they had to be converted.

    Raises:
        ModelError: the model has no tokenizer, or one that cannot be converted here.
        CancelledError: the caller wants the build to end.
    """
    missing = [name for name in TOKENIZER_FILES if name not in names]
    if not missing:
        return folder
    sources = sorted(folder / name for name in names if is_tokenizer_source(name))
    if not any(path.name != "tokenizer_config.json" for path in sources):
        raise ModelError(
            f"{folder} is not complete: {missing[0]} is missing, and there is no tokenizer.json to make it from. "
            "Export the model with its tokenizer again."
        )
    require_export_extra(
        ("transformers", "optimum"), f"{folder} has no {missing[0]}; making it from the model's {sources[0].name}"
    )
    destination = work_folder / conversion_key(f"{folder.resolve().name}-tokenizer", sources, EXPORT_PACKAGES)

    def make(scratch: Path) -> None:
        run_child_work(
            "shard_builder.sources.convert_tokenizer",
            (str(folder), str(scratch)),
            complaint=f"The tokenizer in {folder} cannot be converted",
            on_progress=reporter.work("convert"),
            cancelled=reporter.cancelled,
        )

    return keep(
        destination, 4 * sum(path.stat().st_size for path in sources), f"Converting the tokenizer of {folder}", make
    )


def check_vocabulary(folder: Path, vocabulary_size: int, model: Path) -> None:
    """Refuses a tokenizer whose text may become tokens that the model does not have.

    Special tokens beyond the model's vocabulary are not looked at: they stand for pictures and the like, and no text
    becomes them (Gemma 3's smallest models have one).

    Raises:
        ModelError: it is another model's tokenizer, or its graph is damaged.
    """
    path = folder / DETOKENIZER_GRAPH
    try:
        tokens, skipped = _vocabulary(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ElementTree.ParseError, ValueError, KeyError):
        raise ModelError(f"{path} is damaged; export the model with its tokenizer again.") from None
    beyond = set(range(vocabulary_size, tokens)) - skipped
    if beyond:
        raise ModelError(
            f"The tokenizer in {folder} is another model's: it has {tokens:,} tokens, and {model} knows "
            f"{vocabulary_size:,}. Put the model's own tokenizer there."
        )


def _vocabulary(path: Path) -> tuple[int, set[int]]:
    """How many tokens a detokenizer's graph knows, and which it leaves out of texts; 0 where it does not say."""
    root = ElementTree.parse(path).getroot()
    layers = {layer.get("id", ""): layer for layer in root.iter("layer")}
    decoder = next((layer for layer in layers.values() if layer.get("type") == "VocabDecoder"), None)
    if decoder is None:
        return 0, set()
    sources = {(edge.get("to-layer"), edge.get("to-port")): edge.get("from-layer", "") for edge in root.iter("edge")}
    tokens = 0
    for port in decoder.iter("port"):
        if port.get("id") == _VOCABULARY_PORT:
            tokens = int(port.findtext("dim") or 0)
    source = layers.get(sources.get((decoder.get("id"), _SKIPPED_PORT), ""))
    while source is not None and source.get("type") in ("Slice", "StridedSlice"):
        source = layers.get(sources.get((source.get("id"), "0"), ""))
    data = source.find("data") if source is not None else None
    if source is None or source.get("type") != "Const" or data is None:
        return tokens, set()
    with path.with_suffix(".bin").open("rb") as weights:
        weights.seek(int(data.get("offset", "0")))
        skipped = np.frombuffer(weights.read(int(data.get("size", "0"))), np.int32)
    return tokens, {int(token) for token in skipped}


def has_chat_template(folder: Path, tokenizer_folder: Path) -> bool:
    """Whether a model brings a chat template: in its tokenizer's graph, or in one of the files for it."""
    try:
        graph = ElementTree.parse(tokenizer_folder / TOKENIZER_GRAPH).getroot()
    except (OSError, ElementTree.ParseError):
        raise ModelError(f"{tokenizer_folder / TOKENIZER_GRAPH} is damaged: it is not XML.") from None
    for key in ("chat_template", "simplified_chat_template"):
        found = graph.find(f"rt_info/{key}")
        if found is not None and found.get("value"):
            return True
    for place in {folder, tokenizer_folder}:
        if (place / "chat_template.jinja").is_file():
            return True
        for name in ("tokenizer_config.json", "chat_template.json"):
            try:
                content = json.loads((place / name).read_bytes())
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError):
                raise ModelError(f"{place / name} is damaged: it is not JSON.") from None
            if isinstance(content, dict) and content.get("chat_template"):
                return True
    return False
