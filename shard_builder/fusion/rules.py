"""The rules that the CPU and GPU plugins' attention fusions set a shard's graph, each by a name of its own.

The CPU plugin fuses attention with its cache in ``StatefulSDPAFusion`` (stateful_sdpa_fusion.cpp), the GPU plugin in
``KVCacheFusion`` (kv_cache_fusion.cpp), ``IndirectKVCache`` (indirect_kv_cache.cpp) and ``KVCacheCompression``
(kv_cache_compression.cpp). A graph that breaks one of their patterns still gives right results, only many times slower
at long contexts, which is why each rule says what it serves and which node breaks it.

The CPU rules were compared with what OpenVINO 2026.4.1 compiles; those for the GPU follow its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fleet.manifest import FusionFault, FusionPlugin, Stage
from shard_builder.cut.opened_model import OpenedModel
from shard_builder.fusion import attention_rules, cache_rules
from shard_builder.fusion.cache_paths import Broken, CacheGraph, CachePath

_BOTH: tuple[FusionPlugin, ...] = ("CPU", "GPU")
_CPU: tuple[FusionPlugin, ...] = ("CPU",)
_GPU: tuple[FusionPlugin, ...] = ("GPU",)


@dataclass(frozen=True)
class Rule:
    """One rule. ``serves`` says what is lost without it."""

    name: str
    plugins: tuple[FusionPlugin, ...]
    serves: str
    check: Callable[[CacheGraph, CachePath], Broken]


def check_fusion(opened: OpenedModel) -> tuple[FusionFault, ...]:
    """Every rule that a shard's graph breaks, cache by cache. States that do not grow are not judged.

    What a cache lacks (its Gather, its attention) is one fault, not one for every rule on what it should be like.
    """
    graph = CacheGraph(opened)
    faults: dict[FusionFault, None] = {}
    for path in graph.paths:
        for rule in RULES:
            for number, reason in rule.check(graph, path):
                faults[FusionFault(rule.name, graph.name(number), reason, rule.plugins)] = None
    return tuple(faults)


def explain_unfused(stages: Iterable[Stage]) -> list[str]:
    """A sentence for every stage whose attention the CPU plugin does not fuse although no rule of it is broken."""
    return [
        f"The CPU plugin fuses the attention of {stage.fused_attention} of {stage.expected_attention} layers of stage "
        f"{stage.stage} with the cache, for no reason that its graph shows; the others are slow at long contexts."
        for stage in stages
        if stage.fused_attention < stage.expected_attention
        and not any("CPU" in fault.plugins for fault in stage.fusion_faults)
    ]


RULES = (
    Rule(
        "read-value-initialised",
        _BOTH,
        "A ReadValue without a value to start from compiles, or not even that, and fails at the first inference.",
        cache_rules.read_value_initialised,
    ),
    Rule(
        "same-variable", _BOTH, "Both fusions compare the variable of ReadValue and Assign.", cache_rules.same_variable
    ),
    Rule(
        "read-once",
        _BOTH,
        "A fused cache has one reader; a second ReadValue of the variable would read what is no longer stored.",
        cache_rules.read_once,
    ),
    Rule(
        "read-value-consumers",
        _CPU,
        "StatefulSDPAFusion takes a ReadValue that only Gather, Convert, ShapeOf and attention read.",
        cache_rules.read_value_consumers,
    ),
    Rule(
        "beam-gather-present",
        _BOTH,
        "Without the Gather StatefulSDPAFusion does not match, and on the GPU IndirectSDPAOpt and with it the "
        "compression of the cache.",
        cache_rules.beam_gather_present,
    ),
    Rule(
        "one-gather-per-cache",
        _BOTH,
        "The CPU plugin fuses the attention all the same and then fails at the first inference (null input states); on "
        "the GPU a second Gather would copy the whole cache in every step.",
        cache_rules.one_gather_per_cache,
    ),
    Rule(
        "gather-single-consumer",
        _CPU,
        "StatefulSDPAFusion takes the Gather away, so only the Concat may read it.",
        cache_rules.gather_single_consumer,
    ),
    Rule(
        "beam-gather-axis-constant",
        _BOTH,
        "StatefulSDPAFusion and IndirectSDPAOpt match a constant axis, the latter 0 or 1.",
        cache_rules.beam_gather_axis_constant,
    ),
    Rule(
        "beam-index-is-parameter",
        _GPU,
        "KVCacheFusion and IndirectSDPAOpt match a Parameter as the Gather's indices, without anything between.",
        cache_rules.beam_index_is_parameter,
    ),
    Rule(
        "beam-index-is-i32-vector",
        _BOTH,
        "StatefulSDPAFusion matches i32 indices of rank 1; the GPU's beam table holds i32.",
        cache_rules.beam_index_is_i32_vector,
    ),
    Rule(
        "one-beam-index-per-attention",
        _BOTH,
        "The fused attention has one beam table for keys and values.",
        attention_rules.one_beam_index_per_attention,
    ),
    Rule(
        "one-beam-index-per-shard",
        _GPU,
        "A stage feeds one beam_idx; IndirectKVCache hands it to every cache.",
        cache_rules.one_beam_index_per_shard,
    ),
    Rule(
        "equal-gather-axes",
        _BOTH,
        "IndirectSDPAOpt asserts that keys and values are reordered along one axis; StatefulSDPAFusion matches that.",
        attention_rules.equal_gather_axes,
    ),
    Rule(
        "equal-concat-axes",
        _CPU,
        "StatefulSDPAFusion matches one axis for keys and values.",
        attention_rules.equal_concat_axes,
    ),
    Rule(
        "no-convert-between-cache-and-gather",
        _BOTH,
        "IndirectSDPAOpt matches a Gather that reads the ReadValue directly; the CPU plugin does not fuse with a "
        "Convert there either.",
        cache_rules.no_convert_between_cache_and_gather,
    ),
    Rule(
        "no-convert-between-gather-and-concat",
        _BOTH,
        "StatefulSDPAFusion and IndirectSDPAOpt match a Concat that reads the Gather directly.",
        cache_rules.no_convert_between_gather_and_concat,
    ),
    Rule(
        "cache-type-kept",
        _BOTH,
        "KVCacheFusion takes a Concat of the same element type as the ReadValue; the CPU plugin fuses no other either.",
        cache_rules.cache_type_kept,
    ),
    Rule(
        "no-slice-in-cache",
        _BOTH,
        "With a Slice StatefulSDPAFusion does not match; on the GPU trimming and the beam table exclude each other.",
        cache_rules.no_slice_in_cache,
    ),
    Rule(
        "only-gather-in-cache",
        _BOTH,
        "StatefulSDPAFusion and KVCacheFusion match nothing but Convert and Gather on the way of a cache.",
        cache_rules.only_gather_in_cache,
    ),
    Rule(
        "concat-of-two",
        _BOTH,
        "StatefulSDPAFusion and KVCacheFusion match past and new, nothing else.",
        cache_rules.concat_of_two,
    ),
    Rule("past-first", _BOTH, "StatefulSDPAFusion and KVCacheFusion append to the past.", cache_rules.past_first),
    Rule(
        "concat-consumers",
        _BOTH,
        "StatefulSDPAFusion takes a Concat that the Assign and one attention read; IndirectSDPAOpt rewires one reader.",
        attention_rules.concat_consumers,
    ),
    Rule(
        "one-shape-of-concat",
        _CPU,
        "StatefulSDPAFusion allows one ShapeOf on the Concat.",
        attention_rules.one_shape_of_concat,
    ),
    Rule(
        "kv-not-exposed",
        _BOTH,
        "A cache that leaves the model has to be a whole tensor in every step: the fusions append in place.",
        attention_rules.kv_not_exposed,
    ),
    Rule(
        "attention-is-sdpa",
        _BOTH,
        "StatefulSDPAFusion, IndirectSDPAOpt and KVCacheCompression start from ScaledDotProductAttention.",
        attention_rules.attention_is_sdpa,
    ),
    Rule(
        "only-repeat-before-attention",
        _BOTH,
        "Between cache and attention the fusions see through the repetition of grouped heads and transposes alone.",
        attention_rules.only_repeat_before_attention,
    ),
    Rule(
        "repeat-single-consumer",
        _BOTH,
        "The repetition of grouped heads is folded into the attention only where nothing else reads a step of it.",
        attention_rules.repeat_single_consumer,
    ),
    Rule(
        "repeat-is-complete",
        _CPU,
        "StatefulSDPAFusion knows the repetition as Unsqueeze (or Reshape), Broadcast (or Multiply) and Reshape.",
        attention_rules.repeat_is_complete,
    ),
    Rule(
        "equal-transposes",
        _CPU,
        "StatefulSDPAFusion takes transposes into the attention where query, key and value have the same.",
        attention_rules.equal_transposes,
    ),
)
"""All rules, in the order in which a cache meets them."""
