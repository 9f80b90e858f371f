"""The cheapest set of tensors that cuts a graph in two: a minimum cut, found as a maximum flow."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

UNLIMITED = 1 << 60
"""More than any set of tensors can cost."""


class FlowNetwork:
    """Vertices of any hashable kind, and edges that may carry so much.

    The flow is found along shortest augmenting paths (Edmonds and Karp, "Theoretical Improvements in Algorithmic
    Efficiency for Network Flow Problems", 1972).
    """

    def __init__(self) -> None:
        self._left: dict[Hashable, dict[Hashable, int]] = {}

    def connect(self, start: Hashable, end: Hashable, capacity: int) -> None:
        """Adds an edge, or capacity to one that is there."""
        edges = self._left.setdefault(start, {})
        edges[end] = edges.get(end, 0) + capacity
        self._left.setdefault(end, {}).setdefault(start, 0)

    def has(self, start: Hashable, end: Hashable) -> bool:
        """Whether the edge was added."""
        return self._left.get(start, {}).get(end, 0) > 0

    def minimum_cut(self, source: Hashable, sink: Hashable) -> tuple[int, set[Hashable]]:
        """The cost of the cheapest cut, and the vertices on the sink's side of it: the fewest that can be.

        A cost of UNLIMITED or more means that there is no cut.
        """
        cost = 0
        while (path := self._shortest_path(source, sink)) is not None:
            amount = min(self._left[start][end] for start, end in path)
            for start, end in path:
                self._left[start][end] -= amount
                self._left[end][start] += amount
            cost += amount
            if cost >= UNLIMITED:
                break
        return cost, self._reaching(sink)

    def _shortest_path(self, source: Hashable, sink: Hashable) -> list[tuple[Hashable, Hashable]] | None:
        came_from: dict[Hashable, Hashable] = {source: source}
        waiting = deque([source])
        while waiting:
            vertex = waiting.popleft()
            for following, capacity in self._left.get(vertex, {}).items():
                if capacity > 0 and following not in came_from:
                    came_from[following] = vertex
                    waiting.append(following)
        if sink not in came_from:
            return None
        path = []
        while sink != source:
            path.append((came_from[sink], sink))
            sink = came_from[sink]
        return path

    def _reaching(self, sink: Hashable) -> set[Hashable]:
        """Vertices from which more could flow to the sink."""
        reaching = {sink}
        waiting = [sink]
        while waiting:
            vertex = waiting.pop()
            for before in self._left.get(vertex, {}):
                if before not in reaching and self._left[before][vertex] > 0:
                    reaching.add(before)
                    waiting.append(before)
        return reaching
