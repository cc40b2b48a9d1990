"""Stages between two downsets, with what they cost and what they send to the next ones.

What a stage sends to the next one depends on both. Of the tensors that cross a downset a stage that
begins there takes some, by how far it reaches; so such stages fall into a few classes, by what they
take and by whether they have layers of one path through the graph, along which gradients come back
all the way. A stage and the class of the next one say what goes between them. A stage without
layers of the path is passed by the path's message.

Index letters: D downsets; K classes; M modes; p stages; n layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem import FITS, Deadline, StageProblem, Vector, check_time, closures, members
from .cost_tables import PairCosts
from .cycle_devices import CycleDevices, CycleStage
from .lattice import Flags, Lattice, Positions

CycleRule = Literal["turns", "room", "flush", "forwards-first"]
"""Which cycles of operations count (`critical_cycles`)."""

_MOST_GROUPS = 3
"""Of tensors that cross a downset and are used by the same layers behind it, those that stages are
told apart by, the heaviest ones."""

_MOST_HEAVY = 8
"""Of them, those that any stage behind may be known to wait for."""


FORGIVEN = 1e-9
"""Of what stages wait for, and of sums of work: what rules nothing out."""

_MOST_SHARED_OUT, _NEAR_LEAST = 600, 1e-3
"""Downsets of which the longest stage's least time is looked for, and how nearly."""

_MADE_AHEAD = 1.5
"""Stages are made for so many times what is asked for, as more is soon asked for."""


@dataclass(frozen=True)
class CycleMessage:
    """A tensor of a micro-batch that layers exchange.

    Attributes:
        maker, users: a layer's position, and a bit mask of layers.
        wire_s, back_s: on the fastest wire; `back_s` is of what a backward sends.
        returns: a gradient comes back.
    """

    maker: int
    users: int
    wire_s: float
    back_s: float
    returns: bool


@dataclass(frozen=True)
class CycleProblem:
    """What decides.

    Attributes:
        loads: what stages cost alone, one option for each mode.
        forward_s, backward_s: per mode and layer, [M, n], of a micro-batch, at speed 1: what others
            wait for.
        path: layers' positions, each of which sends a gradient back to the one before it.
        path_s: between neighbours on it, messages both ways, latency left out.
        latency_s: of a message.
        operation_s: what a forward takes besides its layers, at speed 1.
        split: backwards are in two parts, of which others wait for the first alone.
        every_mode: stages in slower modes than some that they seem to fit all places in, too: bytes
            are known from below, so that they may be needed.
        exchanges: bit masks of layers that share parameters, each with what an all-reduce over
            copies takes at the least, where several stages have some of them.
        shares: per mode, which replicas it is of, where they share micro-batches; empty: of any.
        entered: forwards take the version that the first stage had: a stage with fewer in flight
            holds older ones until they are used; or, "stashed", until its backward.
    """

    loads: StageProblem
    rule: CycleRule
    micro_batches: int
    devices: CycleDevices
    forward_s: Vector
    backward_s: Vector
    messages: tuple[CycleMessage, ...]
    path: tuple[int, ...]
    path_s: tuple[float, ...]
    latency_s: float
    operation_s: float = 0.0
    split: bool = False
    every_mode: bool = False
    exchanges: tuple[tuple[int, float], ...] = ()
    entered: Literal["", "used", "stashed"] = ""
    shares: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[CycleStage, ...]:
        """One of each stage's (`CycleDevices.stages`), [S]."""
        return self.devices.stages

    @property
    def flushes(self) -> bool:
        """Whether the pipeline drains after each mini-batch."""
        return self.rule in ("flush", "forwards-first")

    def versions(self, first: int, units: Positions | int) -> Positions | int:
        """Weight versions that stages hold when a backward runs, at the least.

        Args:
            first, units: in flight at the first stage, and at these.
        """
        return {"": 1, "used": first - units, "stashed": first}[self.entered]


@dataclass(frozen=True)
class Stages:
    """Stages in one mode each, ascending by their lower downset and their class there, [p].

    Attributes:
        below, above: positions of downsets.
        kind: class, of those of the lower downset.
        on_path: they have layers of the path.
        whole_s: a micro-batch's forward and backward with its weight part, if that is split off.
        busy_s: compute and updates in a period at speed 1, the system's weight rules left out.
        summing_s: all-reduces over copies of tied parameters, in a period.
        sent_s: per class of the next stage, messages to it both ways with their latency, [K, p];
            minus infinity where no gradient comes back from there.
        wire_s: of these the busier way in a period, [K, p].
        alone_s: of those that it makes for stages behind, the heaviest's, wherever that goes.
        passed_s: the path's message that passes the next stage, if that isn't on it; minus infinity
            where the path ends.
        made, user: the heaviest message of those that they make for stages behind them and get a
            gradient for, and the first layer there that uses it; -1: there is none.
        taken: the heaviest one that they use of those that stages before them make.
        once_bytes, kept_bytes: held in any case, and for each micro-batch in flight.
    """

    below: Positions
    above: Positions
    kind: Positions
    mode: Positions
    on_path: Flags
    forward_s: Vector
    backward_s: Vector
    whole_s: Vector
    busy_s: Vector
    summing_s: Vector
    sent_s: Vector
    wire_s: Vector
    alone_s: Vector
    passed_s: Vector
    made: Positions
    user: Positions
    taken: Positions
    parameters: Vector
    once_bytes: Vector
    kept_bytes: Vector

    @property
    def count(self) -> int:
        """p."""
        return len(self.below)

    def those(self, which: Positions | slice) -> Stages:
        every = (getattr(self, field.name) for field in fields(self))
        if isinstance(which, slice):
            return Stages(*(each[..., which] for each in every))
        return Stages(*(each.take(which, axis=-1) for each in every))

    @cached_property
    def _first(self) -> Positions:
        """Where those of each lower downset begin, up to the last one that has any."""
        last = int(self.below[-1]) if self.count else -1
        return np.searchsorted(self.below, np.arange(last + 2))

    def between(self, below: Flags, above: Flags) -> Positions:
        """Positions of those whose downsets are among these, [D] each."""
        first = self._first
        lows = np.flatnonzero(below[: len(first) - 1])
        counts = first[lows + 1] - first[lows]
        ends = np.cumsum(counts)
        which = np.repeat(first[lows] - (ends - counts), counts) + np.arange(counts.sum())
        found: Positions = which[above[self.above[which]]]
        return found

    def from_downset(self, below: int) -> Stages:
        low, high = np.searchsorted(self.below, [below, below + 1]).tolist()
        return self.those(slice(low, high))


class StageTable:
    """All stages of a problem on a lattice that fit some device, in modes that may be worth it;
    those of the same problem with fewer stages, too.

    Attributes:
        classes, classes_at: how many there are at the most, K, and at each downset, [D].
        off_path: per class and downset, whether stages of that class there have no layers of the
            path, [K, D].
        work_s: of a downset's layers, at the least, [D].
        first_with, last_without: per layer, the first downset that has it, and the last that
            hasn't, [n].
    """

    def __init__(self, problem: CycleProblem, lattice: Lattice, deadline: Deadline = None) -> None:
        """Raises OutOfTime."""
        self.problem, self.lattice, self._deadline = problem, lattice, deadline
        limited = any(math.isfinite(stage.memory_bytes) for stage in problem.devices.every)
        self._costs = costs = PairCosts(problem.loads, lattice, limited=limited)
        self.work_s = costs.work
        marks = np.zeros(problem.loads.layers)
        marks[list(problem.path)] = 1.0
        # Of the path's layers, how many are in a downset.
        self._passed = np.rint(costs.summed(marks)).astype(np.intp)
        self._number = {message: k for k, message in enumerate(problem.messages)}
        self._needed = closures(problem.loads.needs, problem.loads.together)
        crossing = [-math.inf, *(s + 2 * problem.latency_s for s in problem.path_s), -math.inf]
        self._path_s = np.array(crossing)[self._passed]
        columns = [lattice.column(layer) for layer in range(problem.loads.layers)]
        self.first_with = np.array([column.argmax() for column in columns])
        self.last_without = np.array([lattice.size - 1 - c[::-1].argmin() for c in columns])
        borders = [self._border(b) for b in range(lattice.size)]
        self.classes_at = np.array([len(border.sent_s) for border in borders])
        self.classes = int(self.classes_at.max())
        self.off_path = np.zeros((self.classes, lattice.size), dtype=np.bool_)
        for b, border in enumerate(borders):
            self.off_path[: len(border.off_path), b] = border.off_path
        self._borders, self._made_s = borders, -math.inf
        self._made: Stages | None = None

    @cached_property
    def most_s(self) -> float:
        """No stage is busy for longer, at speed 1; the system's weight rules left out."""
        costs = self._costs
        serial_s = self.problem.loads.serial_fixed_s
        if costs.serial is not None:
            serial_s += float(costs.serial[-1])
        return float(costs.compute[:, -1].max()) + serial_s

    @property
    def parameter_bytes(self) -> float:
        """Of all layers."""
        return float(self._costs.parameters[-1])

    @cached_property
    def is_chain(self) -> bool:
        """Whether all layers come one after another, and gradients back from each to the one
        before it."""
        masks = self.lattice.masks
        nested = all(not below & ~above for below, above in pairwise(masks))
        return nested and bool(np.diff(self._passed).all())

    def least_longest(self, layers_s: Vector, stages: int) -> float:
        """What the longest stage of a cut into so many takes at the least, by what each layer does,
        [n]; of many downsets, by the longest layer and by what is shared out."""
        sums = self._costs.summed(layers_s)
        low = max(float(layers_s.max()), float(sums[-1]) / stages)
        if self.lattice.size > _MOST_SHARED_OUT:
            return low
        holds = [np.flatnonzero(self._costs.above(b)) for b in range(self.lattice.size - 1)]

        def reaches(target: float) -> bool:
            fewest = np.full(self.lattice.size, stages + 1)
            fewest[0] = 0
            for b, above in enumerate(holds):
                near = above[sums[above] - sums[b] <= target]
                fewest[near] = np.minimum(fewest[near], fewest[b] + 1)
            return bool(fewest[-1] <= stages)

        high = float(sums[-1])
        while high > low * (1 + _NEAR_LEAST):
            middle = (low + high) / 2
            low, high = (low, middle) if reaches(middle) else (middle, high)
        return low

    def within(self, busy_s: float, deadline: Deadline = None) -> Stages:
        """Those that are busy for no longer, at speed 1. Raises OutOfTime.

        They are made when they are first asked for: where there are many devices stages that keep
        to a period are few of all.
        """
        if self._made is None or busy_s > self._made_s:
            self._deadline = deadline
            self._made_s = busy_s * _MADE_AHEAD
            self._made = self._all_stages(self._made_s)
        return self._made.those(np.flatnonzero(self._made.busy_s <= busy_s))

    def stage(self, below: int, above: int, mode: int) -> Stages:
        """One of them, [1]; of those that were asked for."""
        assert self._made is not None
        some = self._made.from_downset(below)
        hit = (some.above == above) & (some.mode == mode)
        return some.those(np.flatnonzero(hit)[:1])

    def workspace(self, stages: Stages) -> Vector:
        """The largest working set of a layer of some stages, in bytes, [p]; 0 without limits."""
        found = np.zeros(stages.count)
        begins = np.flatnonzero(np.diff(stages.below, prepend=-1))
        for low, high in pairwise([*begins.tolist(), stages.count]):
            below, above = int(stages.below[low]), stages.above[low:high]
            found[low:high] = self._costs.workspace_between(below, above)
        return found

    # What goes over a border -------------------------------------------------------------------

    def _border(self, b: int) -> _Border:
        """What is known of a downset as the border between two stages."""
        check_time(self._deadline)
        problem, lattice, size = self.problem, self.lattice, self.lattice.size
        above = self._costs.above(b)
        if not above.any():
            nothing, none = np.full((1, size), -math.inf), np.full(size, -1)
            kinds = np.zeros(size, dtype=np.intp)
            still = np.zeros(size)
            return _Border(kinds, [True], nothing, np.zeros((1, size)), still, none, none, none)
        mask, n = lattice.masks[b], problem.micro_batches
        crossing = [m for m in problem.messages if mask >> m.maker & 1 and m.users & ~mask]
        groups: dict[int, list[CycleMessage]] = {}
        for message in crossing:
            groups.setdefault(message.users & ~mask, []).append(message)
        ranked = sorted(groups, key=lambda users: -sum(m.wire_s + m.back_s for m in groups[users]))
        told = ranked[:_MOST_GROUPS]
        on_path = self._passed > self._passed[b]
        code = on_path.astype(np.intp)
        for k, users in enumerate(told):
            takes = np.zeros(size, dtype=np.bool_)
            for layer in members(users):
                takes |= lattice.column(layer)
            code += takes.astype(np.intp) << (k + 1)
        codes = np.unique(code[above])
        kinds = np.searchsorted(codes, code)
        per_period = 1 if problem.rule == "room" else n
        # Whichever stage behind it takes a tensor, some wire has it; but where devices have several
        # stages, that may be on the same.
        alone = np.zeros(size)
        for message in crossing if problem.devices.replicas == (1,) else ():
            busy_s = max(n * message.wire_s, per_period * message.back_s)
            alone = np.maximum(alone, busy_s * ~lattice.column(message.maker))
        sent, wires, off = [], [], []
        # Of the others, what the path's next layer needs goes to all stages that have it.
        sure = 0
        if self._passed[b] < len(problem.path):
            sure = self._needed[problem.path[self._passed[b]]] & ~mask
        for each in codes.tolist():
            mine = [m for k, users in enumerate(told) if each >> (k + 1) & 1 for m in groups[users]]
            if each & 1:
                rest = [m for users in ranked[_MOST_GROUPS:] if users & sure for m in groups[users]]
                mine = mine + rest
            there, back = np.zeros((2, size))
            linked = np.zeros(size, dtype=np.bool_)
            for message in mine:
                outside = ~lattice.column(message.maker)
                linked |= outside & message.returns
                there += message.wire_s * outside
                back += message.back_s * outside
            sent.append(np.where(linked, there + back + 2 * problem.latency_s, -math.inf))
            wires.append(np.maximum(n * there, per_period * back))
            off.append(not each & 1)
        far = self._heaviest(crossing, mask)
        return _Border(kinds, off, np.array(sent), np.array(wires), alone, *far)

    def _heaviest(
        self, messages: list[CycleMessage], mask: int
    ) -> tuple[Positions, Positions, Positions]:
        """Of messages that cross a downset, [D] each: the heaviest that a stage between each lower
        downset and this one makes, and its first user; and that a stage up to each upper one
        takes."""
        made, user, taken = (np.full(self.lattice.size, -1) for _ in range(3))
        returned = sorted((m for m in messages if m.returns), key=lambda m: m.wire_s + m.back_s)
        for message in returned[-_MOST_HEAVY:]:
            users = message.users & ~mask
            outside = ~self.lattice.column(message.maker)
            made[outside] = self._number[message]
            user[outside] = (users & -users).bit_length() - 1
            for layer in members(users):
                taken[self.lattice.column(layer)] = self._number[message]
        return made, user, taken

    # Stages ------------------------------------------------------------------------------------

    def _all_stages(self, busy_s: float) -> Stages:
        """Those that are busy for no longer."""
        problem, costs, borders = self.problem, self._costs, self._borders
        forward = np.array([costs.summed(row) for row in problem.forward_s])
        backward = np.array([costs.summed(row) for row in problem.backward_s])
        found: list[tuple[NDArray[Any], ...]] = []
        for below in range(self.lattice.size - 1):
            check_time(self._deadline)
            found += self._stages_from(below, busy_s, forward, backward)
        if not found:
            return _none(self.classes)
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        lows, highs, on_path = columns[0], columns[1], columns[4]
        sent_s = np.full((self.classes, len(lows)), -math.inf)
        wire_s = np.zeros((self.classes, len(lows)))
        alone_s = np.zeros(len(lows))
        made, user, taken = (np.full(len(lows), -1) for _ in range(3))
        by_border = np.argsort(highs, kind="stable")
        ends = np.searchsorted(highs[by_border], np.arange(len(borders) + 1))
        for at, border in enumerate(borders):
            which = by_border[ends[at] : ends[at + 1]]
            rows = slice(0, len(border.sent_s))
            sent_s[rows, which] = border.sent_s[:, lows[which]]
            wire_s[rows, which] = border.wire_s[:, lows[which]]
            alone_s[which] = border.alone_s[lows[which]]
            made[which], user[which] = border.made[lows[which]], border.user[lows[which]]
            first, end = np.searchsorted(lows, [at, at + 1]).tolist()
            taken[first:end] = border.taken[highs[first:end]]
        passed_s = np.where(on_path, self._path_s[highs], -math.inf)
        columns[10:10] = [sent_s, wire_s, alone_s, passed_s, made, user, taken]
        return Stages(*columns)

    def _stages_from(
        self, below: int, busy_s: float, forward: Vector, backward: Vector
    ) -> list[tuple[NDArray[Any], ...]]:
        """Columns of those that begin at a downset, messages left out; none where there are none.

        Args:
            forward, backward: of each downset's layers, per mode, [M, D].
        """
        problem, costs = self.problem, self._costs
        above = np.flatnonzero(costs.above(below))
        # No sum of other modes is below that of the least.
        least_s = costs.work[above] - costs.work[below]
        above = above[least_s <= busy_s + FORGIVEN * costs.work[-1]]
        if not len(above):
            return []
        kinds = self._borders[below].kinds[above]
        order = np.argsort(kinds, kind="stable")
        above, kinds = above[order], kinds[order]
        holds = costs.holders[above] > costs.holders[below]
        serial_s = costs.serial_between(below, above)
        serial = (0.0 if serial_s is None else serial_s) + problem.loads.serial_fixed_s * holds
        once = kept = np.zeros((len(problem.loads.modes), len(above)))
        if costs.limited:
            once, kept = costs.bytes_between(below, above)
        parameters = costs.parameters[above] - costs.parameters[below]
        ahead = forward[:, above] - forward[:, below, None]
        back = backward[:, above] - backward[:, below, None]
        m, some = self._worth_it(ahead + back, once, kept, parameters)
        compute = costs.compute[m, above[some]] - costs.compute[m, below]
        fits = compute + serial[some] <= busy_s
        m, some, compute = m[fits], some[fits], compute[fits]
        order = np.lexsort((m, kinds[some]))
        m, some, compute = m[order], some[order], compute[order]
        b = above[some]
        on_path = self._passed[b] > self._passed[below]
        shared = (np.full(len(b), below), b, kinds[some], m, on_path)
        whole = compute / problem.micro_batches
        busy = compute + serial[some]
        times = (ahead[m, some], back[m, some], whole, busy, self._summing_s(below, b))
        return [(*shared, *times, parameters[some], once[m, some], kept[m, some])]

    def _summing_s(self, below: int, above: Positions) -> Vector:
        """Of stages that have some of the layers that share parameters, but not all."""
        found = np.zeros(len(above))
        for ends, seconds in self.problem.exchanges:
            within = np.sum([self.lattice.column(layer) for layer in members(ends)], axis=0)
            mine = within[above] - within[below]
            found += seconds * ((mine > 0) & (mine < ends.bit_count()))
        return found

    @cached_property
    def _extremes(self) -> tuple[_Holding, _Holding]:
        """What fits every place does so with the first; what fits none, not with the second."""
        stages, n = self.problem.devices.every, self.problem.micro_batches
        flights = [flight for stage in stages for flight in stage.flights]
        # As many versions as the first stage may have in flight.
        entered = max(f.units for f in flights) if self.problem.entered else 1
        most = _Holding(
            max(stage.copies for stage in stages) + max(entered, *(f.versions for f in flights)),
            max(max(f.kept, float(f.limit * n)) for f in flights),
            min(stage.memory_bytes for stage in stages) * FITS,
        )
        least = _Holding(
            # A pipeline of one stage has a single version, whatever those of more have.
            min(stage.copies for stage in stages) + 1.0,
            min(f.kept for f in flights),
            max(stage.memory_bytes for stage in stages) * FITS,
        )
        return most, least

    def _worth_it(
        self, own: Vector, once: Vector, kept: Vector, parameters: Vector
    ) -> tuple[Positions, Positions]:
        """Of stages in all modes, [M, B], mode and number of those that fit some place, and are
        faster than in any mode in which they fit every place; of those of as many replicas."""
        found = list[tuple[Positions, Positions]]()
        shares = np.array(self.problem.shares or (1,) * len(own))
        for share in np.unique(shares):
            mine = np.flatnonzero(shares == share)
            mode, number = self._worth_it_beside(own[mine], once[mine], kept[mine], parameters)
            found.append((mine[mode], number))
        modes, numbers = zip(*found, strict=True)
        return np.concatenate(modes), np.concatenate(numbers)

    def _worth_it_beside(
        self, own: Vector, once: Vector, kept: Vector, parameters: Vector
    ) -> tuple[Positions, Positions]:
        """The same where all replace one another."""
        if not self._costs.limited:
            some = own if self.problem.every_mode else own[:1]
            mode, number = np.nonzero(np.isfinite(some))
            return mode, number

        def fits(held: _Holding) -> Flags:
            return once + held.copies * parameters + held.units * kept <= held.room

        anywhere, somewhere = map(fits, self._extremes)
        fastest = np.where(anywhere, own, math.inf)
        worth = own < fastest.min(axis=0)
        worth |= np.arange(len(own))[:, None] == fastest.argmin(axis=0)
        worth |= self.problem.every_mode
        mode, number = np.nonzero(somewhere & worth)
        return mode, number


def _none(classes: int) -> Stages:
    at, seconds = np.zeros(0, dtype=np.intp), np.zeros(0)
    wide = np.zeros((classes, 0))
    flags = np.zeros(0, dtype=np.bool_)
    times, held = (seconds,) * 5, (seconds, seconds, seconds)
    return Stages(at, at, at, at, flags, *times, wide, wide, seconds, seconds, at, at, at, *held)


class _Holding(NamedTuple):
    """How much a stage has in flight and in copies of its parameters, and its device's memory."""

    copies: float
    units: float
    room: float


class _Border(NamedTuple):
    """A downset as a border.

    Attributes:
        kinds: per upper downset of a stage that begins here, its class, [D].
        off_path: per class.
        sent_s, wire_s: per class and lower downset of the stage before, [K, D].
        alone_s, made, user, taken: as of `Stages`; per lower downset of the stage before, and per
            upper one of that behind.
    """

    kinds: Positions
    off_path: list[bool]
    sent_s: Vector
    wire_s: Vector
    alone_s: Vector
    made: Positions
    user: Positions
    taken: Positions
