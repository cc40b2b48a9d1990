"""The search around the cut: stage count, micro-batch count and in-flight limits.

For every stage count and micro-batch count a lower bound on the period is found first, by the
dynamic program under the least memory any order needs. Combinations are tried from the lowest
bound on; the search ends when no bound is below the best plan found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..profiles.errors import InfeasibleError, PlanError
from ..profiles.profile import Profile
from ..profiles.units import format_bytes
from .cluster import Cluster
from .cut_finder import CutFinder
from .downsets import Lattice, lattice_of
from .evaluate import Evaluation, Question, evaluate, make_plan
from .plan import MAX_MICRO_BATCHES, Plan, SolverReport
from .variants import Variant, variant_named

Progress = Callable[[str, int, int], None]

_SAME = 1 + 1e-9


def solve(
    profile: Profile,
    cluster: Cluster,
    variant: str = "timeprest",
    *,
    mini_batch: int | None = None,
    micro_batches: int | None = None,
    stages: int | None = None,
    optimizer_state_factor: float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find the plan with the shortest period that fits every device's memory.

    Args:
        mini_batch: samples per update; the profile's by default.
        micro_batches: N; by default every divisor of the mini-batch whose micro-batch size
            the profile measured.
        stages: S; by default every count up to the number of devices.
        optimizer_state_factor: bytes of optimizer state per byte of parameters; the
            profile's by default.

    Raises:
        PlanError: settings that contradict each other or the profile.
        InfeasibleError: nothing fits; names the stage that lacks memory and how much.
    """
    begin = time.perf_counter()
    factor = (
        profile.optimizer.state_bytes_per_parameter_byte
        if optimizer_state_factor is None
        else optimizer_state_factor
    )
    question = Question(profile, cluster, variant, mini_batch or profile.batch_size, factor)
    search = _Search(question, lattice_of(profile))
    found, bound = search.run(
        list(_stage_counts(question, search.lattice, stages)),
        list(_micro_batch_counts(question, micro_batches)),
        progress or (lambda *_: None),
    )
    objective = found.prediction.period_s
    proven = objective <= bound * _SAME
    report = SolverReport(
        method="dp",
        objective_s=objective,
        bound_s=min(bound, objective),
        gap=0.0 if proven else (objective / bound - 1 if bound > 0 else 1.0),
        optimal=proven,
        plans_tried=search.tried,
        seconds=round(time.perf_counter() - begin, 3),
    )
    return make_plan(question, found, report)


def _stage_counts(question: Question, lattice: Lattice, asked: int | None) -> Iterator[int]:
    devices, layers = len(question.cluster.devices), len(question.profile.layers)
    most = min(devices, layers, len(lattice.member) - 1)
    if asked is None:
        yield from range(1, most + 1)
        return
    if asked > devices:
        raise PlanError(f"--stages {asked}: the cluster has only {devices} devices")
    if asked > most:
        tied = "; tied layers must stay together" if question.profile.tied else ""
        raise PlanError(
            f"--stages {asked}: the model can be cut into {most} stages at most "
            f"({layers} layers{tied})"
        )
    yield asked


def _micro_batch_counts(question: Question, asked: int | None) -> Iterator[int]:
    variant = variant_named(question.variant)
    batch, sizes = question.mini_batch, question.profile.micro_batch_sizes
    if variant.whole_mini_batches:
        if asked not in (None, 1):
            raise PlanError(
                f"--micro-batches {asked}: {variant.name} runs whole mini-batches; leave it out"
            )
        asked = 1
    if asked is not None and batch % asked:
        raise PlanError(f"--micro-batches {asked}: doesn't divide the mini-batch of {batch}")
    within = [m for m in range(sizes[0], sizes[-1] + 1) if batch % m == 0]
    counts = sorted(batch // m for m in within if asked in (None, batch // m))
    if not counts:
        size = f"of {batch // asked} samples " if asked else ""
        raise PlanError(
            f"mini-batch {batch}: micro-batches {size}are asked for that the profile didn't "
            f"measure: it has {sizes[0]} to {sizes[-1]} samples; profile again with --batch-size "
            "and --micro-batch-sizes that reach them"
        )
    if counts[0] > MAX_MICRO_BATCHES:
        raise PlanError(
            f"mini-batch {batch}: would have {counts[0]} micro-batches; {MAX_MICRO_BATCHES} are "
            "the most"
        )
    yield from (n for n in counts if n <= MAX_MICRO_BATCHES)


class _Search:
    def __init__(self, question: Question, lattice: Lattice) -> None:
        self.question = question
        self.variant = variant_named(question.variant)
        self.lattice = lattice
        self.finder = CutFinder(question, lattice)
        self.tried = 0

    def run(
        self, stage_counts: Sequence[int], micro_counts: Sequence[int], progress: Progress
    ) -> tuple[Evaluation, float]:
        """The best evaluation, and the lower bound over all that was asked for."""
        cases = [(s, n) for s in stage_counts for n in micro_counts]
        bounds = {}
        for done, (s, n) in enumerate(cases):
            progress(f"bounds: {s} stages, {n} micro-batches", done, 2 * len(cases))
            bounds[s, n] = self.finder.bound(s, n)
        best: Evaluation | None = None
        for done, (s, n) in enumerate(sorted(bounds, key=lambda case: (bounds[case], case))):
            progress(f"plans: {s} stages, {n} micro-batches", len(cases) + done, 2 * len(cases))
            ceiling = best.prediction.period_s if best else np.inf
            if not np.isfinite(bounds[s, n]) or bounds[s, n] * _SAME >= ceiling:
                break
            bounds[s, n] = max(bounds[s, n], self.finder.slow_bound(s, n))
            for evaluation in self._plans(s, n, bounds[s, n]):
                if best is None or _better(evaluation, best):
                    best = evaluation
        if best is None:
            best = self._closest(stage_counts, micro_counts)
        return self._tighten(best), min(bounds.values())

    def _plans(self, stages: int, micro_batches: int, bound: float) -> Iterator[Evaluation]:
        """Feasible plans for several in-flight limits, until one reaches the bound."""
        for limits in _limit_candidates(self.variant, stages):
            for cut in self.finder.cuts(stages, micro_batches, limits):
                found = self._evaluate(cut, micro_batches, limits)
                if not found.over_limit(self.question.cluster):
                    yield found
                    if found.prediction.period_s <= bound * _SAME:
                        return
                    break

    def _evaluate(
        self, cut: tuple[int, ...], micro_batches: int, limits: Sequence[int]
    ) -> Evaluation:
        self.tried += 1
        return evaluate(self.question, self.finder.names(cut), micro_batches, limits)

    def _tighten(self, best: Evaluation) -> Evaluation:
        """Smallest in-flight limits that keep the period."""
        if self.variant.flushes:
            return best
        for s in range(len(best.limits)):
            while best.limits[s] > (best.limits[s + 1] if s + 1 < len(best.limits) else 1):
                limits = list(best.limits)
                limits[s] -= 1
                self.tried += 1
                found = evaluate(self.question, best.stages, best.micro_batches, limits)
                if found.prediction.period_s > best.prediction.period_s * _SAME:
                    break
                best = found
        return best

    def _closest(self, stage_counts: Sequence[int], micro_counts: Sequence[int]) -> Evaluation:
        """The cut that comes closest to fitting, if it does fit after all.

        Raises InfeasibleError saying what it lacks.
        """
        closest: tuple[int, int, Evaluation] | None = None
        for stages in stage_counts:
            for n in micro_counts:
                cut = self.finder.closest_cut(stages, n)
                if cut is None:
                    continue
                narrow = _limit_candidates(self.variant, stages)[-1]
                tried = self._evaluate(cut, n, narrow)
                missing = tried.over_limit(self.question.cluster)
                if not missing:
                    return tried
                stage, count = max(missing, key=lambda item: item[1])
                if closest is None or count < closest[1]:
                    closest = (stage, count, tried)
        if closest is None:
            raise InfeasibleError("no plan fits: the graph can't be cut as asked")
        stage, missing_bytes, tried = closest
        names = tried.stages[stage]
        limit = self.question.cluster.devices[stage].memory_bytes or 0
        raise InfeasibleError(
            f"no plan fits: the closest ({len(tried.stages)} stages, {tried.micro_batches} "
            f"micro-batches) lacks {missing_bytes} bytes ({format_bytes(missing_bytes)}) on "
            f"stage {stage} ({names[0]} … {names[-1]}): it needs "
            f"{format_bytes(limit + missing_bytes)} of {format_bytes(limit)}. Raise --memory, add "
            "devices, or take a smaller --mini-batch",
            stage=stage,
            missing_bytes=missing_bytes,
        )


def _better(found: Evaluation, best: Evaluation) -> bool:
    """A shorter period; at the same period fewer stages, then less memory."""

    def rank(e: Evaluation) -> tuple[int, int]:
        return len(e.stages), max(stage.memory_bytes for stage in e.prediction.stages)

    mine, its = found.prediction.period_s, best.prediction.period_s
    if mine * _SAME < its or its * _SAME < mine:
        return mine < its
    return rank(found) < rank(best)


def _limit_candidates(variant: Variant, stages: int) -> list[tuple[int, ...]]:
    """In-flight limits to try, from those that hide everything to one mini-batch at a time."""
    depth = [stages - 1 - s for s in range(stages)]
    if variant.flushes:
        return [(1,) * stages]
    full = tuple(1 + d for d in depth)
    # Room for messages under way: a slow link needs more mini-batches in flight.
    roomy = [tuple(1 + 2 * d for d in depth)] if variant.order == "nf1b" else []
    narrower = [tuple(min(1 + d, most) for d in depth) for most in range(stages - 1, 0, -1)]
    return list(dict.fromkeys([full, *roomy, *narrower]))
