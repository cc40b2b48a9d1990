"""The least load on devices of several kinds, held against every way to share out the layers."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from helpers.by_hand.profiles import chain
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import Cluster, Device
from timeprest.planner.cluster.links import Network
from timeprest.planner.partition.dp.kinds import Kinds, least_load_s
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.partition.problem import Mode, Option, Place, StageProblem
from timeprest.planner.search import exploration
from timeprest.planner.search.solve import solve


def problem_of(work, before, replicas, stages=None):
    """A chain of layers."""
    nothing = np.zeros(len(work))
    return StageProblem(
        names=tuple(f"n{k}" for k in range(len(work))),
        needs=tuple((1 << k) >> 1 for k in range(len(work))),
        tensors=(),
        modes=(Mode("plain", np.array(work, dtype=float), nothing, nothing),),
        options=tuple(Option(r) for r in replicas),
        parameter_bytes=nothing,
        devices=4,
        place=lambda _option, _k: Place(),
        before_s=np.array(before, dtype=float),
        stages=stages,
    )


@given(st.data())
def test_no_plan_has_less_to_do(data):
    layers = data.draw(st.integers(1, 5))
    work = data.draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    # At most what a layer takes of one device's work: a pass for a micro-batch of several.
    before = [0.1 * each * data.draw(st.sampled_from([0, 1])) for each in work]
    speeds, counts = data.draw(st.sampled_from([((1.0, 3.0), (2, 2)), ((2.0, 1.0), (1, 3))]))
    replicas = [1, *data.draw(st.sets(st.integers(2, 3)))]
    stages = data.draw(st.none() | st.integers(1, min(layers, 3)))
    kinds, problem = Kinds(speeds, counts), problem_of(work, before, replicas, stages)
    every = list(kinds.of_stages(replicas))

    def busiest(ends, takes):
        done = [0, *ends, layers]
        return max(
            sum(before[:a]) + sum(work[a:b]) / rate
            for (a, b), (_, rate) in zip(pairwise(done), takes, strict=True)
        )

    def fits(takes):
        used = zip(*(each for each, _ in takes), strict=True)
        return all(sum(of_kind) <= most for of_kind, most in zip(used, counts, strict=True))

    loads = [
        busiest(ends, takes)
        for number in ([stages] if stages else range(1, min(layers, 4) + 1))
        for takes in product(every, repeat=number)
        if fits(takes)
        for ends in combinations(range(1, layers), number - 1)
    ]
    lattice = find_downsets(problem, 100)
    found = least_load_s(problem, lattice, kinds, 0.01, 1000.0)
    if loads:
        assert found <= min(loads) * (1 + 1e-6)
    if loads and not any(before) and stages is None:
        assert found >= min(loads) * 0.97


def test_what_is_known_stays_known():
    problem = problem_of([4, 4], [0, 0], [1])
    lattice, kinds = find_downsets(problem, 10), Kinds((1.0,), (2,))
    assert least_load_s(problem, lattice, kinds, 5.0, 9.0) == 5.0
    assert least_load_s(problem, lattice, kinds, 1.0, 3.0) == pytest.approx(3.0)


def test_bounds_know_that_not_all_devices_are_fast(monkeypatch):
    """A layer is on each of two fast devices at best, and one on several slow ones."""
    speeds = [1.0, 1.0, *[0.3] * 6]
    devices = tuple(Device(name=f"d{k}", speed=speed) for k, speed in enumerate(speeds))
    cluster = Cluster(devices=devices, network=Network(bandwidth_bytes_per_s=1e12, latency_s=0.0))
    asked = {"replicas": True, "micro_batches": 4, "effort": 100, "time_limit_s": None}

    def bound_s():
        plan = solve(chain(3, parameters=1), cluster, "pipedream-2bw", sequence="best", **asked)
        return plan.solver.bound_s

    known_s = bound_s()
    monkeypatch.setattr(exploration, "_bound_by_kinds", lambda _search: None)
    assert known_s > 1.2 * bound_s()
