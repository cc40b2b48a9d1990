"""What devices with several stages hold: the peak of their own sequence of operations."""

from __future__ import annotations

import pytest
from helpers.by_hand.profiles import chain
from helpers.plans import lone_stages
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.costs.memory import HoldingsWalk
from timeprest.planner.evaluate import evaluate
from timeprest.planner.question import Question
from timeprest.planner.schedules.check import check_schedule
from timeprest.planner.schedules.schedules import limit_ranges, make_schedule
from timeprest.planner.systems.variants import VARIANTS
from timeprest.planner.systems.versions import entry_versions

ANYWHERE = sorted(name for name, variant in VARIANTS.items() if variant.placement == "any")


def placed(placement, variant, n):
    """Equal layers, one for each stage."""
    system, stages = VARIANTS[variant], len(placement)
    limits = [most for _, most in limit_ranges(system, stages, several=True)]
    cluster = uniform_cluster(max(placement) + 1)
    asked = Question(chain(stages), cluster, variant, max(n, 4), 1.0)
    found = lone_stages([[f"n{s}"] for s in range(stages)], limits)
    found = tuple(replace(stage, devices=(d,)) for stage, d in zip(found, placement, strict=True))
    return evaluate(asked, found, n)


@given(
    st.sampled_from(ANYWHERE),
    st.sampled_from([(0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0)]),
    st.integers(1, 2),
)
def test_a_device_holds_what_its_stages_do_at_once(variant, placement, times):
    n = 1 if VARIANTS[variant].whole_mini_batches else times * len(placement)
    prediction = placed(placement, variant, n).prediction
    assert [set(d.stages) for d in prediction.devices] == [
        {s for s, k in enumerate(placement) if k == d} for d in range(max(placement) + 1)
    ]
    for device in prediction.devices:
        peaks = [prediction.stages[s].memory_bytes for s in device.stages]
        assert max(peaks) <= device.memory_bytes <= sum(peaks)
        assert max(peaks) < device.memory_bytes or len(peaks) == 1
        assert device.memory.total == device.memory_bytes
        assert device.accounted.total <= device.memory_bytes
        # What is there all the time is there at the peak.
        always = sum(
            prediction.stages[s].memory.weights_bytes + prediction.stages[s].memory.optimizer_bytes
            for s in device.stages
        )
        assert device.memory.weights_bytes + device.memory.optimizer_bytes == always


@pytest.mark.parametrize("variant", ["timeprest", "pipedream", "gpipe", "zb-h1"])
def test_the_peak_is_that_of_all_stages_stepped_together(variant):
    """Walked operation by operation, with all that the device's other stage has meanwhile."""
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    found = placed((0, 1, 0), variant, n)
    pipeline, predicted = found.pipeline, found.prediction
    order = make_schedule(pipeline, 12)
    entries = entry_versions(pipeline.variant, n, order[0])
    walks = {s: HoldingsWalk(pipeline.variant, n, 1, entries) for s in (0, 2)}
    needs = {s: predicted.stages[s].holds for s in (0, 2)}
    most = 0
    for s, op in order.on_devices()[0]:
        other = 2 - s
        beside = needs[other].total(walks[other].between())
        most = max(most, needs[s].total(walks[s].step(op)) + beside)
    assert predicted.devices[0].memory_bytes == most


def test_what_is_handed_over_is_counted_once():
    """No receives are posted for it, and no message waits but with its maker."""
    apart = placed((0, 1), "gpipe", 4).prediction.stages
    together = placed((0, 0), "gpipe", 4).prediction.stages
    posted = 2 * 16
    assert apart[1].holds.messages - together[1].holds.messages == posted
    assert apart[0].holds.messages > together[0].holds.messages


def test_straight_plans_say_nothing_of_devices():
    found = placed((0, 1, 2), "timeprest", 2).prediction
    assert found.devices == ()
    assert found.device_of(1) is found.stages[1]


@pytest.mark.parametrize("variant", ["pipedream-2bw", "timeprest", "pipedream-flush", "zb-h1"])
def test_devices_with_replicas_keep_their_limits(variant):
    """Two devices run replicas of the first and the last stage."""
    limits = [most for _, most in limit_ranges(VARIANTS[variant], 3, several=True)]
    asked = Question(chain(3), uniform_cluster(3), variant, 4, 1.0)
    stages = tuple(
        replace(stage, devices=devices)
        for stage, devices in zip(
            lone_stages([["n0"], ["n1"], ["n2"]], limits), [(0, 1), (2,), (0, 1)], strict=True
        )
    )
    pipeline = evaluate(asked, stages, 4).pipeline
    check_schedule(pipeline, make_schedule(pipeline, 5), 5)
