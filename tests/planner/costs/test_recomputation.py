"""Which layers are worth computing again, and what a stage keeps then."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from helpers.by_hand.profiles import profile_by_hand
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.costs.recomputation import (
    KeptStorages,
    of_stage,
    selection_of,
    selections,
)
from timeprest.planner.costs.stage_costs import Costs
from timeprest.planner.search.solve import solve


def blocks(count=3):
    """Each a norm, a matrix product, an activation function and a second product."""
    layers, edges, before = [], [], None
    for k in range(count):
        norm, one, act, two = (f"{k}.{part}" for part in ("norm", "one", "act", "two"))
        kept = [] if before is None else [before]
        layers += [
            (norm, 8, 1e-5, 2e-5, 0, kept),
            (one, 800, 4e-3, 8e-3, 0, [norm]),
            (act, 0, 1e-5, 2e-5, 0, [one]),
            (two, 800, 4e-3, 8e-3, 0, [act]),
        ]
        if before is not None:
            edges.append((before, norm, before, 10))
        edges += [(norm, one, norm, 10), (one, act, one, 40), (act, two, act, 40)]
        before = two
    return profile_by_hand(layers, [*edges, (before, "output", before, 10)])


def test_what_is_soon_done_and_large_comes_first():
    first, second, third = selections(blocks(), 1)
    assert first == {f"{k}.act" for k in range(3)}
    assert second == first | {f"{k}.norm" for k in range(3)}
    # Then the products whose results only the activation functions kept.
    assert third == second | {f"{k}.one" for k in range(3)}


def test_nothing_is_worth_it_where_nothing_is_kept():
    layers = [(f"n{k}", 10, 1e-3, 2e-3, 0, ()) for k in range(3)]
    edges = [("n0", "n1", "a", 8), ("n1", "n2", "b", 8), ("n2", "output", "c", 8)]
    assert selections(profile_by_hand(layers, edges), 1) == ()


def cost(again, names=None):
    profile = blocks()
    names = names or tuple(layer.name for layer in profile.layers)
    return Costs(profile).stage(tuple(names), 1, False, 0, frozenset(again))


def test_what_a_stage_keeps():
    # Norms' outputs (10 each, twice from a product before), both of 40.
    assert cost(()).kept_bytes == 2 * 10 + 3 * (10 + 40 + 40)
    found = cost(["1.act"])
    assert found.kept_bytes == cost(()).kept_bytes - 40
    assert (found.rebuilt_bytes, found.again_s) == (40, pytest.approx(1e-5))
    # What it is made from is kept, though nobody else needs it.
    assert cost(["1.act", "1.two"]).kept_bytes == cost(["1.act"]).kept_bytes - 10
    assert cost(["1.one"]).kept_bytes == cost(()).kept_bytes - 40
    assert "1.act" not in cost(["1.act"]).kept_storages


def test_what_comes_over_a_cut_is_kept():
    """However its maker, on another stage, is run."""
    names = ["1.act", "1.two", "2.norm", "2.one"]
    assert cost([], names).kept_bytes == 40 + 40 + 10 + 10
    assert cost(["1.act"], names).kept_bytes == 40 + 10 + 10
    assert cost([], names[1:]).kept_bytes == cost(["2.one"], names[1:]).kept_bytes == 60


def in_place():
    """The activation function overwrites what it gets."""
    layers = [
        ("one", 80, 1e-3, 2e-3, 0, ()),
        ("act", 0, 1e-5, 2e-5, 0, ("one",)),
        ("two", 80, 1e-3, 2e-3, 0, ("one",)),
    ]
    edges = [("one", "act", "one", 40), ("act", "two", "acted", 40), ("two", "output", "y", 8)]
    profile = profile_by_hand(layers, edges)
    changed = (
        msgspec.structs.replace(e, storage="one") if e.tensor == "acted" else e
        for e in profile.edges
    )
    return msgspec.structs.replace(profile, edges=tuple(changed))


@pytest.mark.parametrize(
    ("again", "nbytes"),
    [
        ((), 40),
        # Its own input, copied, and what it made of it.
        (("act",), 80),
        # What was made isn't what is kept.
        (("one",), 40),
        (("one", "act"), 0),
    ],
)
def test_layers_that_overwrite_what_they_get(again, nbytes):
    costs = Costs(in_place())
    assert costs.stage(("one", "act", "two"), 1, False, 0, frozenset(again)).kept_bytes == nbytes


def test_sets_and_stages():
    ways = False, frozenset({"a"}), frozenset({"a", "b"}), True
    assert of_stage(ways[2], ("b", "c", "a")) == ("b", "a")
    assert of_stage(ways[1], ("b", "c")) is False
    assert [of_stage(way, ("a",)) for way in ways] == [False, ("a",), ("a",), True]
    assert selection_of(("b",), ways) == ways[2]
    assert selection_of(True, ways) is True
    assert selection_of(("c",), ways) == {"c"}


def test_every_step_frees_something():
    profile = blocks(4)
    kept = KeptStorages(profile)
    sizes = {s.name: s.bytes_per_sample for s in profile.storages}

    def nbytes(names):
        again = kept.positions(names)
        return sum(sizes[name] * kept.kept(name, again) for name in sizes)

    found = [frozenset[str](), *selections(profile, 1)]
    assert all(a < b and nbytes(a) > nbytes(b) for a, b in itertools.pairwise(found))


def test_a_plan_within_less_memory_is_faster_than_with_whole_forwards():
    profile = blocks(6)
    free = solve(profile, uniform_cluster(2), "gpipe", mini_batch=16, micro_batches=4)
    limit = max(stage.memory_bytes for stage in free.predicted.stages) * 0.85
    asked = {"mini_batch": 16, "micro_batches": 4}
    cluster = uniform_cluster(2, f"{limit:.0f}B")
    found = {
        way: solve(profile, cluster, "gpipe", recompute=way, **asked)
        for way in ("on", "selective", "auto")
    }
    assert found["selective"].predicted.period_s < 0.95 * found["on"].predicted.period_s
    assert found["auto"].predicted.period_s <= found["selective"].predicted.period_s
    assert any(stage.recomputed for stage in found["selective"].stages)


def test_what_is_changed_in_place_goes_together():
    """Twice in place, the second time by an operation that keeps nothing."""
    layers = [
        ("one", 80, 1e-3, 2e-3, 0, ()),
        ("add_", 0, 1e-5, 2e-5, 0, ()),
        ("act", 0, 1e-5, 2e-5, 0, ("one",)),
        ("two", 80, 1e-3, 2e-3, 0, ("one",)),
    ]
    edges = [("one", "add_", "one", 40), ("one", "act", "one", 40), ("act", "two", "acted", 40)]
    profile = profile_by_hand(layers, [*edges, ("two", "output", "y", 8)])
    shared = (
        msgspec.structs.replace(e, storage="one") if e.tensor == "acted" else e
        for e in profile.edges
    )
    profile = msgspec.structs.replace(profile, edges=tuple(shared))
    assert KeptStorages(profile).rewriters == {"one": [1, 2]}
    assert selections(profile, 1) == ({"one", "add_", "act"},)
