"""The cut whose fullest device holds the least, whatever its loads, for each number of devices.

Index letters: D downsets of the lattice; B those above one of them; k devices left, K of all; r a
stage's replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .dp.cost_tables import PairCosts, Places
from .dp.lattice import Flags, Lattice, Positions, joined
from .problem import Cut, OutOfTime, StageProblem, Step, Vector, check_time, cut_of, members

MOST_NUMBERS = 60_000_000
"""Stages × options × places that are gone through; of more there is no table."""

_ONE: Vector = np.ones((1, 1))


class LeastMemory:
    """The table of one problem on one lattice.

    Devices may be left out, but not where the number of stages is given: then options have one
    device each.

    Attributes:
        bytes: of a downset and k, the least that the fullest of the last k devices holds of the
            layers beyond it, [D, K + 1]; infinite where there is no cut.
    """

    def __init__(
        self, problem: StageProblem, lattice: Lattice, deadline: float, *, shares: bool = False
    ) -> None:
        """Go through the downsets, the full one first.

        Args:
            shares: in the place of bytes, shares of what the places' memory is.

        Raises OutOfTime, too, where there is too much to go through.
        """
        self._problem, self._lattice = problem, lattice
        devices = problem.devices
        self._exact, self._shares = problem.stages is not None, shares
        if lattice.size**2 // 2 * devices * len(problem.options) > MOST_NUMBERS:
            raise OutOfTime
        self._costs = PairCosts(problem, lattice, limited=True)
        places = Places(problem, every=True)
        # By replicas: options, their modes, and what is said of them at each place.
        self._options: dict[int, list[tuple[int, int, list[Vector]]]] = {}
        for option in places.usable.tolist():
            known = option, int(places.mode[option]), self._at(places, option)
            self._options.setdefault(int(places.replicas[option]), []).append(known)
        self.bytes = np.full((lattice.size, devices + 1), np.inf)
        self.bytes[-1, 0 if self._exact else slice(None)] = 0.0
        self._came: Positions = np.zeros((lattice.size, devices + 1, 2), dtype=np.intp)
        for below in range(lattice.size - 2, -1, -1):
            check_time(deadline)
            self._go_through(below)

    def _go_through(self, below: int) -> None:
        costs, devices = self._costs, self._problem.devices
        above = np.flatnonzero(costs.above(below))
        once, flight = costs.bytes_between(below, above)
        held = costs.parameters[above] - costs.parameters[below]
        best = self.bytes[below]
        for r, options in self._options.items():
            several = [
                (once[mode] + copies * held + units * flight[mode]) / room
                for _, mode, (copies, units, room) in options
            ]
            stages = np.array(np.broadcast_arrays(*several))
            which = stages.argmin(axis=0)
            reached = np.maximum(stages.min(axis=0), self.bytes[above, : devices + 1 - r].T)
            if self._problem.pins:
                reached[~self._on_its_stage(below, above, r)] = np.inf
            at = reached.argmin(axis=1)
            least = reached[np.arange(len(at)), at]
            for k in (np.flatnonzero(least < best[r:]) + r).tolist():
                best[k] = least[k - r]
                chosen = which[(k - r) % len(which), at[k - r]]
                self._came[below, k] = above[at[k - r]], options[chosen][0]
        if not self._exact:
            # With a device left out.
            for k in np.flatnonzero(best[1:] > best[:-1]) + 1:
                best[k], self._came[below, k] = best[k - 1], self._came[below, k - 1]

    def _at(self, places: Places, option: int) -> list[Vector]:
        """Copies, units and what bytes are shares of, for k from its replicas on, or once where
        that makes no difference, [k, 1] each."""
        found = [places.field(name, option)[:, None] for name in ("copies", "units")]
        found.append(places.field("memory_bytes", option)[:, None] if self._shares else _ONE)
        alike = all((each == each[0]).all() for each in found)
        return [each[:1] for each in found] if alike else found

    def _on_its_stage(self, below: int, above: Positions, r: int) -> Flags:
        """Whether stages from a downset hold just the layers that are pinned to them, for each
        number of devices from r on, [K + 1 − r, B]."""
        problem, masks = self._problem, self._lattice.masks
        good: Flags = np.ones((problem.devices + 1 - r, len(above)), dtype=np.bool_)
        for layer, stage in problem.pins:
            inside = np.array([bool((masks[a] & ~masks[below]) >> layer & 1) for a in above])
            mine = (problem.stages or 0) - np.arange(r, problem.devices + 1) == stage
            good &= inside == mine[:, None]
        return good

    def on(self, devices: int) -> float:
        """The least bytes of the fullest of so many devices."""
        return float(self.bytes[0, devices])

    def cut(self, devices: int) -> Cut:
        below, k, steps = 0, devices, list[Step]()
        while below != self._lattice.size - 1:
            # As few as hold as little.
            while not self._exact and k and self.bytes[below, k - 1] == self.bytes[below, k]:
                k -= 1
            above, option = self._came[below, k].tolist()
            steps.append((below, above, option, k))
            below, k = above, k - self._problem.options[option].replicas
        return cut_of(self._problem, self._lattice.masks, steps)


def layers_bytes(problem: StageProblem, each: int = 1, at_once: int = 0) -> tuple[float, float]:
    """The least bytes of layers, messages left out, in any cut: on some device, by those that can't
    be taken apart; and on all devices together.

    A device's stages hold parameters at all times, and what is kept at once. What one computes
    again, and gradients, may be gone when another one makes its own: of v stages one holds a v-th
    of the sum of those at the least.

    Args:
        each: v, stages of a device at the most.
        at_once: bit mask of the layers that keep a micro-batch at one time
            (`LayerGraph.kept_at_once`); of others nothing is known, where v > 1.
    """
    held, total, shared = list[Vector](), list[Vector](), list[float]()
    recomputes = any(mode.recompute for mode in problem.modes)
    mine = at_once if each > 1 else problem.full
    inside = np.array([float(mine >> k & 1) for k in range(problem.layers)])
    together = sum(storage.nbytes for storage in problem.shared if not storage.ends & ~mine)
    for number, option in enumerate(problem.options):
        mode, place = problem.modes[option.mode], problem.place(number, option.replicas)
        kept = (mode.fixed_bytes + place.units * mode.flight_bytes) * inside
        # One of the copies is the gradient.
        always = (place.copies - 1) * problem.parameter_bytes
        gradient = problem.parameter_bytes * inside
        held.append(kept + always + gradient)
        turns = (kept + gradient) / each if recomputes else kept + gradient * (each == 1)
        total.append(option.replicas * (always + turns))
        units = place.units * mode.shared_in_flight + mode.shared_once
        shared.append(option.replicas * units * together / (each if recomputes else 1))
    alone = [np.array(held)[:, [*members(g)]].sum(axis=1).min() for g in joined(problem)]
    return float(max(alone)), float(np.array(total).min(axis=0).sum()) + min(shared)


def several_each(problem: StageProblem, stages: int) -> StageProblem:
    """A problem whose options have one device each, for so many stages that may lie on any."""
    return replace(problem, devices=stages, place=lambda option, _: problem.place(option, 1))


def none_fits(
    problem: StageProblem,
    lattice: Lattice,
    rooms: Sequence[float],
    deadline: float,
    each: int = 1,
    at_once: int = 0,
) -> bool:
    """Whether no cut of a bound fits devices with so much memory, in bytes.

    Args:
        each, at_once: as `layers_bytes` has them.

    Raises OutOfTime as `LeastMemory`.
    """
    alone, total = layers_bytes(problem, each, at_once)
    if alone > max(rooms) or total > sum(rooms):
        return True
    if each > 1:
        if at_once != problem.full:
            return False
        # What one stage of a device sends to another one is there once.
        problem = replace(problem, tensors=())
        problem = several_each(problem, min(each * problem.devices, problem.layers))
    table = LeastMemory(problem, lattice, deadline)
    return table.on(problem.stages or problem.devices) > max(rooms)
