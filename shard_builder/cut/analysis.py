"""Puts together what is known of a model before anything is written: layers, caches, runs, and the plan of a cut."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import openvino as ov

from fleet.errors import ModelError
from shard_builder.anonymous_memory import AnonymousMemory
from shard_builder.cut.crossing import crossing_tensors
from shard_builder.cut.crossing_form import CrossingForm, CrossingForms
from shard_builder.cut.graph import Tensor
from shard_builder.cut.layers import LayerMap, State, describe_entangled, find_layers, layers_exit
from shard_builder.cut.opened_model import OpenedModel, cache_pattern, language_model_ports, open_model
from shard_builder.cut.parts import Parts, find_parts
from shard_builder.cut.shapes import Dimension, probe
from shard_builder.cut.sliding_window import find_sliding_window
from shard_builder.cut.stage_plan import StagePlan, plan_stage
from shard_builder.cut.step_switch import find_step_switch
from shard_builder.cut.surgery import head_entry
from shard_builder.sources.description import Description, describe
from shard_builder.sources.tokenizer_files import check_vocabulary
from shard_builder.sources.ways_in import Source
from shard_builder.weights import RunLayout, find_runs


@dataclass(frozen=True)
class Analysis:
    """A whole model, looked at."""

    source: Source
    opened: OpenedModel
    layers: LayerMap
    parts: Parts
    hidden_size: int
    vocabulary_size: int
    runs: tuple[RunLayout, ...]
    kv_elements_per_token: tuple[int, ...]
    """Per layer."""
    step_bytes_per_token: int
    description: Description
    sliding_window: int
    """Tokens of the widest window that a layer looks through; 0: every layer sees the whole context."""
    step_switch_tokens: int
    """Position from which on a step is computed otherwise; 0: there is none."""

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
    hidden_size = _hidden_size(opened, layers)
    vocabulary_size = _static_last_dimension(opened, logits, "logits")
    check_vocabulary(source.tokenizer_folder, vocabulary_size, source.folder)
    elements = []
    for group in layers.states:
        patterns = [cache_pattern(opened, state) for state in group]
        elements.append(sum(pattern.elements_per_token for pattern in patterns if pattern is not None))
    description = describe(source)
    states = [state for group in layers.states for state in group]
    window = find_sliding_window(core, source.graph, states, description.context_tokens, description.sliding_window)
    parts = find_parts(layers, layers_exit(layers, head_entry(opened, layers, hidden_size)))
    memory = AnonymousMemory(opened.operations, opened.graph, parts.readers)
    runs = find_runs(opened.operations, parts.readers)
    return Analysis(
        source=source,
        opened=opened,
        layers=layers,
        parts=parts,
        hidden_size=hidden_size,
        vocabulary_size=vocabulary_size,
        runs=tuple(dataclasses.replace(run, anonymous_bytes=memory.of_run(run)) for run in runs),
        kv_elements_per_token=tuple(elements),
        step_bytes_per_token=memory.step_bytes_per_token(),
        description=description,
        sliding_window=window,
        step_switch_tokens=find_step_switch(core, opened, source.graph),
    )


def _hidden_size(opened: OpenedModel, layers: LayerMap) -> int:
    """The width of the first tensor of the form [batch, sequence, width] that enters a layer or leaves the last."""
    for node in (*(entry.node for entry in layers.entries), *reversed(layers.chain[:-1])):
        shape = opened.operations[node].get_output_partial_shape(0)
        if shape.rank.is_static and len(shape) == 3 and shape[2].is_static:
            width: int = shape[2].get_length()
            return width
    raise ModelError(
        "The model's hidden state is not of the form [batch, sequence, width]; it cannot be cut."
        f"{describe_entangled(layers)}"
    )


def _static_last_dimension(opened: OpenedModel, tensor: Tensor, what: str) -> int:
    shape = opened.operations[tensor.node].get_output_partial_shape(tensor.port)
    if shape.rank.is_dynamic or len(shape) != 3 or shape[2].is_dynamic:
        raise ModelError(f"The model's {what} is not of the form [batch, sequence, width]; it cannot be cut.")
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
    """The stages of a cut, how the tensors cross, and what the dimensions mean that the stages have to rebuild."""

    stages: tuple[StagePlan, ...]
    forms: dict[Tensor, CrossingForm]
    dimensions: dict[Tensor, tuple[Dimension, ...]]

    @property
    def widest(self) -> int:
        """Most numbers per token that enter any stage."""
        return max(sum(form.width for form in self.forms_into(stage)) for stage in range(len(self.stages)))

    def forms_into(self, stage: int) -> tuple[CrossingForm, ...]:
        """What enters a stage side by side; empty for the first."""
        return tuple(self.forms[tensor] for tensor in self.stages[stage].sources)


def plan_cut(core: ov.Core, analysis: Analysis, boundaries: Sequence[int]) -> CutPlan:
    """Plans every stage.

    Raises:
        ModelError: the model cannot be cut there.
    """
    layers = analysis.layers
    crossings: list[tuple[Tensor, ...]] = [()]
    forms: dict[Tensor, CrossingForm] = {}
    if len(boundaries) > 2:
        found = CrossingForms(
            analysis.opened, lambda: open_model(core, analysis.source.graph), analysis.states, layers.caches
        )
        for layer in boundaries[1:-1]:
            crossings.append(crossing_tensors(layers, analysis.parts, layer, found.width))
            forms |= {tensor: form for tensor in crossings[-1] if (form := found.form(tensor)) is not None}
    crossings.append(())
    stages = tuple(
        plan_stage(layers, first, end, crossings[number], crossings[number + 1])
        for number, (first, end) in enumerate(itertools.pairwise(boundaries))
    )
    wanted = {Tensor(*layers.graph.nodes[shape].inputs[0]) for stage in stages for shape in stage.foreign_shapes}
    return CutPlan(stages, forms, probe(core, analysis.source.graph, analysis.states, sorted(wanted)))
