"""What a model says of itself: its family, the context it was trained for, and the tokens that end an answer."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import ModelError
from shard_builder.sources.ways_in import Source

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "</s>")
"""Texts of tokens with which instruction-tuned models end an answer; counted only where the file marks them so."""


@dataclass(frozen=True)
class Description:
    """``context_tokens`` is 0 where the model does not say."""

    architecture: str
    context_tokens: int
    stop_token_ids: tuple[int, ...]
    sliding_window: int
    """Tokens of the window that the configuration speaks of, where it is narrower than the context; 0: of none."""


def describe(source: Source) -> Description:
    """Reads configuration files, GGUF metadata, and what the tokenizer's graph carries.

    Raises:
        ModelError: one of the files is damaged.
    """
    config = _json(source.folder / "config.json")
    text_config = config.get("text_config")
    inner: dict[str, Any] = text_config if isinstance(text_config, dict) else {}
    generation = _json(source.folder / "generation_config.json")
    architecture = str(config.get("model_type") or inner.get("model_type") or "")
    context = next((value for key in _CONTEXT_KEYS for value in (config.get(key), inner.get(key)) if value), 0)
    stops = _whole_numbers(generation.get("eos_token_id")) or _whole_numbers(config.get("eos_token_id"))
    stops += _whole_numbers(_tokenizer_value(source.tokenizer_graph, "eos_token_id"))
    if source.gguf is not None:
        architecture = architecture or source.gguf.architecture
        context = context or source.gguf.number("context_length")
        for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
            stops += _whole_numbers(source.gguf.metadata.get(f"tokenizer.ggml.{key}"))
        stops += _template_stops(source.gguf.metadata)
    context = context if isinstance(context, int) and 0 < context <= 2**31 else 0
    window = _sliding_window(config | inner)
    if source.gguf is not None:
        window = window or source.gguf.number("attention.sliding_window")
    return Description(
        architecture=architecture or "unknown",
        context_tokens=context,
        stop_token_ids=tuple(dict.fromkeys(stops)),
        sliding_window=window if not context or window < context else 0,
    )


def _sliding_window(config: dict[str, Any]) -> int:
    """A window that the configuration gives and does not switch off."""
    kinds = config.get("layer_types")
    if config.get("use_sliding_window") is False or (kinds and set(kinds) == {"full_attention"}):
        return 0
    found = _whole_numbers(config.get("sliding_window")) + _whole_numbers(config.get("attention_chunk_size"))
    if "local" in str(config.get("attention_types")):
        found += _whole_numbers(config.get("window_size"))
    return max(found, default=0)


def _template_stops(metadata: dict[str, Any]) -> list[int]:
    """Tokens that the chat template writes at the end of a turn, where the vocabulary has them as one token."""
    template = str(metadata.get("tokenizer.chat_template", ""))
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    wanted = {text for text in _END_OF_TURN if text in template}
    return [number for number, text in enumerate(tokens) if text in wanted] if wanted else []


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is damaged: it is not JSON.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is damaged: it is not a JSON object.")
    return content


def _tokenizer_value(path: Path, key: str) -> Any:
    """A value of the rt_info at the end of a tokenizer's graph; None where it is not there."""
    try:
        root = ElementTree.parse(path).getroot()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    except ElementTree.ParseError:
        raise ModelError(f"{path} is damaged: it is not XML.") from None
    found = root.find(f"rt_info/{key}")
    value = found.get("value") if found is not None else None
    return int(value) if value is not None and value.isdigit() else None


def _whole_numbers(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int) and not isinstance(number, bool) and number >= 0]
