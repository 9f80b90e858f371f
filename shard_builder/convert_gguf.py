"""Turns a GGUF file into OpenVINO IR: ``python -m shard_builder.convert_gguf FILE``.

OpenVINO GenAI's reader writes the IR and the tokenizer beside the file that it is given. It runs in a process of its
own, because it holds the whole model in memory more than once and a damaged file may end the process.
"""

from __future__ import annotations

import sys

import openvino_genai


def main() -> int:
    """Converts the file; the reason of a failure goes to standard error."""
    path = sys.argv[1]
    try:
        openvino_genai.LLMPipeline(
            path, "CPU", enable_save_ov_model=True, INFERENCE_PRECISION_HINT="f32", INFERENCE_NUM_THREADS=2
        )
    except Exception as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
