"""The exact search behind the planner: contiguous layers on an ordered choice of nodes. Knows numbers only.

For a bound on the load of a stage, a node is what it can hold: for every layer at which its stage may begin, how far
the stage may reach. Nodes that can hold the same are interchangeable, which keeps the number of sets of nodes small.
The search goes over these sets and finds at which layers each can end. The smallest bound that still reaches the last
layer is found by bisection over the loads that occur.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_NODE_SETS = 5_000
"""With more kinds of nodes than this allows, similar ones are taken for the weakest of them: no budget is ever
exceeded, but a slightly better placement may be missed. Twelve nodes of twelve kinds stay below it."""


@dataclass(frozen=True)
class SearchStage:
    """Layers ``first_layer`` to ``end_layer`` (exclusive) on the node with this index."""

    node: int
    first_layer: int
    end_layer: int


@dataclass(frozen=True)
class _Reach:
    """What a node can hold.

    ``end[first]``: the furthest end, before the last layer's, of a stage that begins at ``first``, or ``first`` itself
    where not even one layer fits. ``closes[first]``: whether the node can hold all that is left.
    """

    end: tuple[int, ...]
    closes: tuple[bool, ...]

    @property
    def has_no_gaps(self) -> bool:
        """Wherever a stage may begin between the first and the last layer, at least one layer fits."""
        return all(end > first for first, end in enumerate(self.end[1:-1], start=1))


class PlacementSearch:
    """Finds placements of ``layers`` layers.

    Args:
        needed_bytes: what a stage (first layer, end layer) needs; grows with the number of layers.
        load: what it takes; grows likewise.
        budgets: bytes of each node.
    """

    def __init__(
        self,
        layers: int,
        needed_bytes: Callable[[int, int], int],
        load: Callable[[int, int], int],
        budgets: Sequence[int],
    ) -> None:
        self._layers = layers
        self._load = load
        self._budgets = tuple(budgets)
        # By first layer: needs of all ends, which grow, so that the furthest end is found by bisection.
        self._needs = [[needed_bytes(first, end) for end in range(first + 1, layers + 1)] for first in range(layers)]
        self._loads = [[load(first, end) for end in range(first + 1, layers + 1)] for first in range(layers)]

    def best(self, *, most_nodes: bool) -> list[SearchStage] | None:
        """The placement with the least load on the most loaded stage among those that use the most (or the fewest)
        nodes possible; None where nothing fits."""
        counts = self._feasible_counts(math.inf)
        if not counts:
            return None
        count = max(counts) if most_nodes else min(counts)
        bounds = sorted({load for loads in self._loads for load in loads})
        best_index = bisect_left(bounds, True, key=lambda bound: count in self._feasible_counts(bound))
        return self._trace(bounds[best_index], count)

    def fits(self) -> bool:
        """Whether any placement fits."""
        return bool(self._feasible_counts(math.inf))

    def single_layer_bytes(self) -> int:
        """The least that a stage of one layer needs."""
        return min(needs[0] for needs in self._needs)

    def _reach(self, budget: int, bound: float) -> _Reach:
        ends = []
        closes = []
        for first in range(self._layers):
            needs, loads = self._needs[first], self._loads[first]
            # The last entry is the stage that ends with the last layer, with all that comes with the head.
            inner = len(needs) - 1
            fitting = min(bisect_left(needs, budget + 1, 0, inner), _upto(loads, bound, inner))
            ends.append(first + fitting)
            closes.append(needs[inner] <= budget and loads[inner] <= bound)
        return _Reach(tuple(ends), tuple(closes))

    def _groups(self, bound: float) -> list[tuple[_Reach, list[int]]]:
        by_reach: dict[_Reach, list[int]] = {}
        for node, budget in enumerate(self._budgets):
            reach = self._reach(budget, bound)
            if any(reach.closes) or any(end > first for first, end in enumerate(reach.end)):
                by_reach.setdefault(reach, []).append(node)
        groups = sorted(by_reach.items(), key=lambda group: sum(group[0].end) + sum(group[0].closes))
        while math.prod(len(nodes) + 1 for _, nodes in groups) > MAX_NODE_SETS:
            distances = [
                sum(right - left for left, right in zip(weaker.end, stronger.end, strict=True))
                for (weaker, _), (stronger, _) in pairwise(groups)
            ]
            nearest = distances.index(min(distances))
            (weaker, some), (stronger, others) = groups[nearest : nearest + 2]
            merged = _Reach(
                tuple(map(min, weaker.end, stronger.end)),
                tuple(left and right for left, right in zip(weaker.closes, stronger.closes, strict=True)),
            )
            groups[nearest : nearest + 2] = [(merged, some + others)]
        return groups

    def _ends_by_set(self, groups: list[tuple[_Reach, list[int]]]) -> dict[tuple[int, ...], int]:
        """For every set of nodes (how many of each group), the layers at which its stages can end, as a bit mask."""
        start = (0,) * len(groups)
        ends = {start: 1}
        frontier = [start]
        gapless = [reach.has_no_gaps for reach, _ in groups]
        while frontier:
            following: dict[tuple[int, ...], int] = {}
            for used in frontier:
                for index, (reach, nodes) in enumerate(groups):
                    if used[index] == len(nodes):
                        continue
                    mask = _extended(ends[used], reach, gapless[index])
                    if mask:
                        larger = (*used[:index], used[index] + 1, *used[index + 1 :])
                        following[larger] = following.get(larger, 0) | mask
            ends.update(following)
            frontier = list(following)
        return ends

    def _feasible_counts(self, bound: float) -> set[int]:
        groups = self._groups(bound)
        counts = set()
        for used, mask in self._ends_by_set(groups).items():
            count = sum(used) + 1
            if count not in counts and any(
                used[index] < len(nodes) and _can_close(mask, reach) for index, (reach, nodes) in enumerate(groups)
            ):
                counts.add(count)
        return counts

    def _trace(self, bound: float, count: int) -> list[SearchStage]:
        groups = self._groups(bound)
        ends = self._ends_by_set(groups)
        used, index, first = next(
            (used, index, first)
            for used, mask in ends.items()
            if sum(used) == count - 1
            for index, (reach, nodes) in enumerate(groups)
            if used[index] < len(nodes)
            for first in range(self._layers)
            if mask >> first & 1 and reach.closes[first]
        )
        stages = [(index, first, self._layers)]
        while first:
            end = first
            used, index, first = next(
                (smaller, index, first)
                for index, (reach, _) in enumerate(groups)
                if used[index]
                for smaller in [(*used[:index], used[index] - 1, *used[index + 1 :])]
                if smaller in ends
                for first in range(end)
                if ends[smaller] >> first & 1 and reach.end[first] >= end
            )
            stages.append((index, first, end))
        stages.reverse()
        waiting = [list(nodes) for _, nodes in groups]
        return [SearchStage(waiting[index].pop(0), first, end) for index, first, end in stages]


def _upto(loads: Sequence[int], bound: float, inner: int) -> int:
    return inner if bound == math.inf else bisect_left(loads, int(bound) + 1, 0, inner)


def _extended(mask: int, reach: _Reach, gapless: bool) -> int:
    """Where a stage can end that begins at any of the layers in ``mask``."""
    lowest = mask & -mask
    if gapless and lowest > 1 and not (mask + lowest) & mask:
        # A solid block of layers, from each of which the stage goes at least one layer on: another solid block.
        first = lowest.bit_length() - 1
        furthest = max(reach.end[first : mask.bit_length()])
        return max(0, (1 << furthest + 1) - (1 << first + 1))
    result = 0
    for first in range(lowest.bit_length() - 1, mask.bit_length()):
        if mask >> first & 1:
            result |= (1 << reach.end[first] + 1) - (1 << first + 1)
    return result


def _can_close(mask: int, reach: _Reach) -> bool:
    return any(mask >> first & 1 and closes for first, closes in enumerate(reach.closes))
