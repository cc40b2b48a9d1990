"""The search around the cut: stage count, micro-batch count and in-flight limits.

For every stage count and micro-batch count a lower bound on the period is found first, by the
dynamic program under the least memory any order needs. Combinations are tried from the lowest
bound on; the search ends when no bound is below the best plan found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..profiles.errors import InfeasibleError, PlanError
from ..profiles.profile import Profile
from ..profiles.units import format_bytes
from .cluster import Cluster
from .cut_tables import CutTables, Matrix, cut_tables
from .downsets import Lattice, lattice_of
from .evaluate import Evaluation, Question, evaluate
from .orders import make_order
from .partition import (
    FlushTerms,
    flush_bound,
    flush_time,
    smallest_bottleneck,
    smallest_flush_time,
)
from .pipeline import Link, Pipeline
from .plan import (
    Plan,
    PlanEdge,
    PlanStage,
    ProfileReference,
    SolverReport,
    check_plan,
)
from .simulate import warm_mini_batches
from .stage_costs import RECEIVES_AHEAD
from .variants import Variant, variant_named
from .versions import version_use

Progress = Callable[[str, int, int], None]

_SAME = 1 + 1e-9


@dataclass(frozen=True)
class InFlight:
    """What a stage holds at its order's peak, as far as it is known before the cut."""

    micro_batches: int
    versions: int


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


def make_plan(question: Question, found: Evaluation, report: SolverReport) -> Plan:
    """The plan file's content for an evaluated cut."""
    profile = question.profile
    return check_plan(
        Plan(
            variant=question.variant,
            mini_batch=question.mini_batch,
            micro_batches=found.micro_batches,
            profile=ProfileReference(
                target=profile.target,
                fingerprint=profile.fingerprint,
                device=profile.device,
                threads=profile.threads,
                dtype=profile.dtype,
            ),
            cluster=question.cluster,
            optimizer_state_factor=question.optimizer_state_factor,
            stages=tuple(
                PlanStage(nodes=names, devices=(s,), in_flight=limit)
                for s, (names, limit) in enumerate(zip(found.stages, found.limits, strict=True))
            ),
            edges=tuple(
                PlanEdge(
                    tensor=c.tensor,
                    source=c.source,
                    target=c.target,
                    bytes_per_micro_batch=c.nbytes,
                    needs_grad=c.needs_grad,
                )
                for c in found.crossed
            ),
            predicted=found.prediction,
            solver=report,
        )
    )


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
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    counts = [asked] if asked is not None else divisors
    measured = [n for n in counts if sizes[0] <= batch // n <= sizes[-1]]
    if not measured:
        raise PlanError(
            f"mini-batch {batch}: micro-batches of {sorted(batch // n for n in counts)} samples "
            f"are asked for, the profile measured {sizes[0]} to {sizes[-1]}; profile again with "
            "--batch-size and --micro-batch-sizes that reach them"
        )
    yield from measured


class _Search:
    def __init__(self, question: Question, lattice: Lattice) -> None:
        self.question = question
        self.variant = variant_named(question.variant)
        self.lattice = lattice
        self.tried = 0
        self._tables: dict[int, CutTables] = {}

    def run(
        self, stage_counts: Sequence[int], micro_counts: Sequence[int], progress: Progress
    ) -> tuple[Evaluation, float]:
        """The best evaluation, and the lower bound over all that was asked for."""
        cases = [(s, n) for s in stage_counts for n in micro_counts]
        bounds = {}
        for done, (s, n) in enumerate(cases):
            progress(f"bounds: {s} stages, {n} micro-batches", done, 2 * len(cases))
            bounds[s, n] = self._bound(s, n)
        best: Evaluation | None = None
        for done, (s, n) in enumerate(sorted(bounds, key=lambda case: (bounds[case], case))):
            progress(f"plans: {s} stages, {n} micro-batches", len(cases) + done, 2 * len(cases))
            ceiling = best.prediction.period_s if best else np.inf
            if not np.isfinite(bounds[s, n]) or bounds[s, n] * _SAME >= ceiling:
                break
            bounds[s, n] = max(bounds[s, n], self._slow_bound(s, n))
            for evaluation in self._plans(s, n, bounds[s, n]):
                if best is None or _better(evaluation, best):
                    best = evaluation
        if best is None:
            raise self._infeasible(stage_counts, micro_counts)
        return self._tighten(best), min(bounds.values())

    def tables(self, micro_batches: int) -> CutTables:
        """Stage costs for this micro-batch count; made once."""
        size = self.question.mini_batch // micro_batches
        if size not in self._tables:
            self._tables[size] = cut_tables(self.question.profile, self.lattice, size)
        return self._tables[size]

    # One stage count and micro-batch count -------------------------------------------------

    def _bound(self, stages: int, micro_batches: int) -> float:
        """No order of any cut into so many stages has a shorter period."""
        if not self.lattice.complete:
            return self._share(stages, micro_batches)
        if self.variant.flushes and self.lattice.ordered:
            return flush_bound(self._least_terms(stages, micro_batches), micro_batches)
        allowed = self._allowed(stages, micro_batches, self._least_held(stages, micro_batches))
        loads = self._loads(stages, micro_batches, allowed, wires=self._pure_chain)
        found = smallest_bottleneck(loads)
        return found[0] if found else np.inf

    def _slow_bound(self, stages: int, micro_batches: int) -> float:
        """A sharper bound where one is known; made only for what the quick one can't exclude."""
        if not (self.variant.flushes and self.lattice.ordered and self.lattice.complete):
            return 0.0
        terms = self._least_terms(stages, micro_batches)
        found = _best_flush_cut(terms, micro_batches)
        return found[0] if found else np.inf

    def _least_terms(self, stages: int, micro_batches: int) -> list[FlushTerms]:
        held = self._least_held(stages, micro_batches)
        allowed = self._allowed(stages, micro_batches, held)
        # Where tensors skip layers, links share the load in ways the program doesn't see:
        # transfers are then left out of the bound.
        return self._flush_terms(stages, micro_batches, allowed, wires=self._pure_chain)

    def _share(self, stages: int, micro_batches: int) -> float:
        """All the work spread evenly over the devices: a bound for cuts that aren't listed."""
        t = self.tables(micro_batches)
        speed = sum(device.speed for device in self.question.cluster.devices[:stages])
        return float(micro_batches * (t.forward_s[0, -1] + t.backward_s[0, -1])) / speed

    def _plans(self, stages: int, micro_batches: int, bound: float) -> Iterator[Evaluation]:
        """Feasible plans for several in-flight limits, until one reaches the bound."""
        seen = set()
        for limits in _limit_candidates(self.variant, stages):
            for held in self._held(stages, micro_batches, limits):
                cut = self._cut(stages, micro_batches, held)
                if cut is None or (cut, limits) in seen:
                    continue
                seen.add((cut, limits))
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
        return evaluate(self.question, self._names(cut), micro_batches, limits)

    def _names(self, cut: Sequence[int]) -> list[list[str]]:
        names = [layer.name for layer in self.question.profile.layers]
        member = self.lattice.member
        stages, below = [], np.zeros(len(names), dtype=np.bool_)
        for downset in cut:
            inside = member[downset] & ~below
            stages.append([names[k] for k in np.flatnonzero(inside)])
            below = member[downset]
        return stages

    def _cut(
        self, stages: int, micro_batches: int, held: Sequence[InFlight]
    ) -> tuple[int, ...] | None:
        allowed = self._allowed(stages, micro_batches, held)
        if self.variant.flushes:
            terms = self._flush_terms(stages, micro_batches, allowed, wires=True)
            found = _best_flush_cut(terms, micro_batches)
        else:
            loads = self._loads(stages, micro_batches, allowed, wires=True)
            tables = self.tables(micro_batches)
            crossing = tables.in_bytes + tables.in_grad_bytes
            found = smallest_bottleneck(loads, [crossing] * stages)
        return tuple(found[1]) if found else None

    def _least_held(self, stages: int, micro_batches: int) -> list[InFlight]:
        """What any order of any system has at its peak: a mini-batch, when its backward begins."""
        return [InFlight(micro_batches, 1)] * stages

    def _held(
        self, stages: int, micro_batches: int, limits: tuple[int, ...]
    ) -> Iterator[list[InFlight]]:
        """Guesses of what is in flight at each stage's peak, before its order is known.

        At the least; as in an order with equal stages; and at the most.
        """
        yield self._least_held(stages, micro_batches)
        if self.variant.flushes:
            return
        yield self._held_by_equal_stages(stages, micro_batches, limits)
        stashes = self.variant.backward_weights == "forward"
        yield [
            InFlight(limit * micro_batches, limit if stashes else min(limit, 2)) for limit in limits
        ]

    def _held_by_equal_stages(
        self, stages: int, micro_batches: int, limits: tuple[int, ...]
    ) -> list[InFlight]:
        equal = Pipeline(
            variant=self.variant,
            micro_batches=micro_batches,
            forward_s=(1.0,) * stages,
            backward_s=(2.0,) * stages,
            update_s=(0.0,) * stages,
            links=tuple(Link(s, s + 1, 0.0, 0.0, 0.0) for s in range(stages - 1)),
            limits=limits,
        )
        held = []
        for ops in make_order(equal, warm_mini_batches(stages)):
            kept = most = 0
            for op in ops:
                if op.kind == "F":
                    kept += 1
                elif op.kind == "B":
                    kept -= micro_batches if op.micro_batch is None else 1
                most = max(most, kept)
            use = version_use(self.variant, micro_batches, ops)
            held.append(InFlight(most, use.most_held))
        return held

    # Matrices ------------------------------------------------------------------------------

    @property
    def _pure_chain(self) -> bool:
        """Every tensor goes to the next layer alone, so that a cut has one link."""
        names = [layer.name for layer in self.question.profile.layers]
        following = dict(zip(names, [*names[1:], "output"], strict=True))
        return all(e.consumer == following[e.producer] for e in self.question.profile.edges)

    def memory(self, micro_batches: int, held: InFlight) -> Matrix:
        """Peak bytes of every possible stage with this much in flight."""
        t = self.tables(micro_batches)
        unit = micro_batches if self.variant.backward_unit == "mini" else 1
        copies = 1 + held.versions + self.question.optimizer_state_factor
        incoming = RECEIVES_AHEAD["F"] * t.in_bytes + 2 * unit * t.in_grad_bytes
        # Activations awaiting their sending often are kept anyway; the walk counts the rest.
        outgoing = (RECEIVES_AHEAD["B"] + 1) * unit * t.out_grad_bytes
        return (
            copies * t.parameter_bytes
            + t.buffer_bytes
            + held.micro_batches * t.kept_bytes
            + t.workspace_bytes
            + incoming
            + outgoing
        )

    def _allowed(
        self, stages: int, micro_batches: int, held: Sequence[InFlight]
    ) -> list[np.ndarray[tuple[int, int], np.dtype[np.bool_]]]:
        valid = self.tables(micro_batches).valid
        allowed = []
        for s in range(stages):
            limit = self.question.cluster.devices[s].memory_bytes
            fits = (
                valid if limit is None else valid & (self.memory(micro_batches, held[s]) <= limit)
            )
            allowed.append(fits)
        return allowed

    def _loads(
        self,
        stages: int,
        micro_batches: int,
        allowed: Sequence[np.ndarray[tuple[int, int], np.dtype[np.bool_]]],
        *,
        wires: bool,
    ) -> list[Matrix]:
        """Per stage, busy time per mini-batch of the device, or of the wire below it."""
        t = self.tables(micro_batches)
        network = self.question.cluster.network
        loads = []
        for s in range(stages):
            speed = self.question.cluster.devices[s].speed
            work = micro_batches * (t.forward_s + t.backward_s) + t.update_s
            load = work / speed
            if wires and s:
                for crossing in (t.in_bytes, t.in_grad_bytes):
                    wire = micro_batches * crossing / network.bandwidth_bytes_per_s
                    load = np.maximum(load, wire)
            loads.append(np.where(allowed[s], load, np.inf))
        return loads

    def _flush_terms(
        self,
        stages: int,
        micro_batches: int,
        allowed: Sequence[np.ndarray[tuple[int, int], np.dtype[np.bool_]]],
        *,
        wires: bool,
    ) -> list[FlushTerms]:
        t = self.tables(micro_batches)
        network = self.question.cluster.network
        terms = []
        for s in range(stages):
            speed = self.question.cluster.devices[s].speed
            forward, backward = t.forward_s / speed, t.backward_s / speed
            total = forward + backward
            if wires and s:
                wire = t.in_bytes / network.bandwidth_bytes_per_s
                wire_back = t.in_grad_bytes / network.bandwidth_bytes_per_s
                total = total + wire + wire_back + 2 * network.latency_s
                forward, backward = np.maximum(forward, wire), np.maximum(backward, wire_back)
            if s == 0:
                # Stage 0's backwards end last; the others update while it still works.
                total = total + t.update_s / speed
            terms.append(FlushTerms(np.where(allowed[s], total, np.inf), forward, backward))
        return terms

    # After the search ----------------------------------------------------------------------

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

    def _infeasible(
        self, stage_counts: Sequence[int], micro_counts: Sequence[int]
    ) -> InfeasibleError:
        """Find the cut that comes closest, and say what it lacks."""
        closest: tuple[int, int, Evaluation] | None = None
        for stages in stage_counts:
            for n in micro_counts:
                least = self._least_held(stages, n)[0]
                memory = np.where(self.tables(n).valid, self.memory(n, least), np.inf)
                limits = [self.question.cluster.devices[s].memory_bytes for s in range(stages)]
                over = [
                    np.maximum(memory - limit, 0) if limit is not None else memory * 0
                    for limit in limits
                ]
                over = [np.where(np.isfinite(memory), o, np.inf) for o in over]
                found = smallest_bottleneck(over)
                if found is None:
                    continue
                narrow = _limit_candidates(self.variant, stages)[-1]
                tried = self._evaluate(tuple(found[1]), n, narrow)
                missing = tried.over_limit(self.question.cluster)
                if missing:
                    stage, count = max(missing, key=lambda item: item[1])
                    if closest is None or count < closest[1]:
                        closest = (stage, count, tried)
        if closest is None:
            return InfeasibleError("no plan fits: the graph can't be cut as asked")
        stage, missing_bytes, tried = closest
        names = tried.stages[stage]
        limit = self.question.cluster.devices[stage].memory_bytes or 0
        return InfeasibleError(
            f"no plan fits: the closest ({len(tried.stages)} stages, {tried.micro_batches} "
            f"micro-batches) lacks {missing_bytes} bytes ({format_bytes(missing_bytes)}) on "
            f"stage {stage} ({names[0]} … {names[-1]}): it needs "
            f"{format_bytes(limit + missing_bytes)} of {format_bytes(limit)}. Raise --memory, add "
            "devices, or take a smaller --mini-batch",
            stage=stage,
            missing_bytes=missing_bytes,
        )


def _best_flush_cut(
    terms: Sequence[FlushTerms], micro_batches: int
) -> tuple[float, list[int]] | None:
    """The exact program, below what a cut with balanced stages reaches."""
    loads = [
        np.where(np.isfinite(term.total_s), term.forward_s + term.backward_s, np.inf)
        for term in terms
    ]
    balanced = smallest_bottleneck(loads, [term.total_s for term in terms])
    if balanced is None:
        return None
    ceiling = flush_time(terms, micro_batches, balanced[1])
    return smallest_flush_time(terms, micro_batches, ceiling)


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
