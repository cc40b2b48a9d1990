"""Bytes of a relaxed problem: ways to run a stage, and what each keeps of its activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import product

import numpy as np

from ....profiles.profile import Profile
from ...costs.recomputation import KeptStorages, Selection, in_steps, selections
from ...costs.stage_costs import sized
from ...partition.problem import Mode, Option, Shared, Vector
from .costs import Work
from .places import Assumptions
from .scope import Reading, Scope

_AT_ONCE = 0.5
"""Of the micro-batches in flight, those that a backward of a whole mini-batch works through."""

_ABOUT_NO_TIME = 0.05
"""Of a forward, what sets of layers may take that count as one with keeping everything."""


class LeastBytes(Scope):
    """What stages keep, in all ways of recomputation that may be chosen."""

    @cached_property
    def recompute(self) -> tuple[Selection, ...]:
        """Those ways: nothing, everything, or the layers that are computed again."""
        asked = "off" if self.variant.recompute_refusal else self.freedom.recompute
        # Without limits there is nothing to gain.
        looks = asked == "selective" or (asked == "auto" and self.limited)
        chosen = self._selections if looks else ()
        ways: dict[str, tuple[Selection, ...]] = {
            "off": (False,),
            "on": (True,),
            "selective": chosen or (False,),
            "auto": (False, *chosen, True),
        }
        return ways[asked]

    def modes(
        self, read: Reading, work: Work, once_s: Vector
    ) -> tuple[tuple[Mode, ...], tuple[Option, ...]]:
        """Ways to run stages, and with which replicas. `once_s`: of each layer, [n], the forward
        of one micro-batch."""
        n, grain, modes = read.micro_batches, read.assumed.grain, dict[object, Mode]()
        options, storages = list[Option](), self.storages(read)
        same = self.alike(once_s) if read.assumed.alike else ()
        for r, way in product(read.counts, [w for w in self.recompute if w not in same[1:]]):
            share = r if self.variant.whole_mini_batches else 1
            unit = self.unit(n, r) if way else 0.0
            key = share, unit, way
            if key not in modes:
                # Replicas of a whole mini-batch work at once, each in its own time.
                rounds, ways = n * share / grain, same if way in same else (way,)
                modes[key] = self._mode(work, r, rounds, ways, unit, storages, once_s)
            options.append(Option(r // grain, list(modes).index(key)))
        return tuple(modes.values()), tuple(options)

    def shared(self, read: Reading) -> tuple[Shared, ...]:
        """What several layers keep."""
        if not self.limited:
            return ()
        storages = self.storages(read)
        return tuple(Shared(who, storages[name]) for name, who in self.graph.savers.items())

    def _mode(
        self,
        work: Work,
        replicas: int,
        rounds: float,
        ways: tuple[Selection, ...],
        unit: float,
        storages: Mapping[str, int],
        once_s: Vector,
    ) -> Mode:
        """A way to run a stage.

        Args:
            rounds: micro-batches that its replicas share.
            ways: what is computed again; of several that count as one bytes are the least of each.
            unit: micro-batches whose activations are computed again at once.
            storages: bytes of each that several layers may keep, at the least.
        """
        costs, (recompute, *others) = work.costs[replicas], ways
        forward = costs.forward_s * work.forwards
        backward = (costs.input_s if work.inputs_only else costs.backward_s) * work.backwards
        fixed, flight = self.graph.buffer_bytes, costs.private_bytes
        if others:
            kept = self._always_kept(ways, storages)
            always = 1.0 - np.max([self._members(way) for way in ways], axis=0)
            total = rounds * (forward + backward)
            flight, last = flight * always + kept, len(self._selections)
            return Mode("least", total, fixed, flight, shared_in_flight=0.0, remade=last)
        if recompute is False:
            return Mode("plain", rounds * (forward + backward), fixed, flight)
        if recompute is not True:
            recomputed = self._members(recompute)
            backward = backward + costs.recompute_s * recomputed * work.backwards
            kept, rebuilt = self._kept_bytes(recompute, storages)
            return Mode(
                "selective",
                rounds * (forward + backward),
                fixed + unit * (flight * recomputed + rebuilt),
                flight * (1.0 - recomputed) + kept,
                shared_in_flight=0.0,
                remade=self._selections.index(recompute),
                remade_once=unit,
                recompute=recompute,
                recompute_s=once_s * recomputed,
            )
        backward = backward + forward * work.backwards
        return Mode(
            "recompute",
            rounds * (forward + backward),
            fixed + unit * flight,
            np.zeros_like(flight),
            shared_in_flight=0.0,
            shared_once=unit,
            inputs_kept=1.0,
            recompute=True,
            recompute_s=once_s,
        )

    @cached_property
    def _selections(self) -> tuple[frozenset[str], ...]:
        """Layers that may be computed again."""
        return selections(*self._choosing)

    @cached_property
    def steps(self) -> tuple[frozenset[str], ...]:
        """Layers one after another, as they are added to those."""
        return in_steps(*self._choosing)

    @property
    def _choosing(self) -> tuple[Profile, int, float]:
        profile, micro = self.graph.profile, self.variant.backward_unit == "micro"
        return profile, profile.micro_batch_sizes[0], 0.0 if micro else _AT_ONCE

    @cached_property
    def _kept(self) -> KeptStorages:
        return KeptStorages(self.graph.profile)

    def _members(self, recompute: Selection) -> Vector:
        """Which layers are in a set, [n]."""
        names = () if isinstance(recompute, bool) else recompute
        return np.array([float(name in names) for name in self.graph.names])

    def alike(self, forward_s: Vector) -> tuple[Selection, ...]:
        """Keeping everything, and sets that take about no time besides."""
        most = _ABOUT_NO_TIME * float(forward_s.sum())
        sets = (way for way in self.recompute if not isinstance(way, bool))
        found = [way for way in sets if float(forward_s @ self._members(way)) <= most]
        return (False, *found) if False in self.recompute else ()

    def _always_kept(self, ways: Iterable[Selection], storages: Mapping[str, int]) -> Vector:
        """As `_kept_bytes`, of what is kept whichever of these sets is computed again, [n]."""
        recomputed = [self._kept.positions(() if isinstance(way, bool) else way) for way in ways]
        found = np.zeros(len(self.graph.names))
        for name, nbytes in storages.items():
            keepers = set.intersection(
                *(set(self._kept.keepers(name, each)) for each in recomputed)
            )
            if keepers:
                found[min(keepers)] += nbytes
        return found

    def remade(self, *, sure: bool) -> list[frozenset[str]]:
        """For each set of layers, storages that it makes anew and that another stage keeps to which
        its own one sends them: no stage has them in flight otherwise. The last ones are those of
        each set that counts as one with keeping everything (`alike`).

        Args:
            sure: any other stage keeps them: all layers that use them save them, or are computed
                again from them (`KeptStorages.keepers`, of stages without their makers).
        """
        if all(isinstance(way, bool) for way in self.recompute):
            return []
        kept, ways = self._kept, [*map(self._kept.positions, self._selections)]
        sent = Counter(tensor.edge.storage for tensor in self.graph.tensors)
        found = [set[str]() for _ in ways]
        for name, uses in kept.uses.items():
            used, savers = {k for _, k in uses}, kept.savers.get(name, ())
            for recomputed, names in zip(ways, found, strict=True):
                certain = sent[name] == 1 and used <= recomputed.union(savers)
                if (certain if sure else name in kept.savers) and kept.is_recomputed(
                    name, recomputed
                ):
                    names.add(name)
        return [*map(frozenset, found), frozenset(set[str].intersection(*found))]

    def _kept_bytes(
        self, recompute: frozenset[str], storages: Mapping[str, int]
    ) -> tuple[Vector, Vector]:
        """Of storages that several layers may keep: bytes that are kept for each micro-batch in
        flight, and those that layers computed again make, [n] each. Each counts for one layer that
        needs it: a stage with that layer has it, whatever its other layers."""
        kept, recomputed = self._kept, self._kept.positions(recompute)
        found = np.zeros((2, len(self.graph.names)))
        for name, nbytes in storages.items():
            for layers in (kept.keepers(name, recomputed), kept.copiers(name, recomputed)):
                if layers:
                    found[0, min(layers)] += nbytes
            savers = kept.savers.get(name)
            if savers and kept.is_recomputed(name, recomputed):
                found[1, min(savers)] += nbytes
        return found[0], found[1]

    def of_layers(self, micro_batches: int) -> Vector:
        """Bytes of layers that are each on one device, with everything kept, [3, n]: what is always
        there, parameters, and what each micro-batch keeps at the least, of what several keep all by
        the first of them."""
        read = self.reading(micro_batches, Assumptions(unreplicated=True))
        storages, kept = self.storages(read), read.costs[1].private_bytes.copy()
        for name, savers in self.graph.savers.items():
            kept[(savers & -savers).bit_length() - 1] += storages[name]
        parameters = self.graph.parameter_bytes
        always = (1 + self.question.least_state_factor) * parameters + self.graph.buffer_bytes
        found: Vector = np.array([always, parameters, kept])
        return found

    def unit(self, micro_batches: int, replicas: int) -> float:
        """Micro-batches that one replica's backward works through at once."""
        if self.variant.backward_unit == "micro" or self.variant.whole_mini_batches:
            return 1.0
        return micro_batches / replicas

    def storages(self, read: Reading) -> Mapping[str, int]:
        """Bytes of storages that several layers may keep. For sure a stage that gets a view holds
        that alone."""
        size = self.size(read.micro_batches, read.most)
        found = read.costs[read.most].storages
        if read.guess:
            return found
        smallest = dict(found)
        for tensor in self.graph.tensors:
            edge = tensor.edge
            nbytes = sized(edge.fixed_bytes, edge.bytes_per_sample, size)
            smallest[edge.storage] = min(smallest[edge.storage], nbytes)
        return smallest
