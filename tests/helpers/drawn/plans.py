"""Drawn plans: any system, cut, placement, replicas, recomputation and cluster."""

from __future__ import annotations

from helpers.by_hand.profiles import drawn_profiles
from helpers.drawn.pipelines import ALL, clusters
from hypothesis import strategies as st
from timeprest.planner.evaluate import evaluate
from timeprest.planner.plan import PlanStage
from timeprest.planner.question import Question
from timeprest.planner.schedules.schedules import limit_ranges
from timeprest.planner.systems.variants import VARIANTS

PLACEMENTS = (
    (0, 0),
    (0, 1, 0),
    (0, 0, 1),
    (0, 1, 0, 1),
    (0, 1, 1, 0),
    (0, 1, 0, 2),
    (0, 1, 2, 1, 0),
)
"""Some of each pattern; stages that share a device come after each other or not."""


@st.composite
def evaluated(draw, *, placed=False):
    """A question with a plan for it: any system, replicas, recomputation, links.

    Args:
        placed: devices have several stages.
    """
    variant = VARIANTS[draw(st.sampled_from(ALL))]
    profile = draw(drawn_profiles(most=5))
    names = [layer.name for layer in profile.layers]
    placement = tuple(range(draw(st.integers(1, min(3, len(names))))))
    if placed:
        placement = draw(st.sampled_from([p for p in PLACEMENTS if len(p) <= len(names)]))
    stages, devices = len(placement), max(placement) + 1
    cuts = sorted(draw(st.permutations(range(1, len(names))))[: stages - 1])
    groups = [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    replicas = [draw(st.sampled_from([1, 1, 2])) for _ in range(devices)]
    n = 1 if variant.whole_mini_batches else draw(st.sampled_from([2, 4]))
    least = variant.least_micro_batches(stages)
    n = n if n >= least else least + least % 2
    limits = []
    for least, most in reversed(limit_ranges(variant, stages, several=placed)):
        limits.insert(0, draw(st.integers(max(least, limits[0] if limits else 1), most)))
    order = draw(st.permutations(range(sum(replicas))))
    parts = [order[sum(replicas[:d]) : sum(replicas[: d + 1])] for d in range(devices)]

    def again(nodes):
        if variant.recompute_refusal:
            return st.just(False)
        some = st.lists(st.sampled_from(nodes), min_size=1, unique=True).map(tuple)
        return st.booleans() | some

    found = [
        PlanStage(
            nodes=tuple(groups[s]),
            devices=tuple(parts[placement[s]]),
            in_flight=limits[s],
            recompute=draw(again(groups[s])),
        )
        for s in range(stages)
    ]
    cluster = draw(clusters(sum(replicas)))
    every = draw(st.sampled_from([1, 1, 2, 3]))
    asked = Question(profile, cluster, variant.name, max(n, 4), 1.0, every)
    return asked, evaluate(asked, found, n)
