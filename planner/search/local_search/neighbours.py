"""Where a plan can move to: points, which of two is better, and the moves from one to the next.

Index letters: S stages; N micro-batches; n layers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, combinations, pairwise, product
from typing import TypeAlias, TypeVar

from ...cluster.cluster import Cluster
from ...costs.recomputation import Selection, of_stage, selection_of
from ...costs.tied_parameters import misplaced
from ...evaluate import Evaluation
from ...partition.placings import pattern
from ...partition.problem import SAME, members
from ...systems.placement import numbered_devices
from ..choices import Choice, capped, caps, unforeseen
from ..relaxed.relaxation import Relaxation
from ..state import SearchState
from .first_cuts import first_cuts
from .layer_groups import LayerGroups

STEPS = (1, 2, 4, 8, 16, 32, 3, 6, 12, 24)
"""Groups of layers that borders are moved by, in the sequence in which they are tried."""

WORTH_IT = 1e-3
"""So many bottlenecks less are worth a move where the period stays."""

_FEW_STAGES = 8
"""With more, rows of borders are moved towards and away from the busiest stages alone."""

_KICKED = 3
"""Borders that are moved at random at a plan that no move betters, at the most."""

T = TypeVar("T")

Under: TypeAlias = tuple[tuple[int, ...], Selection]
"""Limits, and what all stages compute again."""


@dataclass(frozen=True)
class Point:
    """A plan as the local search sees it.

    Attributes:
        downsets: bit masks of the layers before each border: S + 1, the empty one first.
        devices: per stage.
        recompute: per stage, which layers it recomputes.
        limits: per stage, mini-batches in flight.
    """

    downsets: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    recompute: tuple[Selection, ...]
    micro_batches: int
    limits: tuple[int, ...]

    @property
    def stages(self) -> int:
        """S."""
        return len(self.devices)


@dataclass(frozen=True)
class Standing:
    """A point that was evaluated.

    Attributes:
        over: what stages need beyond their devices' memory, as a share of it, summed, and version
            differences beyond what may be; 0: it is a plan that was asked for.
        bottlenecks: how many devices and wires are busy for about all of the period.
    """

    point: Point
    found: Evaluation
    over: float
    bottlenecks: float

    @property
    def period_s(self) -> float:
        """Of the plan, whether it fits or not."""
        return self.found.prediction.period_s

    def better(self, other: Standing) -> bool:
        """Whether it is worth moving here from the other one."""
        if (self.over or other.over) and abs(self.over - other.over) > 1e-9:
            return self.over < other.over
        if self.period_s * SAME < other.period_s or other.period_s * SAME < self.period_s:
            return self.period_s < other.period_s
        return self.bottlenecks < other.bottlenecks - WORTH_IT


class Neighbours:
    """The points of a search, straight or with several stages on each device, and their moves.

    Moves yield points; whether they are any good isn't looked at. `busiest`: stages, those first
    that should have less to do.

    Args:
        relaxation: whose graph says which layers must share a stage.
        pins: (layer, stage).
        moves_devices: stages may have others than the cluster lists at their place.
    """

    def __init__(
        self,
        search: SearchState,
        relaxation: Relaxation,
        pins: Sequence[tuple[int, int]],
        *,
        moves_devices: bool,
    ) -> None:
        self.search, self.relaxation, self.question = search, relaxation, search.question
        self.layers = LayerGroups(search.question, relaxation)
        self._pins, self.moves_devices = tuple(pins), moves_devices
        self._nodes: dict[int, tuple[str, ...]] = {}
        self._first_cuts: dict[Hashable, list[tuple[int, ...]]] = {}
        self.random = random.Random(0)

    # Points ------------------------------------------------------------------------------------

    def point_of(self, found: Evaluation) -> Point:
        """A plan as a point."""
        position, ways = self.relaxation.graph.position, self.relaxation.recompute
        masks = (sum(1 << position[name] for name in stage.nodes) for stage in found.stages)
        return Point(
            (0, *accumulate(masks, int.__or__)),
            tuple(stage.devices for stage in found.stages),
            tuple(selection_of(stage.recompute, stage.nodes, ways) for stage in found.stages),
            found.micro_batches,
            found.limits,
        )

    def choice(self, point: Point) -> Choice:
        """Its stages by name."""
        nodes = tuple(self._nodes_of(b & ~a) for a, b in pairwise(point.downsets))
        return Choice(nodes, point.devices, tuple(map(of_stage, point.recompute, nodes)))

    def _nodes_of(self, mask: int) -> tuple[str, ...]:
        if mask not in self._nodes:
            names = self.relaxation.graph.names
            self._nodes[mask] = tuple(names[j] for j in members(mask))
        return self._nodes[mask]

    def valid(self, point: Point, choice: Choice) -> bool:
        """Whether it is one that was asked for, and runs."""
        question, sets = self.question, point.downsets
        if not self.relaxation.allows(point.stages, point.micro_batches):
            return False
        for layer, stage in self._pins:
            if stage >= point.stages or not sets[stage + 1] & ~sets[stage] & 1 << layer:
                return False
        for group in self.relaxation.graph.together:
            if any(group & mask and group & ~mask for mask in sets[1:-1]):
                return False
        if misplaced(question.profile, choice.nodes, choice.devices, question.tied) is not None:
            return False
        return not unforeseen(question, choice)

    # Cuts --------------------------------------------------------------------------------------

    def first_cuts(
        self, micro_batches: int, devices: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """Downsets of cuts to begin with (`first_cuts`)."""
        cluster, speeds = self.question.cluster, speeds_of(self.question.cluster, devices)
        links = tuple(cluster.link(a[-1], b[0]) for a, b in pairwise(devices))
        key = micro_batches, speeds, links
        if key not in self._first_cuts:
            work_s, drops = self.layers.work_s(micro_batches), self._drops(devices)
            over = {
                link: self.layers.messages_s(micro_batches, link) for link in dict.fromkeys(links)
            }
            # A single stage sends nothing.
            sent = [*zip(*(over[link] for link in links), strict=True)] or [()]
            self._first_cuts[key] = list(
                dict.fromkeys(
                    self.layers.downsets(ends)
                    for sent_s in sent
                    for ends in first_cuts(work_s, sent_s, speeds, drops)
                )
            )
        return self._first_cuts[key]

    def _drops(self, devices: Sequence[tuple[int, ...]]) -> list[int]:
        """How many fewer are in flight at each next stage, mini-batches or, where a backward takes
        one of them, micro-batches."""
        if self.relaxation.variant.backward_unit == "micro":
            return [1] * (len(devices) - 1)
        limits = next(self.usual_limits(len(devices), devices))
        return [a - b for a, b in pairwise(limits)]

    def usual_limits(
        self, stages: int, devices: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[int, ...]]:
        """The widest; a mini-batch for each stage behind; fewer and fewer down to the least."""
        ranges = self._ranges(devices)
        behind = range(stages - 1, -1, -1)
        usual = [
            (low, max(low, min(high, 1 + d))) for (low, high), d in zip(ranges, behind, strict=True)
        ]
        seen = {tuple(high for _, high in ranges)}
        yield tuple(high for _, high in ranges)
        for cap in caps(usual):
            limits = capped(usual, cap)
            if limits not in seen:
                seen.add(limits)
                yield limits

    def _ranges(self, devices: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
        several = bool(numbered_devices(devices))
        return self.relaxation.limit_ranges(len(devices), several=several)

    # Moves -------------------------------------------------------------------------------------

    def border_moves(self, point: Point, busiest: Sequence[int]) -> Iterator[Point]:
        """One border, from the busiest stages on."""
        seen = set[tuple[int, int]]()
        for s in busiest:
            for border, by in ((s, 1), (s + 1, -1), (s, -1), (s + 1, 1)):
                if 0 < border < point.stages and (border, by) not in seen:
                    seen.add((border, by))
                    for step in STEPS:
                        yield from self._shifted(point, border, border, by * step)

    def row_moves(self, point: Point, busiest: Sequence[int]) -> Iterator[Point]:
        """Several borders in a row: stages between them keep the size that they have."""
        stages = point.stages
        for a, b in combinations(range(1, stages), 2):
            if stages <= _FEW_STAGES or {a - 1, b} & set(busiest[:2]):
                for step in (-1, 1, -2, 2):
                    yield from self._shifted(point, a, b, step)

    def limit_moves(self, point: Point, busiest: Sequence[int]) -> Iterator[Point]:
        """One stage more or fewer in flight; before it there are no fewer, behind it no more."""
        ranges = self._ranges(point.devices)
        if all(low == high for low, high in ranges):
            return
        for s, by in product(range(point.stages), (1, -1)):
            mine = point.limits[s] + by
            limits = tuple(
                max(limit, mine) if t < s else min(limit, mine) if t > s else mine
                for t, limit in enumerate(point.limits)
            )
            if all(a <= limit <= b for limit, (a, b) in zip(limits, ranges, strict=True)):
                yield replace(point, limits=limits)

    def recompute_moves(self, point: Point, busiest: Sequence[int]) -> Iterator[Point]:
        """Other layers that one stage computes again, or all."""
        ways = self.relaxation.recompute
        for way in ways if len(ways) > 1 else ():
            yield replace(point, recompute=(way,) * point.stages)
            for s in busiest:
                yield replace(
                    point, recompute=(*point.recompute[:s], way, *point.recompute[s + 1 :])
                )

    def device_moves(self, point: Point) -> Iterator[Point]:
        """Two devices in each other's place, or one moved to before or behind another; and the same
        of all that stages have."""
        if not self.moves_devices:
            return
        homes, kinds = self.search.device_kinds
        used = list(dict.fromkeys(d for mine in point.devices for d in mine))
        rest = [d for d in range(len(homes)) if d not in used]
        sequence, seen = [*rest, *used], set[Hashable]()

        def lying(order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
            there = dict(zip(sequence, order, strict=True))
            return tuple(tuple(there[d] for d in mine) for mine in point.devices)

        some: Iterable[tuple[tuple[int, ...], ...]] = map(lying, _exchanged(sequence))
        if max(map(len, point.devices)) > 1:
            some = chain(some, map(tuple, _exchanged(point.devices)))
        for devices in some:
            used = [d for mine in devices for d in mine]
            alike = pattern(used, homes, kinds), tuple(map(len, devices))
            if alike not in seen and devices != point.devices:
                seen.add(alike)
                yield replace(point, devices=devices)

    def count_moves(self, point: Point, busiest: Sequence[int]) -> Iterator[Point]:
        """The same cut with other micro-batches."""
        counts = {b.micro_batches for b in self.search.branches if b.stages in (None, point.stages)}
        for n in sorted(counts, key=lambda n: abs(n - point.micro_batches)):
            yield replace(point, micro_batches=n)

    def _shifted(self, point: Point, first: int, last: int, by: int) -> Iterator[Point]:
        found = self.shifted(point, first, last, by)
        if found is not None:
            yield found

    def shifted(
        self, point: Point, first: int, last: int, by: int, *, at_most: bool = False
    ) -> Point | None:
        """Borders from `first` to `last` moved by so many groups of layers, the later ones if it is
        positive; None where a stage would have no layers left.

        Each takes the next layers in topological order of the stage that it moves into.

        Args:
            at_most: by fewer where that leaves a stage one group.
        """
        sets = list(point.downsets)
        order = range(last, first - 1, -1) if by > 0 else range(first, last + 1)
        for border in order:
            low, mine, high = sets[border - 1], sets[border], sets[border + 1]
            inside = high & ~mine if by > 0 else mine & ~low
            groups = self.layers.inside(inside)
            if at_most:
                by = max(1 - len(groups), min(by, len(groups) - 1))
            if len(groups) <= abs(by) or not by:
                return None
            for g in groups[:by] if by > 0 else groups[by:]:
                mine = mine | self.layers.groups[g] if by > 0 else mine & ~self.layers.groups[g]
            sets[border] = mine
        return replace(point, downsets=tuple(sets))

    def kicked(self, point: Point) -> Point:
        """The point with some borders elsewhere."""
        for _ in range(self.random.randint(1, _KICKED)):
            if point.stages < 2:
                break
            first = self.random.randrange(1, point.stages)
            last = self.random.randrange(first, point.stages)
            by = self.random.choice((-1, 1)) * self.random.choice(STEPS)
            point = self.shifted(point, first, last, by) or point
        return point


def _exchanged(sequence: Sequence[T]) -> Iterator[list[T]]:
    """Two in each other's place, or one moved to before or behind another."""
    for a, b in product(range(len(sequence)), repeat=2):
        swapped, moved = list(sequence), list(sequence)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        moved.insert(b, moved.pop(a))
        yield swapped
        yield moved


def speeds_of(cluster: Cluster, devices: Sequence[tuple[int, ...]]) -> tuple[float, ...]:
    """Of stages with these devices, which several may share."""
    several = Counter(devices)
    return tuple(
        len(mine) * min(cluster.devices[d].speed for d in mine) / several[mine] for mine in devices
    )
