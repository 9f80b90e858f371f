"""Cuts tiny random models as Optimum Intel exports them. Needs the ``export`` extra."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shard_builder import build

pytestmark = [
    pytest.mark.export,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the export extra (torch) is not installed"),
]

COMMON = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
CONFIGURATIONS = {
    "llama": COMMON,
    "qwen3_moe": COMMON
    | {
        "head_dim": 8,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
    "gpt2": {"vocab_size": 320, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256},
}


@pytest.mark.parametrize("architecture", CONFIGURATIONS)
def test_an_exported_model_is_cut_exactly(architecture: str, tmp_path: Path) -> None:
    program = Path(__file__).with_name("export_model.py")
    exported = subprocess.run(
        [sys.executable, str(program), architecture, json.dumps(CONFIGURATIONS[architecture]), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert exported.returncode == 0, exported.stderr
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        text = '<net name="tokenizer"><rt_info><eos_token_id value="2"/></rt_info></net>'
        (tmp_path / "model" / f"{name}.xml").write_text(text)
        (tmp_path / "model" / f"{name}.bin").write_bytes(b"\0" * 8)
    manifest = build(tmp_path / "model", tmp_path / "shards", stages=2)
    assert manifest.verification is not None
    assert manifest.verification.max_abs_diff == 0.0
    assert manifest.architecture == architecture
    assert [stage.fused_attention for stage in manifest.stages] == [2, 2]
