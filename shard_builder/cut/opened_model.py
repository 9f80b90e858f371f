"""A model as OpenVINO reads it, with its operations numbered as the graph numbers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov

from fleet.errors import ModelError
from shard_builder.cut.graph import ASSIGN, CONSTANT, READ_VALUE, Graph, Node, Tensor
from shard_builder.cut.layers import State
from shard_builder.cut.source_form import (
    KNOWN_INPUTS,
    LOGITS_OUTPUT,
    TOKEN_INPUT,
    bring_into_form,
    output_names,
    port_name,
)

EMBEDDING_OUTPUTS = ("last_hidden_state", "token_embeddings", "sentence_embedding", "pooler_output")
"""What exporters call the outputs of models that are exported for feature extraction."""


@dataclass(frozen=True)
class OpenedModel:
    """``operations[i]`` is what ``graph.nodes[i]`` stands for."""

    model: ov.Model
    operations: tuple[Any, ...]
    graph: Graph
    notes: tuple[str, ...] = ()
    """What was changed when it was read."""

    def parameters(self) -> dict[str, int]:
        """The model's inputs by the name that callers use."""
        return {
            port_name(operation.output(0)): number
            for number, operation in enumerate(self.operations)
            if operation.get_type_name() == "Parameter"
        }


def open_model(core: ov.Core, graph_file: Path) -> OpenedModel:
    """Reads an IR and makes it stateful if it is not; its weights stay in the file, which is mapped.

    Raises:
        ModelError: OpenVINO cannot read it or make it stateful.
    """
    try:
        model = core.read_model(graph_file)
    except RuntimeError as error:
        raise ModelError(f"OpenVINO cannot read {graph_file}: {plain_reason(error)}.") from None
    try:
        notes = bring_into_form(model)
    except RuntimeError as error:
        raise ModelError(f"OpenVINO cannot make {graph_file} stateful: {plain_reason(error)}.") from None
    operations = tuple(model.get_ordered_ops())
    return OpenedModel(model, operations, Graph(tuple(_nodes(operations))), notes)


def plain_reason(error: Exception) -> str:
    """The last sentence of an OpenVINO error, without the places in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Exception from", "While validating"))]
    text = kept[-1] if kept else type(error).__name__
    return text.rstrip(".! \n")[:300]


def language_model_ports(opened: OpenedModel, where: Path) -> tuple[int, Tensor]:
    """The node of the token input and the tensor of the logits.

    Raises:
        ModelError: the model is not a language model that Paceline can feed.
    """
    parameters = opened.parameters()
    if TOKEN_INPUT not in parameters:
        names = ", ".join(sorted(parameters)) or "none"
        raise ModelError(f"{where} is not a language model: it has no input '{TOKEN_INPUT}' (its inputs: {names}).")
    unknown = sorted(set(parameters) - set(KNOWN_INPUTS))
    if unknown:
        past = any("past" in name for name in unknown)
        hint = "no output is what becomes of it; export it with states" if past else "a pipeline cannot feed it"
        raise ModelError(f"{where} has an input '{unknown[0]}' besides {', '.join(KNOWN_INPUTS)}; {hint}.")
    shape = opened.operations[parameters[TOKEN_INPUT]].get_output_partial_shape(0)
    if shape.rank.is_static:
        for dimension, what in zip(shape, ("a batch", "a number of tokens"), strict=False):
            if dimension.is_static:
                raise ModelError(
                    f"{where} is made for {what} of {dimension.get_length()} alone; export it with dynamic shapes."
                )
    results = [number for number, node in enumerate(opened.graph.nodes) if node.kind == "Result"]
    named = [number for number in results if _named(opened, number, LOGITS_OUTPUT)]
    chosen = named if named else results
    embeddings = sorted(name for number in results for name in EMBEDDING_OUTPUTS if _named(opened, number, name))
    if embeddings and not named:
        raise ModelError(f"{where} is an embedding model: it gives '{embeddings[0]}' and no logits.")
    if len(chosen) != 1:
        raise ModelError(f"{where} is not a language model: it has {len(results)} outputs and none named 'logits'.")
    source, port = opened.graph.nodes[chosen[0]].inputs[0]
    return parameters[TOKEN_INPUT], Tensor(source, port)


def _named(opened: OpenedModel, result: int, name: str) -> bool:
    return name in output_names(opened.operations[result])


def _nodes(operations: Sequence[Any]) -> list[Node]:
    numbers = {operation.get_name(): number for number, operation in enumerate(operations)}
    nodes = []
    for operation in operations:
        kind = operation.get_type_name()
        inputs = []
        for connection in operation.inputs():
            source = connection.get_source_output()
            inputs.append((numbers[source.get_node().get_name()], source.get_index()))
        variable = str(operation.get_attributes()["variable_id"]) if kind in (READ_VALUE, ASSIGN) else ""
        size = operation.get_byte_size() if kind == CONSTANT else 0
        nodes.append(Node(kind, tuple(inputs), variable, size, operation.get_friendly_name()))
    return nodes


@dataclass(frozen=True)
class CachePattern:
    """How a key or value cache grows: ReadValue, perhaps a Gather by beam, Concat of past and new, Assign.

    ``gather`` is None where the model does not reorder by beam. Axes are those of the cache tensor.
    """

    state: State
    gather: int | None
    concat: int
    past_axis: int
    batch_axis: int
    elements_per_token: int
    """Numbers that one token of one sequence adds."""


def cache_pattern(opened: OpenedModel, state: State) -> CachePattern | None:
    """The pattern of a key or value cache; None for a state that does not grow with the tokens."""
    nodes = opened.graph.nodes
    concat = nodes[state.assign].inputs[0][0]
    while nodes[concat].kind == "Convert":
        concat = nodes[concat].inputs[0][0]
    if nodes[concat].kind != "Concat" or len(nodes[concat].inputs) != 2:
        return None
    gather = None
    past = nodes[concat].inputs[0][0]
    while past != state.read:
        if nodes[past].kind == "Gather" and gather is None:
            gather = past
        elif nodes[past].kind != "Convert":
            return None
        past = nodes[past].inputs[0][0]
    shape = opened.operations[state.read].get_output_partial_shape(0)
    rank = len(shape)
    past_axis = int(opened.operations[concat].get_attributes()["axis"]) % rank
    dynamic = [axis for axis in range(rank) if shape[axis].is_dynamic and axis != past_axis]
    batch_axis = dynamic[0] if dynamic else 0
    elements = 1
    for axis in range(rank):
        if axis not in (past_axis, batch_axis):
            if shape[axis].is_dynamic:
                return None
            elements *= shape[axis].get_length()
    return CachePattern(state, gather, concat, past_axis, batch_axis, elements)
