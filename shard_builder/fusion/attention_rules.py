"""Rules on who reads a cache, and on what keys and values of one attention have in common.

Each function yields the nodes that break its rule, with the reason; :mod:`shard_builder.fusion.rules` says what it
serves.
"""

from __future__ import annotations

from shard_builder.cut.graph import SHAPE_OF
from shard_builder.fusion.cache_paths import Broken, CacheGraph, CachePath

KEY_PORT, VALUE_PORT = 1, 2
"""Of ScaledDotProductAttention."""
_REPEATS = tuple(
    (first, second, "Reshape") for first in ("Unsqueeze", "Reshape") for second in ("Broadcast", "Multiply")
)
"""How exporters repeat the heads of grouped attention."""


def _key_beside(graph: CacheGraph, path: CachePath) -> CachePath | None:
    """The key of the attention whose value this cache is."""
    if path.attention is None or path.attention_port != VALUE_PORT:
        return None
    return next((other for other in graph.attentions[path.attention] if other.attention_port == KEY_PORT), None)


def _gathers(graph: CacheGraph, path: CachePath) -> tuple[int, int] | None:
    """The Gathers of the key and of the value of one attention, asked for its value; None where one is missing."""
    key = _key_beside(graph, path)
    first = None if key is None else graph.gather(key)
    second = graph.gather(path)
    return None if first is None or second is None else (first, second)


def one_beam_index_per_attention(graph: CacheGraph, path: CachePath) -> Broken:
    gathers = _gathers(graph, path)
    if gathers is not None and graph.nodes[gathers[0]].inputs[1] != graph.nodes[gathers[1]].inputs[1]:
        yield gathers[1], "it reorders the values by other numbers than the keys of the same attention"


def equal_gather_axes(graph: CacheGraph, path: CachePath) -> Broken:
    gathers = _gathers(graph, path)
    if gathers is None:
        return
    first, second = (graph.constant(gather, 2) for gather in gathers)
    if first is not None and second is not None and first != second:
        yield gathers[1], f"it reorders the values along axis {second[0]} and the keys along axis {first[0]}"


def equal_concat_axes(graph: CacheGraph, path: CachePath) -> Broken:
    key = _key_beside(graph, path)
    if key is not None and graph.axis(key.concat) != graph.axis(path.concat):
        yield (
            path.concat,
            f"the values grow along axis {graph.axis(path.concat)} and the keys along axis {graph.axis(key.concat)}",
        )


def concat_consumers(graph: CacheGraph, path: CachePath) -> Broken:
    on_the_way = {*path.repeat, path.attention, path.obstacle}
    kept = 0
    for number in graph.data_consumers(path.concat):
        if graph.stores(number, path) or graph.nodes[number].kind == "Result":
            continue
        kept += 1
        if kept > 1 or number not in on_the_way:
            yield number, f"it reads the cache '{path.variable}' besides one attention ({graph.nodes[number].kind})"


def one_shape_of_concat(graph: CacheGraph, path: CachePath) -> Broken:
    # Two ShapeOf of one element type are merged into one before the plugin looks.
    types: set[str] = set()
    for number in graph.consumers(path.concat):
        if graph.nodes[number].kind == SHAPE_OF:
            element_type = graph.element_type(number)
            if types and element_type not in types:
                yield number, f"it is a second ShapeOf on the cache '{path.variable}'"
            types.add(element_type)


def kv_not_exposed(graph: CacheGraph, path: CachePath) -> Broken:
    for holder in (path.read, *path.past, path.concat, *path.present, *path.repeat):
        for number in graph.consumers(holder):
            if graph.nodes[number].kind == "Result":
                yield number, f"it gives the cache '{path.variable}' out of the model"


def attention_is_sdpa(graph: CacheGraph, path: CachePath) -> Broken:
    if path.attention is None and (path.obstacle is None or graph.nodes[path.obstacle].kind == "MatMul"):
        what = "nothing" if path.obstacle is None else "an attention of single operations (MatMul)"
        yield path.concat if path.obstacle is None else path.obstacle, f"{what} reads the cache '{path.variable}'"


def only_repeat_before_attention(graph: CacheGraph, path: CachePath) -> Broken:
    if path.obstacle is not None and graph.nodes[path.obstacle].kind != "MatMul":
        kind = graph.nodes[path.obstacle].kind
        yield path.obstacle, f"it lies between the cache '{path.variable}' and its attention ({kind})"


def repeat_single_consumer(graph: CacheGraph, path: CachePath) -> Broken:
    for number in path.repeat:
        for consumer in graph.data_consumers(number)[1:]:
            kind = graph.nodes[consumer].kind
            if kind != "Result":
                yield consumer, f"it reads the repeated heads of '{path.variable}' besides the attention ({kind})"


def repeat_is_complete(graph: CacheGraph, path: CachePath) -> Broken:
    if path.attention is None:
        return
    steps = [number for number in path.repeat if graph.nodes[number].kind != "Transpose"]
    kinds = tuple(graph.nodes[number].kind for number in steps)
    if kinds and kinds not in _REPEATS:
        yield steps[0], f"the cache '{path.variable}' is given another shape before its attention ({', '.join(kinds)})"
    elif kinds and graph.shape(steps[0]) == graph.shape(steps[1]):
        # The plugin takes a repetition by one away, and what is left does not match.
        yield steps[1], f"it repeats the heads of '{path.variable}' once, which is only a change of shape"


def equal_transposes(graph: CacheGraph, path: CachePath) -> Broken:
    key = _key_beside(graph, path)
    if key is None or path.attention is None:
        return
    query, _ = graph.nodes[path.attention].inputs[0]
    orders = [graph.order([query]), graph.order(key.repeat), graph.order(path.repeat)]
    if (orders[1] or orders[2]) and len(set(orders)) > 1:
        yield path.attention, "its query, key and value are not transposed in the same order"
