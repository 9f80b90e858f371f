"""What the tiny random models of docs/architectures.md have in common.

Widths are odd on purpose (6 heads of 8, 2 of them for keys), so that a dimension that is taken for another one shows.
A sliding window is 8 tokens, so that every longer prompt goes over it, and each kind of a mixed model's layers comes
up in more than one stage. Sources of the configurations: the ``configuration_*.py`` of each model in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

WeightForm = Literal["f32", "f16", "bf16", "int8", "int4"]
WINDOW_TOKENS = 8
REFUSED_NAME = "refused.txt"
"""In place of an exported model: why there is none."""

TOKENS = {"vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = TOKENS | {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SIX_LAYERS = COMMON | {"num_hidden_layers": 6}
WIDE = COMMON | {"hidden_size": 96}
GPT = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "n_embd": 48, "n_layer": 4, "n_positions": 256}
ENCODER_DECODER = TOKENS | {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 256,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
MAMBA = TOKENS | {"hidden_size": 48, "state_size": 8, "num_hidden_layers": 4, "conv_kernel": 4}
HEADS = {"head_dim": 8}
SLIDING = {"sliding_window": WINDOW_TOKENS}
MIXED = SLIDING | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
    "logits_scaling": 8.0,
}
HYBRID = {"layer_types": ["conv", "conv", "full_attention"] * 2}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
PER_LAYER = {
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 10,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 5,
}


@dataclass(frozen=True)
class TinyModel:
    """What to export, and how its row describes it.

    ``transformers`` is the version that exports it, where that is not the one that the export extra pins.
    """

    architecture: str
    positions: str
    attention: str
    configuration: Mapping[str, Any]
    stateful: bool = True
    weights: WeightForm = "f32"
    transformers: str = ""
    variant: str = ""

    @property
    def name(self) -> str:
        """The row's key: the architecture and, where there are several of it, what sets this one apart."""
        return f"{self.architecture}, {self.variant}" if self.variant else self.architecture
