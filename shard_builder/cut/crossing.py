"""The tensors that cross a cut: the residual stream, and what runs beside it to later layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleet.errors import ModelError
from shard_builder.cut.flow import UNLIMITED, FlowNetwork
from shard_builder.cut.graph import SHAPE_OF, Tensor
from shard_builder.cut.layers import LayerMap
from shard_builder.cut.parts import Need, Parts, find_need

Width = Callable[[Tensor], int | None]
"""Numbers per token of a tensor; None where it is not of a form that can be carried to another stage."""
_SOURCE, _SINK = "source", "sink"


def crossing_tensors(layers: LayerMap, parts: Parts, layer: int, width: Width) -> tuple[Tensor, ...]:
    """What the layers from ``layer`` on need of the earlier ones: the stream first, then the rest in graph order.

    Of what runs beside the stream, the narrowest set of tensors is taken; what follows from that without large
    constants is computed again behind the cut.

    Raises:
        ModelError: a tensor that they need cannot be carried, which is named.
    """
    entry = layers.entries[layer].node
    stream = [Tensor(entry, port) for port in sorted(layers.graph.data_ports(entry, layers.varying))]
    targets = [layers.logits.node, *(state.assign for group in layers.states[layer:] for state in group)]
    need = find_need(layers, targets, frozenset(stream))
    impossible = [tensor for tensor in stream if width(tensor) is None]
    if impossible:
        raise _refusal(layers, layer, impossible)
    if not need.strays:
        return tuple(stream)
    cost, behind = _network(layers, parts, layer, need, width).minimum_cut(_SOURCE, _SINK)
    if cost >= UNLIMITED:
        raise _refusal(layers, layer, [tensor for tensor in _read_directly(layers, need) if width(tensor) is None])
    beside = [vertex for vertex in behind if isinstance(vertex, Tensor) and vertex.node not in behind]
    return (*stream, *sorted(beside))


def _refusal(layers: LayerMap, layer: int, tensors: Sequence[Tensor]) -> ModelError:
    names = ", ".join(f"'{layers.graph.tensor_name(tensor)}'" for tensor in tensors[:3])
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return ModelError(
        f"The model cannot be cut before layer {layer}: what follows needs {names}{more} of earlier layers, which is "
        "not of the form [batch, sequence, ...]."
    )


def _network(layers: LayerMap, parts: Parts, layer: int, need: Need, width: Width) -> FlowNetwork:
    """Strays, the tensors that leave them, and what it costs to carry each."""
    graph = layers.graph
    network = FlowNetwork()
    for number in sorted(need.strays):
        anchor = parts.anchored.get(number)
        if number == layers.token_input or number in layers.stateful or (anchor is not None and anchor < layer):
            network.connect(_SOURCE, number, UNLIMITED)
        elif anchor is not None:
            network.connect(number, _SINK, UNLIMITED)
        for consumer, port in graph.consumers[number]:
            if graph.nodes[consumer].kind == SHAPE_OF or not (consumer in need.strays or consumer in need.nodes):
                continue
            tensor = Tensor(number, port)
            if not network.has(number, tensor):
                cost = width(tensor)
                network.connect(number, tensor, UNLIMITED if cost is None else cost)
            network.connect(tensor, consumer if consumer in need.strays else _SINK, UNLIMITED)
    return network


def _read_directly(layers: LayerMap, need: Need) -> list[Tensor]:
    """Tensors of strays that the layers behind the cut read themselves."""
    return [
        Tensor(number, port)
        for number in sorted(need.strays)
        for port in sorted(layers.graph.data_ports(number, need.nodes))
    ]
