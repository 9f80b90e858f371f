"""``python export_model.py ARCHITECTURE CONFIGURATION FOLDER``: export a model of random weights through Optimum Intel.

A program of its own, as a user's export is: the libraries it needs warn when they are imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from optimum.exporters.openvino import main_export
from transformers import AutoConfig, AutoModelForCausalLM


def main(architecture: str, configuration: str, folder: Path) -> None:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **json.loads(configuration)))
    checkpoint = folder / "checkpoint"
    model.save_pretrained(checkpoint)
    main_export(str(checkpoint), folder / "model", task="text-generation-with-past", convert_tokenizer=False)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
