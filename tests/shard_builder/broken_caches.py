"""Graphs whose caches break one rule of the fusions each: changes to a decoder of two layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from tests.shard_builder.conftest import HEAD_SIZE, HEADS

ATTENTION = "ScaledDotProductAttention"


def integers(*values: int) -> Any:
    return ops.constant(np.array(values, dtype=np.int64))


class Caches:
    """The caches of a model, by the names of their states: ``k0``, ``v0``, ``k1``, ``v1``."""

    def __init__(self, model: ov.Model) -> None:
        self.model = model

    def of_kind(self, kind: str) -> list[Any]:
        return [operation for operation in self.model.get_ordered_ops() if operation.get_type_name() == kind]

    def read(self, state: str = "k0") -> Any:
        return next(one for one in self.of_kind("ReadValue") if one.get_attributes()["variable_id"] == state)

    def assign(self, state: str = "k0") -> Any:
        return next(one for one in self.of_kind("Assign") if one.get_attributes()["variable_id"] == state)

    def gather(self, state: str = "k0") -> Any:
        readers = (target.get_node() for target in self.read(state).output(0).get_target_inputs())
        return next(reader for reader in readers if reader.get_type_name() == "Gather")

    def concat(self, state: str = "k0") -> Any:
        return self.assign(state).input_value(0).get_node()

    def beam_idx(self) -> Any:
        return next(one for one in self.model.get_parameters() if "beam_idx" in one.output(0).get_names())

    def add_input(self, shape: list[int], element_type: ov.Type) -> Any:
        parameter = ops.parameter(shape, element_type, name="added")
        parameter.output(0).get_tensor().set_names({"added"})
        self.model.add_parameters([parameter])
        return parameter

    def add_output(self, operation: Any) -> None:
        result = ops.result(operation)
        result.set_friendly_name("added_output")
        self.model.add_results([result])

    def reorder_by(self, indices: Any, states: Iterable[str] = ("k0", "v0", "k1", "v1")) -> None:
        for state in states:
            self.gather(state).input(1).replace_source_output(indices.output(0))

    def insert(self, source: Any, kind: str, change: Callable[[Any], Any]) -> None:
        """Puts something between an operation and those of its readers that are of a kind."""
        targets = [one for one in source.output(0).get_target_inputs() if one.get_node().get_type_name() == kind]
        assert targets
        changed = change(source)
        for target in targets:
            target.replace_source_output(changed.output(0))

    def replace(self, old: Any, new: Any) -> None:
        for target in list(old.output(0).get_target_inputs()):
            target.replace_source_output(new.output(0))

    def keep_as(self, state: str, element_type: str) -> None:
        """Keeps a cache in another element type than it grows in."""
        read, assign = self.read(state), self.assign(state)
        dtype = {"f16": np.float16}[element_type]
        start = ops.convert(read.input_value(0), element_type)
        kept = ops.read_value(start, f"{state}_{element_type}", dtype, [-1, HEADS, -1, HEAD_SIZE])
        self.replace(read, ops.convert(kept, "f32"))
        stored = ops.assign(ops.convert(assign.input_value(0), element_type), f"{state}_{element_type}")
        sinks = [sink for sink in self.model.get_sinks() if sink.get_name() != assign.get_name()]
        self.model = ov.Model(self.model.get_results(), [*sinks, stored], self.model.get_parameters(), "tiny")


def no_gather(caches: Caches) -> None:
    caches.replace(caches.gather(), caches.read())


def not_initialised(caches: Caches) -> None:
    caches.read().set_arguments([])


def swapped_variables(caches: Caches) -> None:
    first, second = caches.assign("k0"), caches.assign("k1")
    sources = first.input_value(0), second.input_value(0)
    first.input(0).replace_source_output(sources[1])
    second.input(0).replace_source_output(sources[0])


def read_by_another(caches: Caches) -> None:
    caches.add_output(ops.relu(caches.read()))


def gathered_twice(caches: Caches) -> None:
    caches.add_output(ops.relu(ops.gather(caches.read(), integers(0), integers(0))))


def gather_read_twice(caches: Caches) -> None:
    caches.add_output(ops.relu(caches.gather()))


def axis_from_input(caches: Caches) -> None:
    caches.gather().input(2).replace_source_output(caches.add_input([], ov.Type.i64).output(0))


def constant_index(caches: Caches) -> None:
    caches.reorder_by(ops.constant(np.zeros(1, dtype=np.int32)))


def converted_index(caches: Caches) -> None:
    caches.reorder_by(ops.convert(caches.add_input([-1], ov.Type.i64), "i32"))


def long_index(caches: Caches) -> None:
    caches.reorder_by(caches.add_input([-1], ov.Type.i64))


def second_index_for_a_key(caches: Caches) -> None:
    caches.reorder_by(caches.add_input([-1], ov.Type.i32), ["k1"])


def second_index_for_a_layer(caches: Caches) -> None:
    caches.reorder_by(caches.add_input([-1], ov.Type.i32), ["k1", "v1"])


def gathered_along_heads(caches: Caches) -> None:
    caches.gather().input(2).replace_source_output(integers(1).output(0))


def grown_along_another_axis(caches: Caches) -> None:
    # Keys [batch, tokens, heads, size] beside values [batch, heads, tokens, size].
    read, order = caches.read(), integers(0, 2, 1, 3)
    start = ops.transpose(read.input_value(0), order)
    kept = ops.read_value(start, "k0_turned", np.float32, [-1, -1, HEADS, HEAD_SIZE])
    concat = caches.concat()
    past = ops.gather(kept, caches.beam_idx(), integers(0))
    grown = ops.concat([past, ops.transpose(concat.input_value(1), order)], 1)
    assign = caches.assign()
    caches.replace(concat, ops.transpose(grown, order))
    sinks = [sink for sink in caches.model.get_sinks() if sink.get_name() != assign.get_name()]
    stored = ops.assign(grown, "k0_turned")
    caches.model = ov.Model(caches.model.get_results(), [*sinks, stored], caches.model.get_parameters(), "tiny")


def kept_in_half_precision(caches: Caches) -> None:
    for state in ("k0", "v0"):
        caches.keep_as(state, "f16")


def converted_twice(caches: Caches) -> None:
    caches.insert(caches.read(), "Gather", lambda source: ops.convert(ops.convert(source, "f16"), "f32"))


def converted_after_the_gather(caches: Caches) -> None:
    caches.insert(caches.gather(), "Concat", lambda source: ops.convert(ops.convert(source, "f16"), "f32"))


def sliced_past(caches: Caches) -> None:
    cut = (integers(0), integers(1000), integers(1), integers(2))
    caches.insert(caches.gather(), "Concat", lambda source: ops.slice(source, *cut))


def sliced_present(caches: Caches) -> None:
    cut = (integers(-16), integers(2**31), integers(1), integers(2))
    caches.insert(caches.concat(), "Assign", lambda source: ops.slice(source, *cut))


def turned_past(caches: Caches) -> None:
    order = integers(0, 1, 3, 2)
    caches.insert(caches.gather(), "Concat", lambda source: ops.transpose(ops.transpose(source, order), order))


def three_parts(caches: Caches) -> None:
    concat = caches.concat()
    past, new = concat.input_value(0), concat.input_value(1)
    caches.replace(concat, ops.concat([past, new, new], -2))


def new_first(caches: Caches) -> None:
    concat = caches.concat()
    caches.replace(concat, ops.concat([concat.input_value(1), concat.input_value(0)], -2))


def cache_read_by_another(caches: Caches) -> None:
    caches.add_output(ops.relu(caches.concat()))


def two_shapes(caches: Caches) -> None:
    for element_type in ("i32", "i64"):
        caches.add_output(ops.shape_of(caches.concat("v0"), element_type))


def one_shape_twice(caches: Caches) -> None:
    for offset in (1, 2):
        caches.add_output(ops.add(ops.shape_of(caches.concat("v0"), "i64"), integers(offset)))


def shapes_of_the_gather(caches: Caches) -> None:
    for element_type in ("i32", "i64"):
        caches.add_output(ops.shape_of(caches.gather("v0"), element_type))


def given_out(caches: Caches) -> None:
    caches.add_output(caches.concat())


def decomposed(caches: Caches) -> None:
    attention = caches.of_kind(ATTENTION)[0]
    query, key, value, mask = (attention.input_value(port) for port in range(4))
    scores = ops.multiply(ops.matmul(query, key, False, True), ops.constant(np.float32(HEAD_SIZE**-0.5)))
    weights = ops.softmax(ops.add(scores, mask), -1)
    caches.replace(attention, ops.matmul(weights, value, False, False))


def changed_before_attention(caches: Caches) -> None:
    caches.insert(caches.concat(), ATTENTION, ops.relu)


def repeat(caches: Caches, times: int) -> list[Any]:
    """Repeats heads as exporters do, and the query's with them; the last steps."""
    found = []
    for state in ("k0", "v0"):
        target = ops.constant(np.array([1, 1, times, 1, 1], dtype=np.int64))

        def change(source: Any, target: Any = target) -> Any:
            wide = ops.broadcast(ops.unsqueeze(source, integers(2)), target, broadcast_spec="BIDIRECTIONAL")
            found.append(ops.reshape(wide, integers(0, HEADS * times, -1, HEAD_SIZE), True))
            return found[-1]

        caches.insert(caches.concat(state), ATTENTION, change)
    attention = caches.of_kind(ATTENTION)[0]
    query = attention.input_value(0)
    attention.input(0).replace_source_output(ops.concat([query] * times, 1).output(0))
    order = integers(*range(HEADS))
    caches.insert(attention, "Transpose", lambda source: ops.gather(source, order, integers(1)))
    return found


def grouped(caches: Caches) -> None:
    repeat(caches, 2)


def grouped_and_read_by_another(caches: Caches) -> None:
    for step in repeat(caches, 2):
        caches.add_output(ops.relu(step))


def repeated_once(caches: Caches) -> None:
    repeat(caches, 1)


def turned_keys_and_values(caches: Caches) -> None:
    """Transposed as the query is, but between that and the attention lies something else."""
    attention = caches.of_kind(ATTENTION)[0]
    for port in (1, 2):
        turned = ops.transpose(attention.input_value(port), integers(0, 2, 1, 3))
        attention.input(port).replace_source_output(turned.output(0))
    attention.input(0).replace_source_output(ops.relu(attention.input_value(0)).output(0))
