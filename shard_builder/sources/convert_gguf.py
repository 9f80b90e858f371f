"""Turns a GGUF file into OpenVINO IR: ``python -m shard_builder.sources.convert_gguf FILE [tokenizer]``.

OpenVINO GenAI's reader writes the IR and the tokenizer beside the file that it is given; with ``tokenizer`` that alone,
which it can make of models whose graph it does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import openvino_genai

from shard_builder.sources.child_work import Tell, do_child_work


def convert_gguf(arguments: Sequence[str], tell: Tell) -> str:
    """The work of this process; it comes to nothing but the files."""
    path = arguments[0]
    if len(arguments) > 1:
        openvino_genai.Tokenizer(path, enable_save_ov_model=True)
    else:
        openvino_genai.LLMPipeline(
            path, "CPU", enable_save_ov_model=True, INFERENCE_PRECISION_HINT="f32", INFERENCE_NUM_THREADS=2
        )
    return ""


if __name__ == "__main__":
    sys.exit(do_child_work(convert_gguf))
