"""What each option means at each place, as arrays: asked of the problem once, when needed."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..problem import StageProblem, Vector

Positions = NDArray[np.intp]

WHOLE = 40_000
"""With more options × places than this, only those that come up are asked for."""

FIELDS = (
    "speed",
    "sync_s",
    "sync_s_per_byte",
    "lower_scale",
    "upper_scale",
    "memory_bytes",
    "units",
    "copies",
)
LOADS = slice(0, 5)
"""The fields that make loads; the others make bytes."""


class Places:
    """The problem's places.

    Attributes:
        devices: K.
        replicas, mode: per option, [O].
        usable: positions of options with no more replicas than devices.
        whole: all places have been asked for.
        limited: memory may be limited.
        loads_vary, bytes_vary: loads, or what fits the memory, may depend on k.
    """

    def __init__(self, problem: StageProblem, *, every: bool = False) -> None:
        """Ask for all places where they are few, or if `every` one is wanted."""
        self._place = problem.place
        self.devices = problem.devices
        self.replicas: Positions = np.array([o.replicas for o in problem.options], dtype=np.intp)
        self.mode: Positions = np.array([o.mode for o in problem.options], dtype=np.intp)
        self.usable: Positions = np.flatnonzero(self.replicas <= self.devices)
        shape = (len(self.replicas), self.devices + 1)
        self._table: Vector = np.zeros((len(FIELDS), *shape))
        self._known = np.zeros(shape, dtype=np.bool_)
        allowed = np.arange(self.devices + 1) >= self.replicas[:, None]
        self.whole = every or int(allowed.sum()) <= WHOLE
        self._same: list[float | None] = [None] * len(FIELDS)
        self.loads_vary = self.bytes_vary = self.limited = True
        if self.whole:
            self.ask(*np.nonzero(allowed))
            self._compare(self._table[:, allowed])

    def _compare(self, places: Vector) -> None:
        """Find out what all places have in common, [8, places]."""
        for number, values in enumerate(places):
            if len(values) and bool((values == values[0]).all()):
                self._same[number] = float(values[0])
        # Where an option has more replicas than k there is no place.
        last = np.where(self._known, self._table[..., -1:], self._table)
        varies = (self._table != last).any(axis=(1, 2)).tolist()
        self.limited = bool(np.isfinite(places[FIELDS.index("memory_bytes")]).any())
        self.loads_vary = any(varies[LOADS])
        self.bytes_vary = self.limited and any(varies[LOADS.stop :])

    @property
    def same(self) -> bool:
        """Whether an option is the same at all places."""
        return not (self.loads_vary or self.bytes_vary)

    def ask(self, option: Positions, k: Positions) -> None:
        """Make options known at places, [p] each; replicas ≤ k."""
        new = ~self._known[option, k]
        for o, at in zip(option[new].tolist(), k[new].tolist(), strict=True):
            if not self._known[o, at]:
                self._known[o, at] = True
                place = self._place(o, at)
                self._table[:, o, at] = [getattr(place, field) for field in FIELDS]

    def get(self, field: str, option: Positions, k: Positions) -> Vector | float:
        """A field of `Place` of options at places that are known, [p]; a float if all have it."""
        number = FIELDS.index(field)
        same = self._same[number]
        if same is not None:
            return same
        found: Vector = self._table[number, option, k]
        return found

    def field(self, name: str, option: int) -> Vector:
        """A field of `Place` for an option, for k from its replicas to K; all must be known."""
        found: Vector = self._table[FIELDS.index(name), option, self.replicas[option] :]
        return found

    @cached_property
    def fastest(self) -> float:
        """No option's place is faster: its speed is that of its slowest device, which counts for
        any smaller option on some of the same devices."""
        if not len(self.usable):
            return 1.0
        r = int(self.replicas[self.usable].min())
        k = np.arange(r, self.devices + 1)
        speeds = []
        for option in np.flatnonzero(self.replicas == r).tolist():
            self.ask(np.full(len(k), option), k)
            speeds.append(float(self.field("speed", option).max()))
        return max(speeds)

    def rates(self, target: float) -> tuple[Vector, Vector]:
        """Work, in s at speed 1, that stages with loads up to `target` can do.

        Returns:
            For each k from 0 to K: at most on the last k devices, and at most on all but those.
        """
        k = np.arange(self.devices + 1.0)
        if not self.whole:
            return k * self.fastest * target, k[::-1] * self.fastest * target
        speed = self._table[FIELDS.index("speed")]
        return self.added(self.replicas[:, None] * speed * target)

    def added(self, gains: Vector) -> tuple[Vector, Vector]:
        """The most that stages' gains can add up to, as `rates`.

        Args:
            gains: of an option with its first device the k-th from the end, [O, K + 1].
        """
        ahead, behind = np.zeros(self.devices + 1), np.zeros(self.devices + 1)
        for at in range(1, self.devices + 1):
            can = self.usable[self.replicas[self.usable] <= at]
            r = self.replicas[can]
            # `at` counts devices from the list's end for the one, from its start for the other.
            for row, first in ((ahead, at), (behind, self.devices - at + r)):
                row[at] = max(row[at - 1], (gains[can, first] + row[at - r]).max(initial=0.0))
        return ahead, behind[::-1]

    def memory(self, copies: float, units: float) -> Vector:
        """Bytes that stages can hold at most, counted with so many copies and units, [O, K + 1].

        0 where an option has more replicas than k.
        """
        table = dict(zip(FIELDS, self._table, strict=True))
        most = np.ones_like(table["units"])
        for wanted, field in ((copies, "copies"), (units, "units")):
            if wanted > 0:
                ratio = np.full_like(most, np.inf)
                np.divide(wanted, table[field], out=ratio, where=self._known & (table[field] > 0))
                most = np.maximum(most, ratio)
        known = np.where(self._known, table["memory_bytes"], 0.0)
        counted: Vector = np.multiply(known, most, out=np.zeros_like(known), where=known > 0)
        return counted
