"""``python export_tiny_models.py FOLDER NAME...``: exports tiny models of random weights through Optimum Intel.

A program of its own, as a user's export is: the libraries it needs warn when they are imported. A model's folder is
complete, or has a file ``refused.txt`` with the reason, once the program says its name in a line.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import openvino as ov
import torch
from further_architectures import ALL_ARCHITECTURES
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import main_export
from optimum.intel import OVConfig, OVWeightQuantizationConfig
from tiny_model import REFUSED_NAME, TinyModel
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPREAD = 0.1
"""Added to every parameter, so that norms are not all 1 and biases not all 0: one taken for another would not show."""
TOKENIZER_NAMES = ("openvino_tokenizer", "openvino_detokenizer")
CONFIGURATIONS = {
    "f32": None,
    "bf16": None,
    "f16": OVConfig(dtype="fp16"),
    "int8": OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8)),
    "int4": OVConfig(quantization_config=OVWeightQuantizationConfig(bits=4, group_size=16, sym=False)),
}


def write_tokenizer(folder: Path) -> None:
    """One tokenizer for all: every byte is a token, behind three special ones."""
    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    for graph, name in zip(convert_tokenizer(fast, with_detokenizer=True), TOKENIZER_NAMES, strict=True):
        ov.save_model(graph, folder / f"{name}.xml")


def export(tiny: TinyModel, folder: Path) -> None:
    """Makes the IR folder of one model."""
    torch.manual_seed(7)
    configuration = AutoConfig.for_model(tiny.architecture, **tiny.configuration)
    model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(SPREAD * torch.randn(parameter.shape))
    with tempfile.TemporaryDirectory() as checkpoint:
        model.to(torch.bfloat16 if tiny.weights == "bf16" else torch.float32).save_pretrained(checkpoint)
        main_export(
            checkpoint,
            folder,
            task="text-generation-with-past",
            stateful=tiny.stateful,
            ov_config=CONFIGURATIONS[tiny.weights],
        )


def main(folder: Path, names: list[str]) -> None:
    """Exports the models in turn."""
    with tempfile.TemporaryDirectory() as tokenizer:
        write_tokenizer(Path(tokenizer))
        for name in names:
            made = folder / name
            if not made.exists():
                unfinished = folder / f"{name}.unfinished"
                try:
                    export(ALL_ARCHITECTURES[name], unfinished)
                    shutil.copytree(tokenizer, unfinished, dirs_exist_ok=True)
                except Exception as error:  # whatever the libraries raise is why this row is empty
                    unfinished.mkdir(exist_ok=True)
                    (unfinished / REFUSED_NAME).write_text(" ".join(str(error).split()) or type(error).__name__)
                unfinished.rename(made)
            print(name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
