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
        doubts: per run's name, what of its figures can't be trusted, and why.
    """

    def __init__(self, tables: Tables, runs: Sequence[Run], others: Sequence[Run] = ()) -> None:
        """`others`: are used to find figures, and aren't judged."""
        self.tables, self.runs, self.others = tables, runs, others
        self.doubts = {run.name: dict(doubts(tables, run, runs)) for run in (*runs, *others)}
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
        """Runs that figures for one may be found by.

        Args:
            which: "others": of another model on its cluster, if there are any with several stages;
                else the cluster's that have other stages or another micro-batch. "smaller": the
                cluster's with fewer GPUs. "elsewhere": other clusters'.
        """
        own = next(mine for mine in self.clusters if run in mine)
        if which == "elsewhere":
            return [r for mine in self.clusters if mine is not own for r in mine]
        if which == "smaller":
            return [r for r in own if r.devices < run.devices]
        models = [r for r in own if r.model != run.model]
        several = any(len(r.stages) > 1 for r in models)
        cut = run.stages, run.micro_batch
        return models if several else [r for r in own if (r.stages, r.micro_batch) != cut]

    def figures(self, run: Run, which: str = "others") -> Figures:
        """Found by such runs."""
        return self._figures(tuple(self.known_by(run, which)))

    def _find_figures(self, runs: tuple[Run, ...]) -> Figures:
        sync_s, sync = self._sync(self._trusted(runs, "sync"))
        timed = [run for run in self._trusted(runs, "period") if len(run.stages) > 1]
        rate = inf
        if timed:
            rate = _least(lambda k: self._off(timed, Figures(RATES[k], sync, sync_s)))
        context, cached = self._memory(self._trusted(runs, "memory"))
        return Figures(rate, sync, sync_s, context, cached)

    def _trusted(self, runs: Iterable[Run], what: str) -> list[Run]:
        return [run for run in runs if what not in self.doubts[run.name]]

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

    def _memory(self, runs: Sequence[Run]) -> tuple[float, float]:
        """Of a line through what runs' fullest ranks keep and what was measured; of few runs, of
        one that is as steep as tensors alone."""
        points: list[tuple[float, float, float]] = []
        for run in runs:
            if run.memory_bytes:
                held, kept = max(self.reckoned(run).held(), key=sum)
                points.append((held, kept, run.memory_bytes))
        if not points:
            return NOTHING.context_bytes, NOTHING.cached
        besides = median(seen - held - kept for held, kept, seen in points)
        return _line(points, 1.0) or (besides, 1.0)


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
    twins = [r for r in runs if r is not run and figures == (r.period_s, r.sync_s, r.memory_bytes)]
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
