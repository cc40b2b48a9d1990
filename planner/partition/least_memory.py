"""The cut whose fullest device holds the least, whatever its loads, for each number of devices.

Index letters: D downsets of the lattice; B those above one of them; k devices left, K of all; r a
stage's replicas.
"""

from __future__ import annotations

from time import monotonic

import numpy as np

from .dp.cost_tables import PairCosts, Places
from .dp.lattice import Flags, Lattice, Positions, joined
from .dp.sweep import OutOfTime
from .problem import Cut, StageProblem, Step, cut_of, members

MOST_NUMBERS = 60_000_000
"""Stages × options × places that are gone through; of more there is no table."""


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
            deadline: by `time.monotonic`.
            shares: in the place of bytes, shares of what the places' memory is.

        Raises OutOfTime when the deadline has passed, or there is too much to go through.
        """
        self._problem, self._lattice = problem, lattice
        devices = problem.devices
        self._exact, self._shares = problem.stages is not None, shares
        if lattice.size**2 // 2 * devices * len(problem.options) > MOST_NUMBERS:
            raise OutOfTime
        self._costs = PairCosts(problem, lattice, limited=True)
        places = Places(problem, every=True)
        self.bytes = np.full((lattice.size, devices + 1), np.inf)
        self.bytes[-1, 0 if self._exact else slice(None)] = 0.0
        self._came: Positions = np.zeros((lattice.size, devices + 1, 2), dtype=np.intp)
        for below in range(lattice.size - 2, -1, -1):
            if monotonic() > deadline:
                raise OutOfTime
            self._go_through(places, below)

    def _go_through(self, places: Places, below: int) -> None:
        costs, devices = self._costs, self._problem.devices
        above = np.flatnonzero(costs.above(below))
        once, flight = costs.bytes_between(below, above)
        held = costs.parameters[above] - costs.parameters[below]
        best = self.bytes[below]
        for option in places.usable.tolist():
            r, mode = int(places.replicas[option]), places.mode[option]
            copies, units = (places.field(name, option)[:, None] for name in ("copies", "units"))
            stage = once[mode] + copies * held + units * flight[mode]
            if self._shares:
                stage /= places.field("memory_bytes", option)[:, None]
            reached = np.maximum(stage, self.bytes[above, : devices + 1 - r].T)
            reached[~self._on_its_stage(below, above, r)] = np.inf
            at = reached.argmin(axis=1)
            least = reached[np.arange(len(at)), at]
            for k in (np.flatnonzero(least < best[r:]) + r).tolist():
                best[k] = least[k - r]
                self._came[below, k] = above[at[k - r]], option
        if not self._exact:
            # With a device left out.
            for k in np.flatnonzero(best[1:] > best[:-1]) + 1:
                best[k], self._came[below, k] = best[k - 1], self._came[below, k - 1]

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
        """The cut that has them."""
        below, k, steps = 0, devices, list[Step]()
        while below != self._lattice.size - 1:
            # As few as hold as little.
            while not self._exact and k and self.bytes[below, k - 1] == self.bytes[below, k]:
                k -= 1
            above, option = self._came[below, k].tolist()
            steps.append((below, above, option, k))
            below, k = above, k - self._problem.options[option].replicas
        return cut_of(self._problem, self._lattice.masks, steps)


def layers_bytes(problem: StageProblem) -> tuple[float, float]:
    """The least bytes of layers, messages and what several share left out, in any cut: on some
    device, by those that can't be taken apart; and on all devices together."""
    held = []
    for number, option in enumerate(problem.options):
        mode, place = problem.modes[option.mode], problem.place(number, option.replicas)
        always = mode.fixed_bytes + place.copies * problem.parameter_bytes
        held.append(always + place.units * mode.flight_bytes)
    each = np.array(held)
    alone = [each[:, list(members(group))].sum(axis=1).min() for group in joined(problem)]
    replicas = np.array([option.replicas for option in problem.options])
    return float(max(alone)), float((each * replicas[:, None]).min(axis=0).sum())
