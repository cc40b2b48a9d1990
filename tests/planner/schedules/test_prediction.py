"""How far predictions look ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.output.schedules import parse_schedule
from timeprest.planner.schedules.prediction import prediction_distances
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.simulator.pipeline import Link, Pipeline
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import ScheduleError


def pipeline(variant, stages, update_every=1):
    """Stages of unlike times: distances don't depend on them."""
    links = tuple(Link(s, s + 1, 0.5, 0.5, 0.1) for s in range(stages - 1))
    times = tuple(1.0 + s for s in range(stages))
    limits = tuple(range(stages, 0, -1))
    return Pipeline(
        VARIANTS[variant],
        1,
        times,
        times,
        (0.0,) * stages,
        links,
        limits,
        update_every=update_every,
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 8])
def test_spectrains_distances_are_the_papers(stages):
    order = make_schedule(pipeline("spectrain", stages), 4 * stages)
    for s, found in enumerate(prediction_distances(VARIANTS["spectrain"], order)):
        steady = slice(2 * stages, 3 * stages)
        assert set(found.forward[steady]) == {s // 2 + stages - s - 1}
        assert set(found.backward[steady]) == {s // 2}


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_pipeoptim_aims_at_its_own_backward(stages):
    order = make_schedule(pipeline("pipeoptim", stages), 4 * stages)
    for s, found in enumerate(prediction_distances(VARIANTS["pipeoptim"], order)):
        assert found.forward == tuple(min(b, stages - 1 - s) for b in range(4 * stages))
        assert set(found.backward) == {0}


def test_fewer_updates_are_fewer_steps():
    order = make_schedule(pipeline("pipeoptim", 4, update_every=3), 12)
    (first, *_) = prediction_distances(VARIANTS["pipeoptim"], order)
    # 0F0 … 0F3 run on version 0, 0B2 is followed by the first update.
    assert first.forward[:4] == (0, 0, 0, 1)
    assert max(first.forward) == 1


@pytest.mark.parametrize(
    ("aim", "last"), [("backward", (0,) * 6), ("round-trip", (0, 1) + (0,) * 4)]
)
def test_micro_batches_look_ahead_each_for_itself(aim, last):
    """To the backward of the micro-batch, here or at stage 0, which takes its time."""
    text = (
        "0F0.0 0F0.1 0F1.0 0F1.1 0F2.0 0B0.0 0B0.1 0U0 0F2.1 0B1.0 0B1.1 0U1 0B2.0 0B2.1 0U2\n"
        "1F0.0 1B0.0 1F0.1 1B0.1 1U0 1F1.0 1B1.0 1F1.1 1B1.1 1U1 1F2.0 1B2.0 1F2.1 1B2.1 1U2"
    )
    variant = replace(VARIANTS["pipemare"], horizon=aim)
    found = prediction_distances(variant, parse_schedule(text))
    assert [d.forward for d in found] == [(0, 0, 1, 1, 2, 1), last]
    assert [d.backward for d in found] == [(0,) * 6, last]


def test_micro_batches_look_ahead_to_a_backward_of_all():
    text = "0F0.0 0F0.1 0F1.0 0B0 0U0 0F1.1 0B1 0U1\n1F0.0 1F0.1 1B0 1U0 1F1.0 1F1.1 1B1 1U1"
    variant = replace(VARIANTS["timeprest"], horizon="backward")
    first, last = prediction_distances(variant, parse_schedule(text))
    assert (first.forward, first.backward) == ((0, 0, 1, 0), (0, 0))
    assert (last.forward, last.backward) == ((0,) * 4, (0, 0))


def test_what_lands_when_the_round_trip_ends_does_not_count():
    text = "0F0 0B0 0U0 0F1 0B1 0U1\n1F0 1B0 1U0 1F1 1B1 1U1"
    found = prediction_distances(VARIANTS["spectrain"], parse_schedule(text))
    assert [d.forward for d in found] == [(0, 0), (0, 0)]
    assert [d.backward for d in found] == [(0, 0), (0, 0)]


def test_a_backward_that_waits_for_no_gradient_is_refused_on_one_device():
    """On the unit clock every stage's backward waits for the next stage's."""
    text = "0F0 0B0 0U0 1F0 1B0 1U0"
    with pytest.raises(ScheduleError, match="no gradient comes back; plan with"):
        prediction_distances(VARIANTS["spectrain"], parse_schedule(text))


def test_other_systems_predict_nothing():
    order = make_schedule(pipeline("pipedream", 2), 3)
    assert all(
        not d.forward and not d.backward for d in prediction_distances(VARIANTS["pipedream"], order)
    )
