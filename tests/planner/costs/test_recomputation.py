"""Which layers are worth computing again, and what a stage keeps then."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from helpers.by_hand.profiles import profile_by_hand
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.costs.recomputation import (
    KeptStorages,
    fewest,
    of_stage,
    selection_of,
    selections,
)
from timeprest.planner.costs.stage_costs import Costs
from timeprest.planner.question import Question
from timeprest.planner.search import first_plans, state
from timeprest.planner.search.answer import preference
from timeprest.planner.search.choices import Freedom
from timeprest.planner.search.relaxed.relaxation import Relaxation
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
    return Costs(profile).stage(tuple(names), 1, False, recomputed=frozenset(again))


def test_what_a_stage_keeps():
    # Norms' outputs (10 each, twice from a product before), both of 40.
    assert cost(()).kept_bytes == 2 * 10 + 3 * (10 + 40 + 40)
    found = cost(["1.act"])
    assert found.kept_bytes == cost(()).kept_bytes - 40
    assert (found.rebuilt_bytes, found.recompute_s) == (40, pytest.approx(1e-5))
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
    found = costs.stage(("one", "act", "two"), 1, False, recomputed=frozenset(again))
    assert found.kept_bytes == nbytes


def test_sets_and_stages():
    ways = False, frozenset({"a"}), frozenset({"a", "b"}), True
    assert of_stage(ways[2], ("b", "c", "a")) == ("b", "a")
    assert of_stage(ways[1], ("b", "c")) is False
    assert [of_stage(way, ("a",)) for way in ways] == [False, ("a",), ("a",), True]
    assert selection_of(("b",), ("a", "b"), ways) == ways[2]
    assert selection_of(True, ("a",), ways) is True
    assert selection_of(("c",), ("c",), ways) == {"c"}
    # Where every stage must have a set: one whose layers it has none of.
    assert selection_of(False, ("c",), ways[1:]) == ways[1]
    assert selection_of(("a", "b"), ("a", "b", "c"), ways[1:3]) == ways[2]


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
    one, add, *rest = profile.layers
    layers = (one, msgspec.structs.replace(add, changes=("one",)), *rest)
    profile = msgspec.structs.replace(profile, edges=tuple(shared), layers=layers)
    assert KeptStorages(profile).rewriters == {"one": [1, 2]}
    assert selections(profile, 1) == ({"one", "add_", "act"},)


def test_what_makes_both_of_a_sum_goes_with_it():
    """The product alone frees nothing, for the sum itself is kept; nor does the sum alone, for
    then the product's result is kept instead."""
    layers, edges, before = [], [], "in"
    for k in range(3):
        norm, one, total = (f"{k}.{part}" for part in ("norm", "one", "sum"))
        layers += [
            (norm, 8, 1e-5, 2e-5, 0, [before]),
            (one, 800, 4e-3, 8e-3, 0, [norm]),
            (total, 0, 1e-5, 0.0, 0, ()),
        ]
        edges += [(before, norm, before, 10), (norm, one, norm, 10)]
        edges += [(before, total, before, 10), (one, total, one, 10)]
        before = total
    layers = [("in", 8, 1e-5, 2e-5, 0, ()), *layers, ("end", 800, 4e-3, 8e-3, 0, [before])]
    edges += [(before, "end", before, 10), ("end", "output", "end", 1)]
    *_, last = selections(profile_by_hand(layers, edges), 1)
    assert {"0.one", "0.sum", "1.one", "1.sum", "2.one", "2.sum"} <= last


def test_what_is_made_anew_for_a_whole_mini_batch_at_once_counts():
    """Where half of what is in flight is, half of what is freed is there again."""
    whole, half = selections(blocks(), 1), selections(blocks(), 1, 0.5)
    assert half[0] == whole[0]
    assert selections(blocks(), 1, 1.0) == ()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 40), st.data())
def test_no_layer_is_computed_again_in_vain(freed, wanted, data):
    steps = [frozenset({f"a{k}", f"b{k}"}) for k in range(len(freed))]
    nbytes = dict(zip(steps, freed, strict=True))

    def fits(again):
        assert not any(len(step & again) == 1 for step in steps)
        return sum(nbytes[step] for step in steps if step <= again) >= wanted

    enough = [k for k in range(len(steps) + 1) if fits(frozenset().union(*steps[:k]))]
    known = data.draw(st.sampled_from([*enough, len(steps) + 1]))
    times = dict(zip(steps, data.draw(st.permutations(range(1, len(steps) + 1))), strict=True))

    def seconds(again):
        return sum(times[step] for step in steps if step <= again)

    found = fewest(steps, known, fits, seconds)
    if not enough:
        assert found is None
        return
    assert fits(found)
    assert not any(fits(found - step) for step in steps if step <= found)
    assert seconds(found) <= seconds(frozenset().union(*steps[: enough[0]]))


@pytest.mark.parametrize(
    ("variant", "way", "shares"),
    [
        ("gpipe", "auto", (0.85, 0.82, 0.78)),
        ("gpipe", "selective", (0.82,)),
        ("pipedream-flush", "auto", (0.97, 0.94)),
        ("timeprest-stashed", "auto", (0.97, 0.94, 0.88)),
    ],
)
def test_stages_keep_what_their_memory_has_room_for(variant, way, shares, monkeypatch):
    profile = blocks(6)
    asked = {"mini_batch": 32, "micro_batches": 8, "recompute": way}
    free = solve(profile, uniform_cluster(2), variant, **{**asked, "recompute": "off"})
    most = max(stage.memory_bytes for stage in free.predicted.stages)
    shorter = 0
    for share in shares:
        limit = int(most * share)
        cluster = uniform_cluster(2, f"{limit}B")
        kept = solve(profile, cluster, variant, **asked)
        assert all(stage.memory_bytes <= limit for stage in kept.predicted.stages)
        assert kept.solver.bound_s <= kept.predicted.period_s
        with monkeypatch.context() as patch:
            for module in (preference, first_plans):
                patch.setattr(module, "keep_more", lambda _search: None)
            before = solve(profile, cluster, variant, **asked)
        assert kept.predicted.period_s <= before.predicted.period_s
        for ours, its in zip(kept.stages, before.stages, strict=True):
            assert its.recompute is True or ours.recomputed <= its.recomputed
        shorter = max(shorter, before.predicted.period_s / kept.predicted.period_s - 1)
    assert shorter > (0.05 if variant == "gpipe" else 1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("way", "memory"), [("on", None), ("on", "1GB"), ("selective", None)])
@pytest.mark.parametrize("variant", ["pipedream-flush", "pipedream-2bw"])
def test_stages_of_large_models_compute_again_what_is_asked_for(variant, way, memory, monkeypatch):
    asked = {"mini_batch": 8, "micro_batches": 4, "recompute": way}
    small = solve(blocks(), uniform_cluster(2, memory), variant, **asked)
    monkeypatch.setattr(state, "_LARGE", 0)
    large = solve(blocks(), uniform_cluster(2, memory), variant, **asked)
    assert all(stage.recompute for stage in large.stages)
    assert [stage.recompute for stage in large.stages] == [s.recompute for s in small.stages]


def test_a_smaller_layer_does_where_the_next_one_is_large():
    steps = [frozenset({name}) for name in ("tiny", "large", "other", "small")]
    nbytes = {"tiny": 1, "large": 40, "other": 30, "small": 10}
    times = {"tiny": 0.1, "large": 4.0, "other": 3.0, "small": 0.9}

    def seconds(again):
        return sum(times[name] for name in again)

    def need(wanted):
        def fits(again):
            return sum(nbytes[name] for name in again) >= wanted

        return fewest(steps, len(steps), fits, seconds)

    assert need(11) == {"tiny", "small"}
    assert need(38) == {"other", "small"}
    assert need(81) == {"tiny", "large", "other", "small"}


def test_what_computing_again_takes_does_not_depend_on_the_sequence():
    """Of names in a set it differs from process to process."""
    layers = [(f"n{k}", 10, t, 2e-3, 0, ()) for k, t in enumerate((0.1, 0.2, 0.3))]
    edges = [("n0", "n1", "a", 8), ("n1", "n2", "b", 8), ("n2", "output", "c", 8)]
    question = Question(profile_by_hand(layers, edges), uniform_cluster(1), "gpipe", 4, 1.0)
    seconds = Relaxation(question, Freedom()).seconds.recompute_s(4)
    assert len({seconds(names) for names in itertools.permutations(["n0", "n1", "n2"])}) == 1
