"""Contiguous stages as an integer program: the closure form.

    y[u, s]     unit u lies in a slot up to s
    x[s, o]     the stage in slot s is of choice o
    w[u, s, o]  unit u lies in slot s, and that is so
    T           is above each slot's load, and to be small

y never falls with s, and never exceeds that of a unit which u needs; so the units with y[u, s] = 1
form a downset, and slot s holds what its downset has beyond the one before. w makes no choice of
its own: it splits y[u, s] − y[u, s − 1] by the slot's x. With it, loads and bytes are linear, and
no constant that stands for "off" weakens the bound.

Units come with all that they need, and that is too much work for few stages: what can't be below
the limit on loads isn't written down. A good cut to start from makes the program much smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..placings import Placings, load_of
from ..problem import ChosenStage, Cut, CutTensor, StageProblem, cut_load, members
from .loads import SCALE, IntegerProgram, StageRows
from .mip import Mip, Terms, difference, total
from .variables import (
    find_windows,
    inseparable,
    least_load,
    make_slots,
    make_units,
    slots_are_stages,
)

ROUNDING = 1e-6
"""Relative; what is this much above the limit is written down as well. HiGHS may take a program
to have no solution where a load is within 1e-9 of T's bound."""


class StageModel(IntegerProgram[Cut]):
    """The program of one problem, for cuts with no load above `limit_s`.

    Attributes:
        least_s: no cut has a smaller load.
    """

    def __init__(
        self, problem: StageProblem, limit_s: float = float("inf"), forbidden: Sequence[Cut] = ()
    ) -> None:
        self.problem = problem
        self.slots = make_slots(problem)
        self.least_s = least_load(problem, self.slots)
        self.limit_s = limit_s * (1 + ROUNDING)
        self.possible = self.slots.count > 0 and self.least_s <= self.limit_s
        self.possible &= (problem.stages or 0) <= self.slots.count
        if not self.possible:
            return
        self.units = make_units(problem, inseparable(problem, self.slots, self.limit_s))
        self._windows = find_windows(problem, self.units, self.slots, self.limit_s)
        self._low, self._high = self._windows.low, self._windows.high
        self.possible = self._windows.possible
        if self.possible:
            self.mip = Mip()
            self.unit_s = (self.least_s or _any_size(problem)) / SCALE
            self._write(forbidden)

    # What is decided --------------------------------------------------------------------------

    def _write(self, forbidden: Sequence[Cut]) -> None:
        most = self.limit_s / self.unit_s
        longest = self.mip.variable(self.least_s / self.unit_s, most if np.isfinite(most) else None)
        self.mip.minimise(longest)
        self._y: dict[tuple[int, int], Terms] = {}
        self._x: dict[tuple[int, int], Terms] = {}
        self._w: dict[tuple[int, int, int], Terms] = {}
        self._started: dict[tuple[int, int], Terms] = {}
        self._write_downsets()
        self._write_choices(plain=not forbidden)
        self._write_parts()
        StageRows(self, longest, self.unit_s, self.limit_s).add()
        self._write_counts()
        for cut in forbidden:
            self._forbid(cut)

    def _write_downsets(self) -> None:
        units = self.units
        for u in range(units.count + 1):
            for slot in range(self._low[u], self._high[u]):
                self._y[u, slot] = self.mip.binary()
        needed = set().union(*units.needs)
        ends = tuple(u for u in range(units.count) if u not in needed)
        for u, needs in enumerate((*units.needs, ends)):
            for slot in range(self._low[u], self._high[u] + 1):
                here = self._until(u, slot)
                self._at_most(self._until(u, slot - 1), here)
                if not self._windows.open[u, slot]:
                    self._at_most(here, self._until(u, slot - 1))
                for v in needs:
                    self._at_most(here, self._until(v, slot))

    def _write_choices(self, *, plain: bool) -> None:
        slots, mip = self.slots, self.mip
        plain = plain and self._needs_no_choice()
        for slot, choices in enumerate(slots.choices):
            used = self._used_stage(slot) if slots.stages else None
            for o in range(len(choices)):
                given = Terms(1.0) if plain else used if len(choices) == 1 else None
                self._x[slot, o] = given or mip.binary()
            if used is not None and len(choices) > 1:
                mip.equal(difference(self._chosen(slot), used))
        if slots.stages or plain:
            return
        before = Terms(1.0)
        for slot in range(slots.count):
            covering = Terms()
            for s in range(slot + 1):
                for o, choice in enumerate(slots.choices[s]):
                    if slot < s + choice.width:
                        covering.add(self._x[s, o])
            # Where devices are alike, those that are left out may as well be the last.
            self._at_most(covering, before)
            before = covering if slots.alike else Terms(1.0)

    def _needs_no_choice(self) -> bool:
        """One device per stage, all of them free: a slot may simply hold nothing."""
        problem, slots = self.problem, self.slots
        if slots.stages or problem.stages is not None:
            return False
        if problem.before_s is not None or problem.after_s is not None:
            return False
        choices = slots.different
        return all(len(each) == 1 for each in slots.choices) and all(
            choice.replicas == 1 for choice in choices
        )

    def _used_stage(self, slot: int) -> Terms:
        """Whether there is a stage, where slots are stages: until all layers are in one."""
        if self.problem.stages is not None:
            return Terms(1.0)
        return difference(Terms(1.0), self._until(self.units.count, slot - 1))

    def _write_parts(self) -> None:
        """w, and that units are where stages are."""
        mip = self.mip
        for u in range(self.units.count + 1):
            for slot in range(self._low[u], self._high[u] + 1):
                there = difference(self._until(u, slot), self._until(u, slot - 1))
                can = self._windows.open[u, slot]
                if len(can) == 1:
                    self._w[u, slot, can[0]] = there
                    if not self.slots.stages or len(self.slots.choices[slot]) > 1:
                        self._at_most(there, self._x[slot, can[0]])
                elif can:
                    parts = [mip.variable(0.0, 1.0) for _ in can]
                    for o, part in zip(can, parts, strict=True):
                        self._w[u, slot, o] = part
                        self._at_most(part, self._x[slot, o])
                    mip.equal(difference(total(parts), there))

    def _at_most(self, left: Terms, right: Terms) -> None:
        """Add the row left ≤ right, of variables between 0 and 1, unless it says nothing."""
        row = difference(left, right)
        if row.constant + sum(c for c in row.of.values() if c > 0) > 0:
            self.mip.at_most(row)

    def _until(self, u: int, slot: int) -> Terms:
        """y: whether a unit, or the result, is in a slot up to this one."""
        if slot < self._low[u]:
            return Terms(0.0)
        if slot >= self._high[u]:
            return Terms(1.0)
        return self._y[u, slot]

    def _chosen(self, slot: int) -> Terms:
        return total(self._x[slot, o] for o in range(len(self.slots.choices[slot])))

    # IntegerProgram ---------------------------------------------------------------------------

    def inside(self, u: int, slot: int, kind: tuple[int, ...]) -> Terms:
        if not self._low[u] <= slot <= self._high[u]:
            return Terms()
        can = [o for o in self._windows.open[u, slot] if o in kind]
        if len(can) == len(self._windows.open[u, slot]):
            return difference(self._until(u, slot), self._until(u, slot - 1))
        return total(self._w[u, slot, o] for o in can)

    def first(self, number: int, slot: int, kind: tuple[int, ...]) -> tuple[Terms, Terms]:
        tensor = self.units.tensors[number]
        end = self.units.first(tensor)
        if end is not None:
            here = self.inside(end, slot, kind)
            return here, here
        started = difference(self._start(tensor, slot), self._start(tensor, slot - 1))
        others = difference(self._chosen(slot), self.chosen(slot, kind))
        return difference(started, others), started

    def _start(self, tensor: CutTensor, slot: int) -> Terms:
        """Whether a slot up to this one has an end of the tensor."""
        if slot < 0:
            return Terms(0.0)
        if (tensor.ends, slot) not in self._started:
            made = self.mip.variable(0.0, 1.0)
            some = Terms()
            for u in members(tensor.ends):
                if u < self.units.count:
                    self._at_most(self._until(u, slot), made)
                    some.add(self._until(u, slot))
            self._at_most(made, some)
            self._started[tensor.ends, slot] = made
        return self._started[tensor.ends, slot]

    def chosen(self, slot: int, kind: tuple[int, ...]) -> Terms:
        return total(self._x[slot, o] for o in kind)

    def rest(self, slot: int) -> Terms:
        """See IntegerProgram. Of the layers before the stage, and of those beyond it."""
        made = Terms()
        unused = difference(Terms(1.0), self._chosen(slot))
        for u, value in enumerate(self.units.sums(self.problem.before_s)):
            if value:
                made.add(self._until(u, slot - 1), float(value)).add(unused, -float(value))
        for u, value in enumerate(self.units.sums(self.problem.after_s)):
            if value:
                made.add(difference(Terms(1.0), self._until(u, slot)), float(value))
                if not self.slots.stages:
                    made.add(unused, -float(value))
        return made

    # Numbers of stages ------------------------------------------------------------------------

    def _write_counts(self) -> None:
        """As many stages as are asked for, none of them empty, and pinned layers in theirs."""
        problem, slots = self.problem, self.slots
        if problem.stages is None:
            return
        self.mip.equal(total(self._chosen(s) for s in range(slots.count)), problem.stages)
        for slot, choices in enumerate(slots.choices):
            every = tuple(range(len(choices)))
            held = total(self.inside(u, slot, every) for u in range(self.units.count))
            self._at_most(self._chosen(slot), held)
        for layer, stage in () if slots_are_stages(problem, slots) else problem.pins:
            earlier = Terms()
            for slot, choices in enumerate(slots.choices):
                here = self.inside(self.units.of[layer], slot, tuple(range(len(choices))))
                away = difference(Terms(1.0), here)
                self._at_most(difference(Terms(stage), earlier), Terms().add(away, stage))
                self._at_most(difference(earlier, Terms(stage)), Terms().add(away, slots.count))
                earlier.add(self._chosen(slot))

    def _forbid(self, cut: Cut) -> None:
        """At least one of a cut's stages is not, exactly, in any slot."""
        stages, below = [], 0
        for stage in cut.stages:
            ends = self.units.whole(below), self.units.whole(below | stage.layers)
            if ends[0] is None or ends[1] is None:
                return
            stages.append((ends[0], ends[1], stage.option))
            below |= stage.layers
        met = Terms()
        for before, after, option in stages:
            for slot, choices in enumerate(self.slots.choices):
                for o, choice in enumerate(choices):
                    if choice.option == option:
                        made = self.mip.variable()
                        off = total([self._off(before, slot - 1), self._off(after, slot)])
                        self._at_most(difference(self._x[slot, o], off), made)
                        met.add(made)
        self.mip.at_most(met, len(stages) - 1)

    def _off(self, downset: int, slot: int) -> Terms:
        """How far slots up to this one are from holding exactly this downset: zero if they do."""
        units = self.units
        made = Terms()
        for u in range(units.count):
            if downset >> u & 1:
                if not units.above[u] & downset & ~(1 << u):
                    made.add(difference(Terms(1.0), self._until(u, slot)))
            elif not units.below[u] & ~downset & ~(1 << u):
                made.add(self._until(u, slot))
        return made

    # From cuts and to cuts --------------------------------------------------------------------

    def values_of(self, found: Cut) -> dict[int, float]:
        """See IntegerProgram. It is a cut that keeps units whole."""
        at: dict[int, ChosenStage] = {}
        following = 0
        for stage in found.stages:
            slot = following if self.slots.alike else self.slots.devices - stage.k
            at[slot] = stage
            width = 1 if self.slots.stages else self.problem.options[stage.option].replicas
            following = slot + width
        values: dict[int, float] = {}
        below = 0
        for slot, choices in enumerate(self.slots.choices):
            if slot in at:
                below |= at[slot].layers
            for u, mask in enumerate((*self.units.layers, self.problem.full)):
                if (u, slot) in self._y:
                    (number,) = self._y[u, slot].of
                    values[number] = float(not mask & ~below)
            for o, choice in enumerate(choices):
                terms = self._x[slot, o]
                if len(choices) > 1 or not self.slots.stages:
                    for number in terms.of:
                        values[number] = float(slot in at and at[slot].option == choice.option)
        return values

    def answer_of(self, values: tuple[float, ...]) -> Cut:
        """The cut of a solution, with its load straight from the definition."""
        slots, units = self.slots, self.units
        stages: list[ChosenStage] = []
        below, k = 0, slots.devices
        for slot, choices in enumerate(slots.choices):
            upto = [u for u in range(units.count) if self._until(u, slot).value(values) > 0.5]
            layers = sum(units.layers[u] for u in upto) & ~below
            if not layers:
                continue
            shares = [self._x[slot, o].value(values) for o in range(len(choices))]
            choice = choices[shares.index(max(shares))]
            k = k if slots.stages else slots.devices - slot
            stages.append(ChosenStage(layers, choice.option, k))
            below |= layers
            k -= choice.replicas
        cut = Cut(tuple(stages), 0.0)
        cut = Cut(cut.stages, cut_load(self.problem, cut))
        if not np.isinf(cut.objective_s):
            return cut
        # It may fit other devices, should it fit these within the solver's tolerance only.
        return Placings(self.problem, cut, load_of(self.problem)).best()


def _any_size(problem: StageProblem) -> float:
    """A load to measure by where no layer computes anything."""
    sizes = [tensor.lower_s + tensor.upper_s for tensor in problem.tensors]
    sizes += [float(np.sum(v)) for v in (problem.before_s, problem.after_s) if v is not None]
    return max(sizes, default=0.0) or 1.0
