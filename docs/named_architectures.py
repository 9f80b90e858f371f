"""The architectures that every change is tried with."""

from __future__ import annotations

from tiny_model import (
    COMMON,
    EXPERTS,
    GPT,
    GRANITE,
    HEADS,
    LOCAL_EXPERTS,
    MIXED,
    SIX_LAYERS,
    SLIDING,
    TOKENS,
    WIDE,
    TinyModel,
)

NAMED_ARCHITECTURES = (
    TinyModel("llama", "rotary", "grouped", COMMON),
    TinyModel("mistral", "rotary", "grouped, sliding window", COMMON | SLIDING | HEADS),
    TinyModel("mixtral", "rotary", "grouped; mixture of experts", COMMON | LOCAL_EXPERTS | {"sliding_window": None}),
    TinyModel("qwen2", "rotary", "grouped, biases", COMMON),
    TinyModel("qwen3", "rotary", "grouped, norms on Q and K", COMMON | {"head_dim": 16}),
    TinyModel("qwen3_moe", "rotary", "grouped; mixture of experts", COMMON | EXPERTS | HEADS),
    TinyModel("phi", "rotary, on half of a head", "multi-head, parallel", COMMON | {"num_key_value_heads": 6}),
    TinyModel("phi3", "rotary", "grouped, sliding window", COMMON | SLIDING),
    TinyModel("gpt2", "learned", "multi-head", GPT | {"n_head": 3}),
    TinyModel("gpt_neox", "rotary, on a quarter of a head", "multi-head, parallel", WIDE | {"rotary_pct": 0.25}),
    TinyModel(
        "falcon",
        "rotary",
        "multi-query, parallel",
        COMMON | {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "alibi": False},
    ),
    TinyModel(
        "falcon",
        "ALiBi",
        "multi-head",
        COMMON | {"multi_query": False, "parallel_attn": False, "new_decoder_architecture": False, "alibi": True},
        variant="ALiBi",
    ),
    TinyModel(
        "opt",
        "learned",
        "multi-head",
        TOKENS
        | {
            "hidden_size": 48,
            "ffn_dim": 80,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 48,
        },
    ),
    TinyModel("starcoder2", "rotary", "grouped, sliding window", COMMON | SLIDING),
    TinyModel("stablelm", "rotary, on a quarter of a head", "grouped", WIDE | {"partial_rotary_factor": 0.25}),
    TinyModel("granite", "rotary", "grouped; scaled residuals", COMMON | GRANITE),
    TinyModel(
        "gemma2",
        "rotary",
        "grouped, sliding window in every other layer, soft-capping, extra norms",
        SIX_LAYERS | SLIDING | HEADS,
    ),
    TinyModel(
        "gemma3_text",
        "two rotary bases",
        "grouped, sliding window in two of three layers, extra norms",
        SIX_LAYERS | MIXED | HEADS,
    ),
    TinyModel("llama", "rotary", "grouped", COMMON, variant="bf16 checkpoint", weights="bf16"),
    TinyModel("llama", "rotary", "grouped", COMMON, variant="INT4", weights="int4"),
    TinyModel("gpt2", "learned", "multi-head", GPT | {"n_head": 3}, variant="past and present ports", stateful=False),
)
