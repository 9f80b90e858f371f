"""Puts together what is known of a model before anything is written: layers, caches, runs, and the plan of a cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import openvino as ov

from fleet.errors import ModelError
from shard_builder.description import Description, describe
from shard_builder.layers import (
    LayerMap,
    StagePlan,
    State,
    Tensor,
    describe_entangled,
    find_layers,
    layers_exit,
    plan_stage,
    readers,
)
from shard_builder.opened_model import OpenedModel, cache_pattern, language_model_ports, open_model
from shard_builder.shapes import BATCH, SEQUENCE, Dimension, probe
from shard_builder.sources import Source
from shard_builder.surgery import head_entry
from shard_builder.weights import RunLayout, find_runs


@dataclass(frozen=True)
class Analysis:
    """A whole model, looked at."""

    source: Source
    opened: OpenedModel
    layers: LayerMap
    hidden_size: int
    vocabulary_size: int
    runs: tuple[RunLayout, ...]
    kv_elements_per_token: tuple[int, ...]
    """Per layer."""
    description: Description

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Weight bytes per layer, without what it shares with other parts."""
        count = len(self.layers.entries)
        found = [0] * count
        for run in self.runs:
            kind, layer = run.kind(count)
            if kind == "layer" and layer is not None:
                found[layer] += run.bytes
        return tuple(found)

    @property
    def states(self) -> list[State]:
        """All variables of the model."""
        return [state for group in self.layers.states for state in group]


def analyse(core: ov.Core, source: Source) -> Analysis:
    """Finds the layers and runs of a model.

    Raises:
        ModelError: it is not a model that can be cut; the text says why.
    """
    opened = open_model(core, source.graph)
    token_input, logits = language_model_ports(opened, source.folder)
    layers = find_layers(opened.graph, token_input, logits)
    hidden_size = _static_last_dimension(opened, layers.entries[0], "hidden state", describe_entangled(layers))
    vocabulary_size = _static_last_dimension(opened, logits, "logits")
    elements = []
    for group in layers.states:
        patterns = [cache_pattern(opened, state) for state in group]
        elements.append(sum(pattern.elements_per_token for pattern in patterns if pattern is not None))
    exit_node = layers_exit(layers, head_entry(opened, layers, hidden_size))
    return Analysis(
        source=source,
        opened=opened,
        layers=layers,
        hidden_size=hidden_size,
        vocabulary_size=vocabulary_size,
        runs=find_runs(opened.operations, readers(layers, exit_node)),
        kv_elements_per_token=tuple(elements),
        description=describe(source),
    )


def _static_last_dimension(opened: OpenedModel, tensor: Tensor, what: str, remark: str = "") -> int:
    shape = opened.operations[tensor.node].get_output_partial_shape(max(tensor.port, 0))
    if shape.rank.is_dynamic or len(shape) != 3 or shape[2].is_dynamic:
        raise ModelError(f"The model's {what} is not of the form [batch, sequence, width]; it cannot be cut.{remark}")
    width: int = shape[2].get_length()
    return width


def choose_boundaries(
    layer_count: int, stages: int | None, cuts: Sequence[int] | None, remark: str = ""
) -> tuple[int, ...]:
    """The first layer of every stage, and the number of layers at the end.

    With ``stages`` the layers are shared out evenly, earlier stages taking the odd ones. ``remark`` is added to what is
    said where the model has too few layers.

    Raises:
        ModelError: neither or both are given, there are more stages than layers, or the cuts are not in order.
    """
    if (stages is None) == (cuts is None):
        raise ModelError("Say either how many stages to make or where to cut, not both.")
    if stages is not None:
        if not 1 <= stages <= layer_count:
            raise ModelError(f"The model has {_layers(layer_count)}, so it cannot be cut into {stages} stages.{remark}")
        share, odd = divmod(layer_count, stages)
        return tuple(stage * share + min(stage, odd) for stage in range(stages + 1))
    boundaries = (0, *(cuts or ()), layer_count)
    if any(one >= two for one, two in itertools.pairwise(boundaries)):
        listed = ", ".join(str(cut) for cut in cuts or ())
        raise ModelError(
            f"The cuts {listed} must rise and lie between 1 and {layer_count - 1}: the model has "
            f"{_layers(layer_count)}.{remark}"
        )
    return boundaries


def _layers(count: int) -> str:
    return f"{count} layers" if count > 1 else "one layer"


@dataclass(frozen=True)
class CutPlan:
    """The stages of a cut and what the dimensions mean that they have to rebuild."""

    stages: tuple[StagePlan, ...]
    dimensions: dict[Tensor, tuple[Dimension, ...]]


def plan_cut(core: ov.Core, analysis: Analysis, boundaries: Sequence[int]) -> CutPlan:
    """Plans every stage.

    Raises:
        ModelError: the model cannot be cut there.
    """
    layers = analysis.layers
    stages = tuple(plan_stage(layers, first, end) for first, end in itertools.pairwise(boundaries))
    entering = layers.entries[0]
    wanted = {Tensor(*layers.graph.nodes[shape].inputs[0]) for stage in stages for shape in stage.foreign_shapes}
    if len(stages) > 1:
        wanted.add(entering)
    tensors = sorted(wanted, key=lambda tensor: (tensor.node, tensor.port))
    dimensions = probe(core, analysis.source.graph, analysis.states, tensors)
    if len(stages) > 1 and [dimension.names for dimension in dimensions[entering]] != [(BATCH,), (SEQUENCE,), ()]:
        raise ModelError("The model's hidden state is not of the form [batch, sequence, width]; it cannot be cut.")
    return CutPlan(stages, dimensions)
