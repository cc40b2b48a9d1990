"""Places of devices that are all alike, where only what is in flight depends on the place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..problem import Option, Place


class RisingPlaces:
    """`StageProblem.place` where a stage of r replicas has ⌈k / r⌉ units in flight, or a most.

    So its load is the same wherever it stands, and what it holds rises with the devices from its
    first one to the end.

    Attributes:
        alike: per option, its place with 1 unit in flight.
        copies_per_unit: of the parameters, that each further unit in flight needs.
        most: per option, units in flight at the most.
    """

    def __init__(
        self,
        options: Sequence[Option],
        place: Callable[[int], Place],
        *,
        copies_per_unit: float = 0.0,
        most: Callable[[int], float] = lambda r: float("inf"),
    ) -> None:
        """Options with r replicas mean `place(r)`, with its units and copies for 1 in flight."""
        made = {r: place(r) for r in {option.replicas for option in options}}
        self.alike = tuple(made[option.replicas] for option in options)
        self.copies_per_unit = copies_per_unit
        self.most = tuple(most(option.replicas) for option in options)
        self._replicas = tuple(option.replicas for option in options)
        self._made: dict[tuple[int, float], Place] = {}

    def __call__(self, option: int, k: int) -> Place:
        """See `StageProblem.place`."""
        r = self._replicas[option]
        key = (r, min(-(-k // r), self.most[option]))
        found = self._made.get(key)
        if found is None:
            place, units = self.alike[option], key[1]
            copies = place.copies + self.copies_per_unit * (units - 1)
            found = replace(place, units=place.units * units, copies=copies)
            self._made[key] = found
        return found

    def changed(
        self, options: Sequence[Option], change: Callable[[Place, int], Place]
    ) -> RisingPlaces:
        """Places that are each changed by a function of theirs and of r.

        Args:
            options: those that these places were made for.
            change: leaves units and copies as they are.
        """
        pairs = zip(options, self.alike, self.most, strict=True)
        found = {o.replicas: (change(place, o.replicas), most) for o, place, most in pairs}
        return RisingPlaces(
            options,
            lambda r: found[r][0],
            copies_per_unit=self.copies_per_unit,
            most=lambda r: found[r][1],
        )
