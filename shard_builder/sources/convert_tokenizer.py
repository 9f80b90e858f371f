"""Converts a Hugging Face tokenizer: ``python -m shard_builder.sources.convert_tokenizer FOLDER DESTINATION``.

OpenVINO's tokenizer and detokenizer graphs carry the chat template with them. Needs the ``export`` extra.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openvino as ov
import openvino_tokenizers
from transformers import AutoTokenizer

from fleet.errors import ModelError
from shard_builder.sources.child_work import Tell, do_child_work, plain_line


def convert_tokenizer_folder(arguments: Sequence[str], tell: Tell) -> str:
    """The work of this process; it comes to nothing but the files in DESTINATION."""
    folder, destination = Path(arguments[0]), Path(arguments[1])
    convert_tokenizer(load_tokenizer(folder), destination)
    return ""


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder.

    Raises:
        ModelError: there is none that can be loaded without code of its own.
    """
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # Whatever its loader raises, the person has to hear which file of the model is at fault.
        reason = plain_line(str(error)) or type(error).__name__
        raise ModelError(f"The tokenizer in {folder} cannot be loaded: {reason}.") from None


def convert_tokenizer(tokenizer: Any, destination: Path) -> None:
    """Writes the two graphs, and the tokenizer's configuration where it is not there yet.

    Raises:
        ModelError: OpenVINO has no form for this tokenizer.
    """
    # As a causal language model is fed: what is cut off or padded is at the beginning.
    tokenizer.padding_side = "left"
    tokenizer.truncation_side = "left"
    try:
        graphs = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    except Exception as error:
        reason = plain_line(str(error)) or type(error).__name__
        raise ModelError(f"The model's tokenizer cannot be converted to OpenVINO's form: {reason}.") from None
    for graph, name in zip(graphs, ("openvino_tokenizer", "openvino_detokenizer"), strict=True):
        ov.save_model(graph, destination / f"{name}.xml")
    tokenizer.save_pretrained(destination / "saved")
    for path in (destination / "saved").iterdir():
        if path.name in ("tokenizer_config.json", "chat_template.jinja"):
            path.replace(destination / path.name)


if __name__ == "__main__":
    sys.exit(do_child_work(convert_tokenizer_folder))
