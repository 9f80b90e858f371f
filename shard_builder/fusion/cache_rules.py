"""Rules on the way of a cache from its ReadValue through the Gather and the Concat to the Assign.

Each function yields the nodes that break its rule, with the reason; :mod:`shard_builder.fusion.rules` says what it
serves.
"""

from __future__ import annotations

from shard_builder.fusion.cache_paths import SLICING_KINDS, Broken, CacheGraph, CachePath


def read_value_initialised(graph: CacheGraph, path: CachePath) -> Broken:
    if not graph.nodes[path.read].inputs:
        yield path.read, f"the state '{path.variable}' has no value to start from"


def same_variable(graph: CacheGraph, path: CachePath) -> Broken:
    read = graph.nodes[path.read].variable
    if read != path.variable:
        yield path.assign, f"what grows from the state '{read}' is stored in the state '{path.variable}'"


def read_once(graph: CacheGraph, path: CachePath) -> Broken:
    for number in graph.reads[path.variable][1:]:
        yield number, f"the state '{path.variable}' is read a second time"


def read_value_consumers(graph: CacheGraph, path: CachePath) -> Broken:
    for number in graph.data_consumers(path.read):
        if graph.nodes[number].kind not in ("Gather", "Convert", "ScaledDotProductAttention", "Concat"):
            yield number, f"it reads the state '{path.variable}' besides the Gather ({graph.nodes[number].kind})"


def beam_gather_present(graph: CacheGraph, path: CachePath) -> Broken:
    if graph.gather(path) is None:
        yield path.read, f"the state '{path.variable}' is not reordered by beam_idx before it grows"


def one_gather_per_cache(graph: CacheGraph, path: CachePath) -> Broken:
    gather = graph.gather(path)
    for holder in (path.read, *path.past):
        for number in graph.data_consumers(holder):
            if graph.nodes[number].kind == "Gather" and number != gather and gather is not None:
                yield number, f"it is a second Gather on the state '{path.variable}'"


def gather_single_consumer(graph: CacheGraph, path: CachePath) -> Broken:
    gather = graph.gather(path)
    if gather is None:
        return
    for number in graph.data_consumers(gather):
        if number != path.concat and number not in path.past and graph.nodes[number].kind != "Gather":
            yield number, f"it reads the reordered state '{path.variable}' besides the Concat"


def beam_gather_axis_constant(graph: CacheGraph, path: CachePath) -> Broken:
    gather = graph.gather(path)
    if gather is None:
        return
    axis = graph.constant(gather, 2)
    if axis is None:
        yield gather, "the axis along which it reorders the cache is not a constant"
    elif len(axis) != 1 or axis[0] not in (0, 1):
        yield gather, f"it reorders the cache along axis {axis}, not along 0 or 1"
    batch_dims = int(graph.opened.operations[gather].get_attributes().get("batch_dims", 0))
    if batch_dims:
        yield gather, f"it reorders with batch_dims {batch_dims} instead of 0"


def beam_index(graph: CacheGraph, gather: int) -> int:
    return graph.nodes[gather].inputs[1][0]


def beam_index_is_parameter(graph: CacheGraph, path: CachePath) -> Broken:
    gather = graph.gather(path)
    if gather is None:
        return
    index = beam_index(graph, gather)
    if graph.nodes[index].kind != "Parameter":
        yield index, f"the cache is reordered by a {graph.nodes[index].kind}, not by an input of the model itself"


def beam_index_is_i32_vector(graph: CacheGraph, path: CachePath) -> Broken:
    gather = graph.gather(path)
    if gather is None:
        return
    index = beam_index(graph, gather)
    operation = graph.opened.operations[index]
    rank = operation.get_output_partial_shape(0).rank
    if graph.element_type(index) != "i32":
        yield index, f"the cache is reordered by {graph.element_type(index)} numbers instead of i32"
    if rank.is_dynamic or rank.get_length() != 1:
        yield index, "the numbers that reorder the cache are not a vector"


def one_beam_index_per_shard(graph: CacheGraph, path: CachePath) -> Broken:
    gather = graph.gather(path)
    others = (graph.gather(other) for other in graph.paths)
    first = next((other for other in others if other is not None), None)
    if gather is not None and first is not None and graph.nodes[gather].inputs[1] != graph.nodes[first].inputs[1]:
        yield gather, "it reorders its cache by other numbers than the first cache of the shard is reordered by"


def no_convert_between_cache_and_gather(graph: CacheGraph, path: CachePath) -> Broken:
    for number in path.past:
        if graph.nodes[number].kind == "Gather":
            return
        if graph.nodes[number].kind == "Convert":
            yield number, f"it converts the state '{path.variable}' before the Gather"


def no_convert_between_gather_and_concat(graph: CacheGraph, path: CachePath) -> Broken:
    gather = graph.gather(path)
    if gather is None:
        return
    for number in path.past[path.past.index(gather) + 1 :]:
        if graph.nodes[number].kind == "Convert":
            yield number, f"it converts the state '{path.variable}' between the Gather and the Concat"


def cache_type_kept(graph: CacheGraph, path: CachePath) -> Broken:
    stored, grown = graph.element_type(path.read), graph.element_type(path.concat)
    if stored != grown:
        yield path.concat, f"the cache grows in {grown} and is kept in {stored}"


def no_slice_in_cache(graph: CacheGraph, path: CachePath) -> Broken:
    for number in (*path.past, *path.present):
        if graph.nodes[number].kind in SLICING_KINDS:
            yield number, f"it cuts out of the state '{path.variable}' or writes into it ({graph.nodes[number].kind})"


def only_gather_in_cache(graph: CacheGraph, path: CachePath) -> Broken:
    for number in (*path.past, *path.present):
        kind = graph.nodes[number].kind
        if kind not in SLICING_KINDS and kind != "Convert" and not (kind == "Gather" and number in path.past):
            yield number, f"it changes the form of the state '{path.variable}' on its way ({kind})"


def concat_of_two(graph: CacheGraph, path: CachePath) -> Broken:
    count = len(graph.nodes[path.concat].inputs)
    if count != 2:
        yield path.concat, f"it puts {count} tensors together instead of past and new"


def past_first(graph: CacheGraph, path: CachePath) -> Broken:
    if path.past_port != 0:
        yield path.concat, "the past is not the first of what it puts together"
