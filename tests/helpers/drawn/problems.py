"""Small cut problems drawn by hypothesis, and their answer by trying everything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from timeprest.planner.partition.dp.minimax import minimax_with_bound
from timeprest.planner.partition.problem import (
    ChosenStage,
    Cut,
    CutTensor,
    Mode,
    Option,
    OutOfTime,
    Place,
    Shared,
    StageProblem,
    fits,
    members,
    stage_load,
)

INF = math.inf


def all_cuts(problem: StageProblem, enough: Callable[[], float] = lambda: INF) -> Iterator[Cut]:
    """Every chain of downsets with every option at every place, straight from the definition.

    Those whose load isn't under `enough` are left out; it may fall on the way.
    """
    downsets = [d for d in range(problem.full + 1) if is_downset(problem, d)]

    def extend(below, k, stages, worst):
        if worst >= enough():
            return
        if below == problem.full:
            if problem.stages in (None, len(stages)):
                yield Cut(tuple(stages), worst)
            return
        if problem.stages == len(stages):
            return
        for above in downsets:
            inside = above & ~below
            if below & ~above or not inside:
                continue
            if any((len(stages) == s) != bool(inside >> j & 1) for j, s in problem.pins):
                continue
            for o, option in enumerate(problem.options):
                for here in range(k, option.replicas - 1, -1):
                    if fits(problem, below, inside, o, here):
                        load = stage_load(problem, below, inside, o, here)
                        stage = ChosenStage(inside, o, here)
                        left = here - option.replicas
                        yield from extend(above, left, [*stages, stage], max(worst, load))

    return extend(0, problem.devices, [], 0.0)


def brute_force(problem: StageProblem) -> Cut | None:
    """The best of all cuts."""
    better: list[Cut] = []
    for cut in all_cuts(problem, lambda: better[-1].objective_s if better else INF):
        better.append(cut)
    return better[-1] if better else None


def numbers(draw, n, most):
    return np.array([draw(st.integers(0, most)) for _ in range(n)], dtype=float)


@st.composite
def drawn_needs(draw, n):
    """Bit masks of a DAG: mostly chains with branches, some layers with no need at all."""
    needs = []
    for j in range(n):
        mask = 0
        if j:
            for _ in range(draw(st.sampled_from([1, 1, 1, 2, 0]))):
                mask |= 1 << (j - 1 if draw(st.booleans()) else draw(st.integers(0, j - 1)))
        needs.append(mask)
    return tuple(needs)


@st.composite
def drawn_problems(draw, most=7, devices=4):
    """StageProblems of every kind: memory, replicas, modes, unequal devices, pins."""
    n = draw(st.integers(1, most))
    needs = draw(drawn_needs(n))
    tensors = []
    for j in range(n):
        users = [u for u in range(n) if needs[u] >> j & 1]
        if not users or draw(st.integers(0, 5)) == 0:
            users.append(n)
        groups = [users] if draw(st.booleans()) else [[u] for u in users]
        for group in groups:
            lower, upper, held, kept = (draw(st.integers(0, 20)) for _ in range(4))
            ends = 1 << j | sum(1 << u for u in group)
            tensors.append(CutTensor(ends, lower, upper, held, held, kept))
    shared = tuple(
        Shared(draw(st.integers(1, (1 << n) - 1)), draw(st.integers(0, 20)))
        for _ in range(draw(st.integers(0, 2)))
    )
    plain = Mode("plain", numbers(draw, n, 40), numbers(draw, n, 5), numbers(draw, n, 20))
    modes = [plain]
    if draw(st.booleans()):
        more = plain.compute_s * 1.5
        modes.append(Mode("recompute", more, plain.fixed_bytes, plain.flight_bytes * 0.2, 0, 1, 1))
    count = draw(st.integers(1, devices))
    most_replicas = draw(st.integers(1, count))
    options = tuple(Option(r, m) for m in range(len(modes)) for r in range(1, most_replicas + 1))
    if draw(st.integers(0, 3)) == 0:
        # As where replicas share a mini-batch's samples: each number of them has modes of its own.
        shares = [Mode("plain", m.compute_s, m.fixed_bytes, m.flight_bytes * 0.5) for m in modes]
        options = tuple(Option(o.replicas, o.mode + len(modes) * (o.replicas > 1)) for o in options)
        modes += shares
    equal = draw(st.booleans())
    speeds = [1.0 if equal else draw(st.sampled_from([0.5, 1.0, 2.0])) for _ in range(count)]
    limit = draw(st.sampled_from([float("inf"), 300.0, 150.0, 60.0]))
    limits = [limit if equal else draw(st.sampled_from([limit, limit / 2])) for _ in range(count)]
    staged = draw(st.booleans())
    sync = draw(st.sampled_from([0.0, 0.1, 1.0]))

    def place(o, k):
        r = options[o].replicas
        mine = slice(count - k, count - k + r)
        in_flight = -(-k // r) if staged else 1
        return Place(
            speed=min(speeds[mine]),
            memory_bytes=min(limits[mine]),
            sync_s=sync * (r - 1),
            sync_s_per_byte=sync * (r - 1) / r,
            lower_scale=1 / r,
            upper_scale=1 / r if equal else 1.0,
            units=in_flight,
            copies=1 + in_flight if staged else 2,
        )

    stages = draw(st.one_of(st.none(), st.integers(1, min(n, count))))
    pins = ()
    if stages and draw(st.integers(0, 3)) == 0:
        pins = ((draw(st.integers(0, n - 1)), draw(st.integers(0, stages - 1))),)
    together = ()
    if n > 2 and draw(st.integers(0, 3)) == 0:
        together = (1 << draw(st.integers(0, n - 1)) | 1 << draw(st.integers(0, n - 1)),)
    optional = [None if draw(st.booleans()) else numbers(draw, n, 9) for _ in range(4)]
    return StageProblem(
        names=tuple(f"n{j}" for j in range(n)),
        needs=needs,
        tensors=tuple(tensors),
        modes=tuple(modes),
        options=options,
        parameter_bytes=numbers(draw, n, 30),
        devices=count,
        place=place,
        together=tuple(group for group in together if len(list(members(group))) > 1),
        shared=shared,
        serial_s=optional[0],
        serial_fixed_s=draw(st.sampled_from([0.0, 1.0])),
        workspace_bytes=optional[1],
        before_s=optional[2],
        after_s=optional[3],
        overlap=draw(st.booleans()),
        stages=stages,
        pins=pins,
    )


def by_hand(compute, needs, tensors=(), devices=2, **changes) -> StageProblem:
    """Layers with these times, on equal devices without limits, one replica each."""
    n = len(compute)
    zeros = np.zeros(n)
    found = StageProblem(
        names=tuple(f"layer{j}" for j in range(n)),
        needs=tuple(needs),
        tensors=tuple(tensors),
        modes=(Mode("plain", np.array(compute, dtype=float), zeros, zeros),),
        options=(Option(1),),
        parameter_bytes=zeros,
        devices=devices,
        place=lambda o, k: Place(),
    )
    return replace(found, **changes)


def is_downset(problem: StageProblem, mask: int) -> bool:
    """Whether a set of layers holds all that its layers need, and no group in part."""
    return all(not problem.needs[k] & ~mask for k in members(mask)) and all(
        mask & group in (0, group) for group in problem.together
    )


def best_cut(problem, lattice, **how):
    """The cut on a lattice whose largest load is smallest; None where there is none."""
    answer = minimax_with_bound(problem, lattice, **how)
    if not answer.optimal:
        raise OutOfTime
    return answer.cut
