"""The ways in: whatever the model is given as, an OpenVINO IR with its tokenizer comes out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleet.build_messages import TargetDevice, WeightChoice
from fleet.errors import ModelError
from fleet.manifest import MANIFEST_NAME
from shard_builder.reporting import Reporter
from shard_builder.sources.checkpoint_source import export_checkpoint, read_checkpoint
from shard_builder.sources.gguf import GgufHead, is_gguf, read_head
from shard_builder.sources.gguf_source import convert_gguf_file
from shard_builder.sources.hub import fetch, parse_hub_id
from shard_builder.sources.kept_models import default_work_folder
from shard_builder.sources.model_files import (
    CONFIGURATION,
    MODEL_GRAPH,
    MODEL_WEIGHTS,
    TOKENIZER_FILES,
    companions,
    list_files,
)
from shard_builder.sources.tokenizer_files import find_tokenizer, has_chat_template
from shard_builder.sources.weight_compression import compress_ir

FORMS = "an OpenVINO IR folder, a GGUF file, a Hugging Face checkpoint folder, or an id on the hub (organisation/name)"
LOCAL_FORMS = "an OpenVINO IR folder, a GGUF file, or a Hugging Face checkpoint folder"


@dataclass(frozen=True)
class Source:
    """A model as IR.

    ``gguf`` is the head of the file it came from, if it came from one. ``origin`` and ``weights`` are what leads to the
    same IR again: a path or an id with its commit, and the format that was chosen.
    """

    folder: Path
    name: str
    tokenizer_folder: Path
    origin: str
    gguf: GgufHead | None = None
    weights: WeightChoice | None = None

    @property
    def graph(self) -> Path:
        """The model's graph file."""
        return self.folder / MODEL_GRAPH

    @property
    def tokenizer_graph(self) -> Path:
        """The tokenizer's graph file."""
        return self.tokenizer_folder / TOKENIZER_FILES[0]

    @property
    def companions(self) -> list[Path]:
        """Tokenizer, configuration and licence files that the model has."""
        tokenizer = [self.tokenizer_folder / name for name in TOKENIZER_FILES]
        own = companions(self.folder)
        names = {path.name for path in own}
        made = [path for path in companions(self.tokenizer_folder) if path.name not in names]
        return [*(path for path in tokenizer if path.is_file()), *own, *made]

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""
        return has_chat_template(self.folder, self.tokenizer_folder)


def open_source(
    model: str | Path,
    work_folder: Path | None = None,
    reporter: Reporter | None = None,
    *,
    weights: WeightChoice | None = None,
    target_device: TargetDevice | None = None,
) -> Source:
    """The model as IR, downloaded, converted and compressed first if need be; what was made is kept for next time.

    Args:
        model: a path that exists, else an id on the Hugging Face hub.
        work_folder: where converted models are kept; the place in the data folder by default.
        reporter: hears how far it is, and says when to stop.
        weights: the format to store the weights in; by default the one suggested for ``target_device``, and without
            one the model's own.

    Raises:
        ModelError: there is no such model, or it is not one that can be read or converted here.
        CancelledError: the caller wants the build to end.
    """
    work = work_folder or default_work_folder()
    reporter = reporter or Reporter(None, None)
    path = Path(model)
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise ModelError(f"The name {path.absolute()} has bytes that are no text; rename the folder or file.") from None
    try:
        exists = path.exists()
        is_cut = (path / MANIFEST_NAME).is_file() and not (path / MODEL_GRAPH).is_file()
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error.strerror}.") from None
    if is_cut:
        raise ModelError(f"{path} holds shards, which are not cut again: give the model that they were made of.")
    name, origin = path.resolve().name, str(path.resolve())
    if not exists:
        hub_model = parse_hub_id(str(model))
        if hub_model is None:
            raise ModelError(f"There is no model at {model}: give {FORMS}.")
        fetched = fetch(hub_model, reporter.work("download"), reporter.cancelled)
        path = Path(fetched.folder)
        name, origin = hub_model.repository.split("/")[1], f"{hub_model.repository}@{fetched.commit}"
    head = None
    if path.is_file() and path.name != MODEL_GRAPH:
        if not is_gguf(path):
            raise ModelError(f"{path} is not a model: give {FORMS}.")
        head = read_head(path)
        name = path.stem
        if weights is not None and head.is_quantised:
            raise ModelError(
                f"The weights in {path} are quantised already, and compressing them again would lose more than it "
                "saves: leave the weight format out, or give the model in f16."
            )
        folder = convert_gguf_file(path, head, work, reporter)
    else:
        folder = path if path.is_dir() else path.parent
        name = name if path.is_dir() else folder.resolve().name
        names = list_files(folder)
        if MODEL_GRAPH not in names and CONFIGURATION in names and not _other_graphs(names):
            folder = export_checkpoint(read_checkpoint(folder, names), name, work, reporter)
    names = list_files(folder)
    _check_ir(folder, names)
    tokenizer = find_tokenizer(folder, names, work, reporter)
    compressed, choice = compress_ir(folder, name, weights, target_device, work, reporter)
    tokenizer = compressed if tokenizer == folder else tokenizer
    return Source(compressed, name, tokenizer, origin, head, choice)


def _other_graphs(names: set[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("openvino_") and name.endswith("_model.xml"))


def _check_ir(folder: Path, names: set[str]) -> None:
    other = _other_graphs(names)
    if MODEL_GRAPH not in names and other:
        raise ModelError(
            f"{folder} is not an OpenVINO language model: it has no {MODEL_GRAPH}; its {other[0]} belongs to a model "
            "of another kind."
        )
    if MODEL_GRAPH not in names:
        raise ModelError(f"{folder} is not a model: it has no {MODEL_GRAPH} and no {CONFIGURATION}; give {FORMS}.")
    if MODEL_WEIGHTS not in names:
        raise ModelError(f"{folder} is not complete: {MODEL_WEIGHTS} is missing. Export the model again.")
