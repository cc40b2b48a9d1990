"""Figures that the tables don't have, found by measured runs: never by the run that is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from math import inf
from statistics import median

import numpy as np

from .sailor import NOTHING, Figures, Reckoned, Run, Tables

RATES = (*(10 ** (k / 20) for k in range(180, 236)), inf)
"""1 to 560 GB/s, and at once."""


class Calibration:
    """Runs, and what is known by others of each.

    Attributes:
        doubts: per run, what of its figures can't be trusted, and why.
    """

    def __init__(self, tables: Tables, runs: Sequence[Run], others: Sequence[Run] = ()) -> None:
        """`others`: are used to find figures, and aren't judged."""
        self.tables, self.runs, self.others = tables, runs, others
        every = (*runs, *others)
        self.doubts = {run: dict(doubts(tables, run, every)) for run in every}
        self.reckoned = lru_cache(maxsize=None)(self._reckoned)
        self._figures = lru_cache(maxsize=None)(self._find_figures)
        self._period_s = lru_cache(maxsize=None)(self._find_period_s)

    def _reckoned(self, run: Run) -> Reckoned:
        return Reckoned(self.tables, run)

    @cached_property
    def clusters(self) -> list[list[Run]]:
        """Runs that have types of GPUs in common, one by another."""
        found: list[list[Run]] = []
        for run in dict.fromkeys((*self.runs, *self.others)):
            joined = [mine for mine in found if any(run.gpus & other.gpus for other in mine)]
            found = [mine for mine in found if mine not in joined]
            found.append([*(other for mine in joined for other in mine), run])
        return found

    def known_by(self, run: Run, which: str = "others") -> list[Run]:
        """Runs that figures for one may be found by: never one of the same setting.

        Args:
            which: "others": those of its cluster among `others`, if any has several stages; else
                those of another model there; else those that have other stages or another
                micro-batch; else all. "smaller": the cluster's with fewer GPUs. "elsewhere": other
                clusters'.
        """
        own = next(mine for mine in self.clusters if run in mine)
        if which == "elsewhere":
            return [r for mine in self.clusters if mine is not own for r in mine]
        own = [r for r in own if r.setting != run.setting]
        if which == "smaller":
            return [r for r in own if r.devices < run.devices]
        cut = run.stages, run.micro_batch
        ways = (
            [r for r in own if r in self.others],
            [r for r in own if r.model != run.model],
            [r for r in own if (r.stages, r.micro_batch) != cut],
        )
        return next((w for w in ways if any(len(r.stages) > 1 for r in w)), own)

    def figures(self, run: Run, which: str = "others") -> Figures:
        """Found by such runs."""
        known, elsewhere = self.known_by(run, which), self.known_by(run, "elsewhere")
        return self._figures(tuple(known), tuple(elsewhere))

    def _find_figures(self, runs: tuple[Run, ...], elsewhere: tuple[Run, ...]) -> Figures:
        sync_s, sync = self._sync(self._trusted(runs, "sync"))
        timed = [run for run in self._trusted(runs, "period") if len(run.stages) > 1]
        rate = inf
        if timed:
            rate = _least(lambda k: self._off(timed, Figures(RATES[k], sync, sync_s)))
        known, more = (self._trusted(each, "memory") for each in (runs, elsewhere))
        context, cached = self._memory(known, more)
        return Figures(rate, sync, sync_s, context, cached)

    def _trusted(self, runs: Iterable[Run], what: str) -> list[Run]:
        return [run for run in runs if what not in self.doubts[run]]

    def _sync(self, runs: Iterable[Run]) -> tuple[float, float]:
        """Of a line through rings' times and what was measured."""
        rings = [(run.sync_s, max(self.reckoned(run).pipeline.all_reduce_s)) for run in runs]
        points = [(0.0, ring, took) for took, ring in rings if took is not None and ring > 0]
        if line := _line(points, 0.0):
            return line
        ratios = [took / ring for _, ring, took in points]
        return 0.0, median(ratios) if ratios else 1.0

    def _off(self, runs: Iterable[Run], figures: Figures) -> float:
        found_s = ((run, self._period_s(run, figures)) for run in runs)
        return sum(abs(found / run.period_s - 1) for run, found in found_s)

    def _find_period_s(self, run: Run, figures: Figures) -> float:
        return self.reckoned(run).period_s(figures)

    def _memory(self, runs: Iterable[Run], elsewhere: Iterable[Run]) -> tuple[float, float]:
        """Of a line through what runs' fullest ranks keep and what was measured. Where they all
        keep about as much, it is as steep as with other clusters' runs; of few, as tensors
        alone."""
        own, more = self._kept(runs), self._kept(elsewhere)
        kept = [point[1] for point in own] or [0.0]
        if max(kept) > 2 * min(kept) and (line := _line(own, 1.0)):
            return line
        _, steep = _line([*own, *more], 1.0) or (0.0, NOTHING.cached)
        besides = [seen - held - steep * kept for held, kept, seen in own or more]
        return median(besides or [NOTHING.context_bytes]), steep

    def _kept(self, runs: Iterable[Run]) -> list[tuple[float, float, float]]:
        """What their fullest ranks hold for parameters, keep of activations, and were seen with."""
        found = [(max(self.reckoned(r).held(), key=sum), r.memory_bytes) for r in runs]
        return [(*parts, seen) for parts, seen in found if seen]


def _least(off: Callable[[int], float]) -> float:
    """The rate that is least off: the best of a few, and of those around it."""
    k = min((*range(0, len(RATES) - 1, 4), len(RATES) - 1), key=off)
    return RATES[min(range(max(k - 3, 0), min(k + 4, len(RATES))), key=off)]


def _line(points: Sequence[tuple[float, float, float]], least: float) -> tuple[float, float] | None:
    """What there is besides, and for each of the second numbers, so that both and the first make
    the third: by the least squares of relative errors. None where points are few, or it falls.

    Args:
        least: it may not be less steep.
    """
    if len(points) < 4:
        return None
    table = np.array(points)
    seen = table[:, 2]
    sides = np.stack([1 / seen, table[:, 1] / seen], axis=1)
    line, *_ = np.linalg.lstsq(sides, 1 - table[:, 0] / seen, rcond=None)
    return (float(line[0]), float(line[1])) if line[0] > 0 and line[1] >= least else None


def doubts(tables: Tables, run: Run, runs: Iterable[Run]) -> Iterable[tuple[str, str]]:
    """What of a run's figures can't be trusted, and why."""
    reckoned = Reckoned(tables, run)
    figures = (run.period_s, run.sync_s, run.memory_bytes)
    twins = [
        r
        for r in runs
        if figures == (r.period_s, r.sync_s, r.memory_bytes) and r.setting != run.setting
    ]
    if twins and run.replicas == 1 and run.sync_s:
        for what in ("period", "sync", "memory"):
            yield what, f"has {twins[0].name}'s figures"
        return
    if run.each * len(run.stages) == 1:
        yield "period", "one micro-batch: kernels wait to be launched"
    if run.sync_s is not None and run.sync_s > 0.5 * run.period_s:
        yield "sync", "is most of the iteration: replicas wait for one another"
    kept = max(kept for _, kept in reckoned.held())
    if run.memory_bytes is not None and run.memory_bytes < kept:
        yield "memory", "less than its activations"
