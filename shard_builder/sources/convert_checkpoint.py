"""``python -m shard_builder.sources.convert_checkpoint FOLDER DESTINATION [GGUF FILE]``: exports a checkpoint.

Through Optimum Intel, with weights in f16, a growing KV cache in states, and the tokenizer. With the name of a GGUF
file in FOLDER, transformers reads that, which dequantises it; not its tokenizer, of which transformers 5.0 makes
another one than the file describes. Needs the ``export`` extra. Code that a checkpoint brings along is never run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimum.exporters.openvino import export_from_model, main_export
from optimum.intel.openvino.configuration import OVConfig
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers import __version__ as transformers_version

from fleet.errors import ModelError
from shard_builder.sources.child_work import Tell, WorkProgress, do_child_work
from shard_builder.sources.convert_tokenizer import convert_tokenizer, load_tokenizer

TASK = "text-generation-with-past"


def convert_checkpoint(arguments: Sequence[str], tell: Tell) -> str:
    """The work of this process; it comes to nothing but the files in DESTINATION."""
    folder, destination = Path(arguments[0]), Path(arguments[1])
    if len(arguments) > 2:
        _convert_gguf(folder, arguments[2], destination, tell)
        return ""
    _check_code(folder)
    tokenizer = load_tokenizer(folder)
    main_export(
        str(folder),
        destination,
        task=TASK,
        library_name="transformers",
        local_files_only=True,
        trust_remote_code=False,
        ov_config=OVConfig(dtype="fp16"),
        convert_tokenizer=False,
    )
    tell(WorkProgress(0.9))
    convert_tokenizer(tokenizer, destination)
    return ""


def _check_code(folder: Path) -> None:
    """Refuses what transformers could load with the checkpoint's own code alone."""
    content, _ = PretrainedConfig.get_config_dict(str(folder), local_files_only=True)
    kind = content.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if "auto_map" in content:
        raise ModelError(
            f"{folder} needs code of its own to be loaded (trust_remote_code), and Paceline never runs a model's code; "
            "convert it elsewhere and give the OpenVINO IR folder."
        )
    raise ModelError(f"{folder} is of an architecture that transformers {transformers_version} does not know: {kind}.")


def _convert_gguf(folder: Path, file: str, destination: Path, tell: Tell) -> None:
    loading: dict[str, Any] = {"gguf_file": file, "local_files_only": True, "trust_remote_code": False}
    configuration = AutoConfig.from_pretrained(str(folder), **loading)
    model = AutoModelForCausalLM.from_pretrained(str(folder), config=configuration, dtype="float16", **loading)
    tell(WorkProgress(0.4))
    export_from_model(
        model=model,
        output=destination,
        task=TASK,
        ov_config=OVConfig(dtype="fp16"),
        stateful=True,
        patch_16bit_model=True,
    )


if __name__ == "__main__":
    sys.exit(do_child_work(convert_checkpoint))
