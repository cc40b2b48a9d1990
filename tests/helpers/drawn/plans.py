"""Drawn plans: any system, cut, replicas, recomputation and cluster."""

from __future__ import annotations

from helpers.by_hand.profiles import drawn_profiles
from helpers.drawn.pipelines import clusters
from hypothesis import strategies as st
from timeprest.planner.evaluate import Question, evaluate
from timeprest.planner.plan import PlanStage
from timeprest.planner.schedules.schedules import limit_ranges
from timeprest.planner.systems.variants import VARIANTS


@st.composite
def evaluated(draw):
    """A question with a plan for it: any system, replicas, recomputation, links."""
    variant = VARIANTS[draw(st.sampled_from(sorted(VARIANTS)))]
    profile = draw(drawn_profiles(most=5))
    names = [layer.name for layer in profile.layers]
    stages = draw(st.integers(1, min(3, len(names))))
    cuts = sorted(draw(st.permutations(range(1, len(names))))[: stages - 1])
    groups = [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    replicas = [draw(st.sampled_from([1, 1, 2])) for _ in range(stages)]
    n = 1 if variant.whole_mini_batches else draw(st.sampled_from([2, 4]))
    n = max(n, 4 if variant.least_micro_batches(stages) > 2 else n)
    limits = []
    for least, most in reversed(limit_ranges(variant, stages)):
        limits.insert(0, draw(st.integers(max(least, limits[0] if limits else 1), most)))
    order = draw(st.permutations(range(sum(replicas))))
    parts = [order[sum(replicas[:s]) : sum(replicas[: s + 1])] for s in range(stages)]
    again = st.just(False) if variant.recompute_refusal else st.booleans()
    found = [
        PlanStage(
            nodes=tuple(groups[s]),
            devices=tuple(parts[s]),
            in_flight=limits[s],
            recompute=draw(again),
        )
        for s in range(stages)
    ]
    cluster = draw(clusters(sum(replicas)))
    every = draw(st.sampled_from([1, 1, 2, 3]))
    asked = Question(profile, cluster, variant.name, 4, 1.0, every)
    return asked, evaluate(asked, found, n)
