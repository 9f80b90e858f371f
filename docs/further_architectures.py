"""Other forms of the named architectures, and all other decoders that Optimum Intel exports without code from a hub."""

from __future__ import annotations

from named_architectures import NAMED_ARCHITECTURES
from tiny_model import (
    COMMON,
    ENCODER_DECODER,
    EXPERTS,
    GPT,
    GRANITE,
    HEADS,
    HYBRID,
    LINEAR,
    LOCAL_EXPERTS,
    MAMBA,
    MIXED,
    PER_LAYER,
    SIX_LAYERS,
    SLIDING,
    TOKENS,
    WIDE,
    WINDOW_TOKENS,
    TinyModel,
)

FURTHER_ARCHITECTURES = (
    TinyModel(
        "llama",
        "rotary",
        "multi-query; tied head",
        COMMON | {"num_key_value_heads": 1, "tie_word_embeddings": True, "attention_bias": True},
        variant="tied",
    ),
    TinyModel("llama", "rotary", "grouped", COMMON, variant="f16", weights="f16"),
    TinyModel("llama", "rotary", "grouped", COMMON, variant="INT8", weights="int8"),
    TinyModel("llama", "rotary", "grouped", COMMON, variant="past and present ports", stateful=False),
    TinyModel("llama", "rotary", "grouped", COMMON, variant="transformers 4.57", transformers="4.57.6"),
    TinyModel(
        "llama",
        "rotary, scaled by the length",
        "grouped",
        COMMON | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        variant="dynamic RoPE",
    ),
    TinyModel(
        "llama",
        "rotary, scaled by the frequency",
        "grouped",
        COMMON
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 10000.0,
            }
        },
        variant="Llama 3 RoPE",
    ),
    TinyModel(
        "phi3",
        "rotary, two tables by the length",
        "grouped",
        COMMON
        | {
            "original_max_position_embeddings": 16,
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "longrope",
                "long_factor": [1.5] * 4,
                "short_factor": [1.0] * 4,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
            },
        },
        variant="LongRoPE",
    ),
    TinyModel(
        "qwen2",
        "rotary",
        "grouped, sliding window in later layers",
        SIX_LAYERS | SLIDING | {"use_sliding_window": True, "max_window_layers": 2},
        variant="sliding window",
    ),
    TinyModel(
        "falcon",
        "rotary",
        "grouped, parallel",
        COMMON | {"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False},
        variant="grouped",
    ),
    TinyModel(
        "opt",
        "learned",
        "multi-head; projected embedding, norms behind",
        TOKENS
        | {
            "hidden_size": 48,
            "ffn_dim": 80,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 24,
            "do_layer_norm_before": False,
        },
        variant="350m form",
    ),
    TinyModel(
        "stablelm",
        "rotary, on a quarter of a head",
        "grouped, parallel, norms on Q and K",
        WIDE | {"partial_rotary_factor": 0.25, "use_parallel_residual": True, "qk_layernorm": True},
        variant="parallel",
    ),
    TinyModel(
        "afmoe",
        "rotary or none, by layer",
        "grouped, gated, sliding window in two of three layers; mixture of experts",
        SIX_LAYERS
        | MIXED
        | HEADS
        | EXPERTS
        | {"num_shared_experts": 1, "num_dense_layers": 2, "n_group": 1, "topk_group": 1},
    ),
    TinyModel("arcee", "rotary", "grouped", COMMON),
    TinyModel("bart", "learned", "multi-head", ENCODER_DECODER),
    TinyModel("biogpt", "learned", "multi-head", COMMON | {"pad_token_id": 1, "bos_token_id": 0}),
    TinyModel("bitnet", "rotary", "grouped, extra norms", COMMON, transformers="4.57.6"),
    TinyModel("blenderbot", "learned", "multi-head", ENCODER_DECODER),
    TinyModel("bloom", "ALiBi", "multi-head", TOKENS | {"hidden_size": 48, "n_layer": 4, "n_head": 6}),
    TinyModel(
        "codegen", "rotary", "multi-head, parallel", GPT | {"n_embd": 128, "n_head": 8, "n_ctx": 256, "rotary_dim": 8}
    ),
    TinyModel("cohere", "rotary", "grouped, parallel, norms on Q and K", COMMON | {"use_qk_norm": True}),
    TinyModel(
        "cohere2",
        "rotary or none, by layer",
        "grouped, parallel, sliding window in two of three layers",
        SIX_LAYERS | MIXED | HEADS,
    ),
    TinyModel(
        "dbrx",
        "rotary",
        "grouped; mixture of experts",
        {
            "vocab_size": 320,
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 4,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 80, "moe_num_experts": 4, "moe_top_k": 2},
        },
        transformers="4.57.6",
    ),
    TinyModel(
        "exaone4",
        "rotary or none, by layer",
        "grouped, sliding window in three of four layers",
        COMMON | SLIDING | {"num_hidden_layers": 8, "sliding_window_pattern": 4},
        transformers="4.57.6",
    ),
    TinyModel("falcon_mamba", "none", "state space", MAMBA),
    TinyModel("gemma", "rotary", "grouped", COMMON | HEADS),
    TinyModel(
        "gemma3n_text",
        "two rotary bases",
        "grouped, sliding window in every other layer, caches shared by layers; inputs per layer",
        COMMON
        | SLIDING
        | HEADS
        | PER_LAYER
        | {
            "intermediate_size": [80] * 10,
            "laurel_rank": 8,
            "altup_num_inputs": 4,
            "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 8,
        },
    ),
    TinyModel("glm", "rotary, on half of a head", "grouped", COMMON | HEADS),
    TinyModel("glm4", "rotary, on half of a head", "grouped, extra norms", COMMON | HEADS),
    TinyModel("gpt_bigcode", "learned", "multi-query", GPT | {"n_head": 6, "multi_query": True}),
    TinyModel("gpt_bigcode", "learned", "multi-head", GPT | {"n_head": 6, "multi_query": False}, variant="multi-head"),
    TinyModel(
        "gpt_neo",
        "learned",
        "multi-head, local in every other layer",
        {
            "vocab_size": 320,
            "hidden_size": 48,
            "num_layers": 4,
            "num_heads": 6,
            "attention_types": [[["global", "local"], 2]],
            "window_size": WINDOW_TOKENS,
            "max_position_embeddings": 256,
        },
    ),
    TinyModel(
        "gpt_neox_japanese",
        "rotary",
        "multi-head",
        TOKENS
        | {
            "hidden_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "intermediate_multiple_size": 2,
            "max_position_embeddings": 256,
        },
    ),
    TinyModel(
        "gpt_oss",
        "rotary",
        "grouped, sinks, sliding window in every other layer; mixture of experts",
        SIX_LAYERS | SLIDING | HEADS | LOCAL_EXPERTS | {"layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    TinyModel("gptj", "rotary", "multi-head, parallel", GPT | {"n_embd": 96, "n_head": 6, "rotary_dim": 8}),
    TinyModel("granitemoe", "rotary", "grouped; mixture of experts", COMMON | LOCAL_EXPERTS | GRANITE),
    TinyModel(
        "granitemoehybrid",
        "none",
        "grouped in one of three layers, else state space; mixture of experts",
        SIX_LAYERS
        | LOCAL_EXPERTS
        | {
            "layer_types": ["mamba", "mamba", "attention"] * 2,
            "mamba_n_heads": 12,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
            "shared_intermediate_size": 40,
        },
        transformers="5.5.0",
    ),
    TinyModel("hunyuan_v1_dense", "rotary", "grouped, norms on Q and K", COMMON | HEADS),
    TinyModel(
        "lfm2",
        "rotary",
        "grouped in one of three layers, else convolution",
        SIX_LAYERS | HYBRID | {"block_multiple_of": 16, "block_ff_dim": 80},
    ),
    TinyModel(
        "lfm2_moe",
        "rotary",
        "grouped in one of three layers, else convolution; mixture of experts",
        SIX_LAYERS | HYBRID | EXPERTS | {"num_dense_layers": 2},
    ),
    TinyModel(
        "llama4_text",
        "rotary or none, by layer",
        "grouped, chunked in three of four layers; mixture of experts",
        COMMON
        | HEADS
        | LOCAL_EXPERTS
        | {
            "num_hidden_layers": 8,
            "intermediate_size_mlp": 80,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW_TOKENS,
            "interleave_moe_layer_step": 2,
        },
        transformers="4.57.6",
    ),
    TinyModel("mamba", "none", "state space", MAMBA),
    TinyModel(
        "mpt",
        "ALiBi",
        "multi-head",
        {"vocab_size": 320, "d_model": 48, "n_heads": 6, "n_layers": 4, "max_seq_len": 256, "expansion_ratio": 2},
    ),
    TinyModel("olmo", "rotary", "grouped, clipped", COMMON | {"clip_qkv": 8.0}),
    TinyModel("olmo2", "rotary", "grouped, norms on Q and K, norms behind", COMMON),
    TinyModel("persimmon", "rotary, on half of a head", "multi-head, norms on Q and K", WIDE),
    TinyModel("phimoe", "rotary", "grouped; mixture of experts", COMMON | LOCAL_EXPERTS | {"sliding_window": None}),
    TinyModel(
        "qwen2_moe",
        "rotary",
        "grouped; mixture of experts with a shared one",
        COMMON | EXPERTS | {"shared_expert_intermediate_size": 40},
    ),
    TinyModel(
        "qwen3_5_text",
        "rotary, in three sections",
        "grouped in one of four layers, else linear",
        COMMON | HEADS | LINEAR | {"num_hidden_layers": 8},
        transformers="5.2.0",
    ),
    TinyModel(
        "qwen3_5_moe_text",
        "rotary, in three sections",
        "grouped in one of four layers, else linear; mixture of experts",
        COMMON | HEADS | LINEAR | EXPERTS | {"num_hidden_layers": 8, "shared_expert_intermediate_size": 32},
        transformers="5.2.0",
    ),
    TinyModel(
        "qwen3_next",
        "rotary",
        "grouped in one of four layers, else linear; mixture of experts",
        COMMON | HEADS | LINEAR | EXPERTS | {"num_hidden_layers": 8, "shared_expert_intermediate_size": 32},
        transformers="4.57.6",
    ),
    TinyModel("smollm3", "rotary or none, by layer", "grouped", COMMON | {"no_rope_layers": [1, 1, 1, 0]}),
    TinyModel(
        "xglm",
        "sinusoidal",
        "multi-head",
        TOKENS
        | {
            "d_model": 48,
            "ffn_dim": 80,
            "num_layers": 4,
            "attention_heads": 6,
            "max_position_embeddings": 256,
            "pad_token_id": 1,
            "bos_token_id": 0,
        },
    ),
    TinyModel(
        "zamba2",
        "rotary",
        "multi-head in two of six layers, weights shared by them; state space in all",
        COMMON
        | {
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"],
            "hybrid_layer_ids": [1, 4],
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 6,
            "mamba_headdim": 16,
            "num_mem_blocks": 2,
            "num_key_value_heads": 6,
            "chunk_size": 8,
            "attention_head_dim": 16,
            "adapter_rank": 8,
            "use_mem_rope": True,
        },
        transformers="4.57.6",
    ),
)

ALL_ARCHITECTURES = {model.name: model for model in (*NAMED_ARCHITECTURES, *FURTHER_ARCHITECTURES)}
