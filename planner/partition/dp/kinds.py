"""Devices of several kinds in any sequence: the best cut, with a kind of device for each stage.

A state is a downset with how many devices of each kind the layers beyond it take, a vector of
counts. Under a target for the largest load it can be reached or not; so all downsets of a vector
are a row of flags, and a stage of one kind takes a row to another by a matrix of flags: which
stages are within the target and their devices' memory. What a stage has in flight follows from the
devices from its first one to the end, which are the vector's sum. The best target is some stage's
load, found by halving a sorted list of them all.

Index letters: D downsets; G kinds; r replicas; k devices from a stage's first one to the end;
v counts of devices by kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from ..problem import StageProblem, Vector
from .identical_devices import MOST_NUMBERS, IdenticalPlaces, StageTable
from .lattice import Flags, Lattice
from .program import SLACK, Program, just_below
from .sweep import OutOfTime

MOST_STAGES = 40_000_000
"""Kinds × options × D²: with more, the table of all stages is too large."""

MOST_FLAGS = 4_000_000_000
"""Vectors × D: with more, what was reached is too much to hold; an eighth of that in bytes."""

NEAR, FAR = 0, 1
"""Links: inside a machine, between machines."""


@dataclass(frozen=True)
class Kinds:
    """Devices that differ in kind alone.

    Attributes:
        problems: per kind, by falling speed: the problem with all devices of that kind. They
            differ in their `IdenticalPlaces` alone.
        counts: per kind, how many devices there are.
        speeds: per kind.
        mixed: replicas of one stage may be of several kinds. They run as the slowest of them, so
            it counts as one of that kind, which faster devices stand in for.
        homes: per kind, the machine its devices are in; empty where links are all the same.
        far: per kind, the problem whose stages get what they need between machines.
    """

    problems: tuple[StageProblem, ...]
    counts: tuple[int, ...]
    speeds: tuple[float, ...]
    mixed: bool = False
    homes: tuple[Hashable, ...] = ()
    far: tuple[StageProblem, ...] = ()


@dataclass(frozen=True)
class KindStage:
    """A stage of an answer.

    Attributes:
        layers: bit mask.
        option: position in the problems' options.
        kind: of its devices, or of the slowest of them.
    """

    layers: int
    option: int
    kind: int


@dataclass(frozen=True)
class KindCut:
    """An answer. `objective_s`: its largest load."""

    stages: tuple[KindStage, ...]
    objective_s: float


@dataclass(frozen=True)
class KindAnswer:
    """What is known of the best cut over all sequences of devices.

    Attributes:
        cut: the best one below what was asked for; None where there is none, or none was found.
        bound_s: no cut on the lattice, in any sequence, has a smaller objective.
    """

    cut: KindCut | None
    bound_s: float


def few_enough(kinds: Kinds, lattice: Lattice) -> bool:
    """Whether all stages between the lattice's downsets can be held in memory."""
    problem = kinds.problems[0]
    rows = problem.layers + len(problem.tensors) + len(problem.options) + len(problem.modes) ** 2
    if lattice.size**2 // 2 * rows > MOST_NUMBERS:
        return False
    tables = (1 + bool(kinds.far)) * len(kinds.problems)
    return tables * len(problem.options) * lattice.size**2 <= MOST_STAGES


# What is reached ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """All stages with so many replicas.

    Attributes:
        load, units: as `StagesAbove`, [options, D, D].
        options: positions in the problem's.
    """

    load: Vector
    units: NDArray[np.int16]
    options: Sequence[int]


@dataclass(frozen=True)
class _Row:
    """Vectors of counts with the same number of devices, and what they reach.

    A vector's last entry is the number of stages.

    Attributes:
        codes: the vectors as single numbers, ascending, [n].
        counts: [n, G + 1].
        flags: the downsets beyond which so many devices do it all, packed, [n, D / 8].
    """

    codes: NDArray[np.int64]
    counts: NDArray[np.int32]
    flags: NDArray[np.uint8]

    def of(self, code: int) -> int | None:
        """The position of a vector."""
        at = int(np.searchsorted(self.codes, code))
        return at if at < len(self.codes) and self.codes[at] == code else None


_Part = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.uint8]]
"""What a `_Row` is, with vectors in any sequence and more than once."""


def _merged(parts: Sequence[_Part]) -> _Row:
    codes = np.concatenate([part[0] for part in parts])
    counts = np.concatenate([part[1] for part in parts])
    flags = np.concatenate([part[2] for part in parts])
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    return _Row(
        codes[starts],
        counts[order][starts],
        np.bitwise_or.reduceat(flags[order], starts, axis=0) if len(starts) else flags,
    )


_Level = dict[int, _Row]
"""Per entry (see `KindProgram._entry`), the vectors with so many devices."""


@dataclass
class _Reached:
    """What is reached under a target.

    Attributes:
        target: in s.
        units: per kind, link and replicas: units in flight that a stage between two downsets can
            have at most within target and memory, [D, D].
        levels: per number of devices.
    """

    target: float
    units: list[list[dict[int, NDArray[np.int16]]]]
    levels: list[_Level] = field(default_factory=list)


_State = tuple[int, int, int, int]
"""A number of devices, an entry, a vector's code, a downset's position."""

_Move = tuple[float, _State, KindStage]
"""A stage's load, the state it leads to, and the stage."""


class KindProgram:
    """Cuts on a lattice, on devices of several kinds in any sequence."""

    def __init__(self, kinds: Kinds, lattice: Lattice, deadline: float | None = None) -> None:
        """List all stages.

        Args:
            kinds: for which `few_enough`.
            deadline: on the clock of `time.monotonic`.

        Raises:
            OutOfTime: the deadline passed.
        """
        self._kinds, self._lattice, self._deadline = kinds, lattice, deadline
        self._problem = kinds.problems[0]
        self._program = Program(self._problem, lattice)
        self._devices = min(self._problem.devices, sum(kinds.counts))
        # Stages are counted where their number is given.
        self._stages = self._problem.stages
        base = 1 + sum(kinds.counts)
        self._radix = np.array([base**g for g in range(len(kinds.counts) + 1)], dtype=np.int64)
        self._loads = self._tables([kinds.problems, kinds.far] if kinds.far else [kinds.problems])
        # Up to each kind that is faster than the next, how many devices there are.
        self._ends = [
            max(g for g, _ in group)
            for _, group in groupby(enumerate(kinds.speeds), key=lambda item: item[1])
        ]
        self._within = np.cumsum(kinds.counts)[self._ends]
        self._power = float(np.dot(kinds.counts, kinds.speeds))
        self.floor_s = float(self._program.costs.work[-1]) / self._power * (1 - SLACK)

    def _tables(self, ways: Sequence[Sequence[StageProblem]]) -> list[list[dict[int, _Table]]]:
        """All stages: per kind, link and replicas."""
        problem, size = self._problem, self._lattice.size
        number: dict[int, int] = {}
        slots = np.zeros(len(problem.options), dtype=np.intp)
        for o, option in enumerate(problem.options):
            slots[o] = number.get(option.replicas, 0)
            number[option.replicas] = int(slots[o]) + 1

        def empty() -> dict[int, _Table]:
            return {
                r: _Table(
                    np.full((count, size, size), np.inf),
                    np.zeros((count, size, size), dtype=np.int16),
                    [o for o, option in enumerate(problem.options) if option.replicas == r],
                )
                for r, count in number.items()
                if r <= self._devices
            }

        made = [[empty() for _ in ways] for _ in self._kinds.counts]
        first = problem.place
        assert isinstance(first, IdenticalPlaces)
        whole = StageTable(problem, self._lattice, first)
        tables = []
        for link, problems in enumerate(ways):
            for kind, other in enumerate(problems):
                assert isinstance(other.place, IdenticalPlaces)
                tables.append((whole.with_places(other, other.place), made[kind][link]))
        for below in range(size - 1):
            self._check()
            common = whole.common(below)
            for table, mine in tables:
                stages = table.stages_of(common)
                for r, into in mine.items():
                    at = np.flatnonzero(stages.replicas == r)
                    which, above = slots[stages.option[at]], stages.above[at]
                    into.load[which, below, above] = stages.load[at]
                    into.units[which, below, above] = stages.units[at]
        return made

    def _check(self) -> None:
        if self._deadline is not None and monotonic() > self._deadline:
            raise OutOfTime

    # The best cut ------------------------------------------------------------------------------

    def best(self, below: float = float("inf"), within: float = 1.0) -> KindAnswer:
        """The cut whose largest load is smallest, over all sequences of devices.

        Args:
            below: only objectives less than this, by more than rounding, count.
            within: a cut whose objective is at most so many times the bound will do.
        """
        limit, known, cut = just_below(below), self.floor_s, None
        if known > limit:
            return KindAnswer(None, below)
        loads = self._all_loads(known, limit)
        low, high = 0, len(loads)
        try:
            while low < high and (cut is None or cut.objective_s > float(loads[low]) * within):
                middle = (low + high) // 2 if cut else high - 1
                found = self._chain_within(float(loads[middle]))
                if found is None:
                    low = middle + 1
                else:
                    cut = found
                    high = int(np.searchsorted(loads, cut.objective_s))
        except (OutOfTime, MemoryError):
            pass
        if low >= high:
            return KindAnswer(cut, cut.objective_s if cut else below)
        return KindAnswer(cut, float(loads[low]))

    def _all_loads(self, least: float, most: float) -> Vector:
        found = [
            np.unique(table.load[(table.load >= least) & (table.load <= most)])
            for links in self._loads
            for tables in links
            for table in tables.values()
        ]
        return np.unique(np.concatenate(found))

    def _chain_within(self, target: float) -> KindCut | None:
        reached = self._reach(target, first=True)
        for state in self._starts(reached):
            steps, worst = [], 0.0
            while state[0]:
                load, state, stage = min(self._moves(reached, state), key=lambda move: move[0])
                steps.append(stage)
                worst = max(worst, load)
            return KindCut(tuple(steps), worst)
        return None

    def each_below(self, target: Callable[[], float]) -> Iterator[KindCut]:
        """Every cut with a kind for each stage whose objective is below a target, each once.

        Args:
            target: in s; may fall meanwhile.

        Raises:
            OutOfTime: the deadline passed.
            MemoryError: too much is reached to hold it.
        """
        limit = just_below(target())
        if limit < self.floor_s:
            return
        reached = self._reach(limit, first=False)

        def extend(state: _State, chain: tuple[KindStage, ...], worst: float) -> Iterator[KindCut]:
            self._check()
            if not state[0]:
                yield KindCut(chain, worst)
                return
            for load, beyond, stage in sorted(
                self._moves(reached, state), key=lambda move: move[0]
            ):
                if max(load, worst) > just_below(target()):
                    break
                yield from extend(beyond, (*chain, stage), max(load, worst))

        for state in self._starts(reached):
            yield from extend(state, (), 0.0)

    # Under a target ----------------------------------------------------------------------------

    def _entry(self, kind: int, link: int) -> int:
        """What matters of a row's first stage to the one before it: the kind, and the link that
        it gets what it needs by. 0 where links are all the same, and beyond the last stage."""
        return 1 + 2 * kind + link if self._kinds.far else 0

    def _may_precede(self, kind: int, entry: int) -> bool:
        if not entry:
            return True
        homes, (after, link) = self._kinds.homes, divmod(entry - 1, 2)
        return (NEAR if homes[kind] == homes[after] else FAR) == link

    def _units(self, target: float) -> list[list[dict[int, NDArray[np.int16]]]]:
        found = []
        for links in self._loads:
            found.append(
                [
                    {
                        r: np.where(table.load <= target, table.units, 0).max(axis=0)
                        for r, table in tables.items()
                    }
                    for tables in links
                ]
            )
        return found

    def _reach(self, target: float, *, first: bool) -> _Reached:
        """What is reached; `first`: until the whole model is."""
        reached, size = _Reached(target, self._units(target)), self._lattice.size
        top = np.zeros((1, size), dtype=np.bool_)
        top[0, -1] = True
        none = np.zeros((1, len(self._radix)), dtype=np.int32)
        reached.levels.append({0: _Row(np.zeros(1, np.int64), none, np.packbits(top, axis=1))})
        held, covered = 0, reached.levels[0]
        for k in range(1, self._devices + 1):
            level = self._level(reached, k)
            if first and self._stages is None:
                level, covered = self._new(level, covered)
            reached.levels.append(level)
            held += sum(row.flags.size * 8 for row in reached.levels[-1].values())
            if held > MOST_FLAGS:
                raise MemoryError
            if first and next(self._starts(reached, k), None):
                break
        return reached

    def _new(self, level: _Level, covered: _Level) -> tuple[_Level, _Level]:
        """A level without what fewer devices do as well, and all that so many devices do.

        Args:
            covered: all that one device less does.
        """
        fresh: _Level = {}
        every: _Level = {}
        for entry in {*level, *covered}:
            parts = []
            if entry in covered:
                row = covered[entry]
                for kind in range(len(self._kinds.counts)):
                    counts = row.counts.copy()
                    counts[:, kind] += 1
                    there = self._there(counts, kind)
                    counts = counts[there]
                    parts.append((counts @ self._radix, counts, row.flags[there]))
            if entry not in level:
                every[entry] = _merged(parts)
                continue
            row = level[entry]
            if not parts:
                fresh[entry] = every[entry] = row
                continue
            before = _merged(parts)
            parts.append((row.codes, row.counts, row.flags))
            every[entry] = _merged(parts)
            flags = row.flags.copy()
            at = np.searchsorted(before.codes, row.codes)
            known = at < len(before.codes)
            known[known] = before.codes[at[known]] == row.codes[known]
            flags[known] &= ~before.flags[at[known]]
            alive = flags.any(axis=1)
            if alive.any():
                fresh[entry] = _Row(row.codes[alive], row.counts[alive], flags[alive])
        return fresh, every

    def _level(self, reached: _Reached, k: int) -> _Level:
        parts: dict[int, list[_Part]] = {}
        for kind, links in enumerate(reached.units):
            for r in links[0]:
                row = self._to_extend(reached.levels[k - r], kind, r) if r <= k else None
                if row is None:
                    continue
                flags = np.unpackbits(row.flags, axis=1, count=self._lattice.size)
                above = np.flatnonzero(flags.any(axis=0))
                before = flags[:, above].astype(np.float32)
                left = self._enough_left(reached.target, row.counts)
                for link, units in enumerate(links):
                    self._check()
                    stages = units[r][:, above] >= -(-k // r)
                    below = np.flatnonzero(stages.any(axis=1) & left.any(axis=0))
                    found = (before @ stages[below].T.astype(np.float32)) > 0
                    found &= left[:, below]
                    alive = found.any(axis=1)
                    if alive.any():
                        flags = np.zeros((int(alive.sum()), self._lattice.size), dtype=np.bool_)
                        flags[:, below] = found[alive]
                        part = row.codes[alive], row.counts[alive], np.packbits(flags, axis=1)
                        parts.setdefault(self._entry(kind, link), []).append(part)
        return {entry: _merged(part) for entry, part in parts.items()}

    def _to_extend(self, level: _Level, kind: int, r: int) -> _Row | None:
        """The vectors of a level, with a stage of a kind more where there are devices for it."""
        rows = [row for entry, row in level.items() if self._may_precede(kind, entry)]
        if not rows:
            return None
        row = rows[0]
        if len(rows) > 1:
            row = _merged([(row.codes, row.counts, row.flags) for row in rows])
        counts = row.counts.copy()
        counts[:, kind] += r
        counts[:, -1] += self._stages is not None
        there = self._there(counts, kind)
        if not there.any():
            return None
        counts = counts[there]
        return _Row(counts @ self._radix, counts, row.flags[there])

    def _there(self, counts: NDArray[np.int32], kind: int) -> Flags:
        """Which vectors, of which others had fewer of a kind, there are devices for, [n]."""
        there: Flags = counts[:, kind] <= self._kinds.counts[kind]
        if self._kinds.mixed:
            sums: NDArray[np.int32] = np.cumsum(counts[:, :-1], axis=1)[:, self._ends]
            there = np.all(sums <= self._within, axis=1)
        if self._stages is not None:
            there &= counts[:, -1] <= self._stages
        return there

    def _enough_left(self, target: float, counts: NDArray[np.int32]) -> Flags:
        """Where the devices that are left can do the work below, [n, D]."""
        left = self._power - counts[:, :-1] @ np.array(self._kinds.speeds)
        most = target * (1 + SLACK) * left + self._program.slack
        flags: Flags = self._program.costs.work <= most[:, None]
        if self._stages is not None:
            allowed = np.array(self._program.allowed)
            flags &= allowed[counts[:, -1]]
        return flags

    # Chains ------------------------------------------------------------------------------------

    def _starts(self, reached: _Reached, only: int | None = None) -> Iterator[_State]:
        """States of the whole model, with few devices first."""
        for k, level in enumerate(reached.levels):
            if only not in (None, k) or not k:
                continue
            for entry, row in level.items():
                if entry and (entry - 1) % 2 == FAR:
                    # The first stage gets nothing from any other.
                    continue
                whole = row.flags[:, 0] >> 7 == 1
                if self._stages is not None:
                    whole &= row.counts[:, -1] == self._stages
                for code in row.codes[whole].tolist():
                    yield k, entry, code, 0

    def _moves(self, reached: _Reached, state: _State) -> Iterator[_Move]:
        """The stages that can lead from a state to the top."""
        k, entry, code, below = state
        if entry:
            kind, link = divmod(entry - 1, 2)
            ways = [(kind, link)]
        else:
            ways = [(kind, NEAR) for kind in range(len(self._kinds.counts))]
        masks = self._lattice.masks
        for kind, link in ways:
            for r, units in reached.units[kind][link].items():
                if r > k:
                    continue
                table = self._loads[kind][link][r]
                before = code - r * int(self._radix[kind])
                before -= int(self._radix[-1]) if self._stages is not None else 0
                ends = units[below] >= -(-k // r)
                for other, row in reached.levels[k - r].items():
                    at = row.of(before) if self._may_precede(kind, other) else None
                    if at is None:
                        continue
                    flags = np.unpackbits(row.flags[at], count=self._lattice.size)
                    for above in np.flatnonzero(flags.astype(np.bool_) & ends).tolist():
                        for which, option in enumerate(table.options):
                            load = float(table.load[which, below, above])
                            if load <= reached.target and (
                                table.units[which, below, above] >= -(-k // r)
                            ):
                                layers = masks[above] & ~masks[below]
                                stage = KindStage(layers, option, kind)
                                yield load, (k - r, other, before, above), stage
