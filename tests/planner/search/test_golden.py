"""The golden table: what the search makes of drawn and published questions may only get better."""

from __future__ import annotations

import pytest
from timeprest.tests.planner.search import golden
from timeprest.tests.planner.search.golden import Frozen, judged

HOW = "python -m timeprest.tests.planner.search.golden says what changed; --write freezes it"

LONG = (
    "drawn i-timeprest 2",
    "drawn pipedream-flush 2",
    "drawn pipedream-flush 4",
    "drawn timeprest 1",
    "drawn timeprest 9",
    "drawn v-timeprest 1",
    "drawn v-timeprest 8",
    "published gnmt, 1 GB/s, straight, 8 devices",
    "published resnet50, 10 GB/s, straight, 8 devices",
    "published vgg16, 1 GB/s, replicas, 8 devices",
    "sequences 47",
)
"""Rows that take a third of the time of all: `make every-case` plans them."""


@pytest.mark.slow
@pytest.mark.choice(60)
@pytest.mark.parametrize("name", [row for row in golden.frozen_table() if row not in LONG])
def test_no_plan_is_worse_than_frozen(name):
    check(name)


@pytest.mark.slow
@pytest.mark.choice(0)
@pytest.mark.parametrize("name", LONG)
def test_no_plan_of_a_long_search_is_worse_than_frozen(name):
    check(name)


def check(name):
    make = golden.rows().get(name)
    if make is None and not name.startswith("drawn"):
        pytest.skip(f"published files that aren't part of the repository: {golden.sequences.DATA}")
    assert make is not None, f"{name}: no such question any more; {HOW}"
    worse = judged(golden.frozen_table()[name], golden.planned(make())).worse
    assert not worse, f"{name}: {worse}\n({HOW})"


PROVEN, OPEN, NONE = Frozen(2.0, 2.0, True), Frozen(2.0, 1.5), Frozen()


@pytest.mark.parametrize(
    ("frozen", "found", "worse", "better"),
    [
        (PROVEN, PROVEN, "", ""),
        (PROVEN, Frozen(2.0, 1.9), "no proof any more", ""),
        (PROVEN, Frozen(1.9, 1.9, True), "under what was the bound", ""),
        (PROVEN, NONE, "no plan any more", ""),
        (OPEN, Frozen(2.1, 1.9), "period 2000 → 2100 ms, +5.00%", ""),
        (OPEN, Frozen(1.9, 1.4), "bound 1500 → 1400 ms", ""),
        (OPEN, Frozen(2.0, 1.49), "", ""),
        (OPEN, Frozen(1.9, 1.5), "", "period 2000 → 1900 ms, -5.00%"),
        (OPEN, Frozen(2.0, 1.6), "", "bound 1500 → 1600 ms"),
        (OPEN, Frozen(1.4, 1.4, True), "under what was the bound", ""),
        (OPEN, Frozen(2.1, 2.1, True), "+5.00%", ""),
        (OPEN, Frozen(1.6, 1.6, True), "", "period 2000 → 1600 ms, -20.00%"),
        (OPEN, PROVEN, "", "proven"),
        (NONE, NONE, "", ""),
        (NONE, OPEN, "", "a plan"),
    ],
)
def test_what_is_worse(frozen, found, worse, better):
    judgement = judged(frozen, found)
    assert bool(judgement.worse) == bool(worse)
    assert bool(judgement.better) == bool(better)
    assert worse in judgement.worse
    assert better in judgement.better
