"""What is proven: no plan is better than one called optimal, and no bound is above a plan.

Held against trying everything, on questions drawn by number (`drawn_questions`). TIMEPREST_DRAWS
sets which: "2000" for the first two thousand, "400-500" for those from 400 on.
"""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec
import pytest
from helpers.by_hand.profiles import (
    chain,
    measurement,
    profile_by_hand,
    row_of_layers,
    without_gradients,
)
from helpers.drawn.bounds import check_bounds
from helpers.drawn.questions import Drawn, all_plans, drawn, solved
from helpers.paths import PUBLISHED, published
from helpers.plans import lone_stages
from timeprest.cli.tables.plan import piling_up
from timeprest.planner.cluster.cluster import Cluster, Device
from timeprest.planner.cluster.links import Network
from timeprest.planner.costs import layer_graph
from timeprest.planner.evaluate import evaluate
from timeprest.planner.partition import solve as solvers
from timeprest.planner.partition.dp import identical_devices as rising
from timeprest.planner.question import Question
from timeprest.planner.search import first_plans, state
from timeprest.planner.search.answer import preference
from timeprest.planner.search.choices import Branch, Freedom
from timeprest.planner.search.relaxed import memory as kept_bytes
from timeprest.planner.search.relaxed.places import Assumptions
from timeprest.planner.search.relaxed.relaxation import Relaxation
from timeprest.planner.search.solve import solve
from timeprest.planner.simulator.timeline import running_ahead
from timeprest.profiles.errors import InfeasibleError
from timeprest.profiles.profile import Profile

FALSE_PROOFS = sorted(PUBLISHED.glob("false_proofs/*.json"))
ALONE = Freedom()


def numbers() -> range:
    first, _, last = os.environ.get("TIMEPREST_DRAWS", "28").rpartition("-")
    return range(int(first or 0), int(last))


def drawn_or_skip(number: int, *most: int, **how: Any) -> Drawn:
    found = drawn(number, *most, **how)
    if found is None:
        pytest.skip("too many plans to try, or none")
    return found


def check_solved(drawn: Drawn, solver: str, *, proven: bool = True) -> None:
    """The answer is the best of all plans, proven; or it is that none fits."""
    asked = {
        "micro_batches": drawn.asked,
        "stages": drawn.stages,
        "pins": drawn.pins,
        "replicas": drawn.freedom.replicas,
        "recompute": drawn.freedom.recompute,
        "solver": solver,
        "effort": 10**9,
    }
    if drawn.best_s is None:
        with pytest.raises(InfeasibleError):
            solved(drawn.question, **asked)
        return
    with pytest.MonkeyPatch.context() as patch:
        # Of the sets of layers that it tries.
        for module in (preference, first_plans):
            patch.setattr(module, "keep_more", lambda _search: None)
        plan = solved(drawn.question, **asked)
    assert plan.solver.bound_s <= drawn.best_s * (1 + 1e-9)
    assert plan.predicted.period_s == pytest.approx(drawn.best_s, rel=1e-8)
    assert plan.solver.optimal or not proven


@pytest.mark.choice(6)
@pytest.mark.slow
@pytest.mark.parametrize("number", numbers())
def test_what_is_proven_of_drawn_questions_is_so(number, monkeypatch):
    # All sets count as one where they may.
    monkeypatch.setattr(kept_bytes, "_ABOUT_NO_TIME", 1.0)
    found = drawn_or_skip(number)
    check_bounds(found)
    for solver in ("dp", "ilp"):
        check_solved(found, solver)


@pytest.mark.choice(6)
@pytest.mark.parametrize("number", numbers()[::2])
def test_what_is_proven_on_devices_of_several_kinds_is_so(number):
    """Not all is: bounds go by the least that any kind takes for a layer, over its speed."""
    found = drawn_or_skip(number, 200, kinds=True)
    check_bounds(found)
    check_solved(found, "dp", proven=False)


@pytest.mark.choice(6)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_links_of_pairs_and_times_by_size_make_no_proof_false(number):
    found = drawn_or_skip(number, linked=True)
    check_bounds(found)
    check_solved(found, "dp")


@pytest.mark.choice(5)
@pytest.mark.parametrize("number", numbers()[::3])
def test_what_is_proven_of_large_models_is_so(number, monkeypatch):
    """The same ways as where there is much to look at, on the same small questions."""
    monkeypatch.setattr(state, "_LARGE", -1)
    monkeypatch.setattr(first_plans, "MOST_BLOCKS", 3)
    for module in (rising, solvers):
        monkeypatch.setattr(module, "FEW", 0)
    found = drawn_or_skip(number)
    check_solved(found, "dp")


@pytest.mark.choice(4)
@pytest.mark.parametrize("number", numbers()[::4])
def test_forwards_that_count_for_less_bound_no_plan_from_above(number, monkeypatch):
    """Layers with most of the work in their forwards, as many as half of all, are cut short."""
    monkeypatch.setattr(layer_graph, "_LEFT_OUT", 0.5)
    monkeypatch.setattr(layer_graph, "_WORTH_IT", 0.0)
    found = drawn_or_skip(number, systems=("pipedream-flush", "gpipe"))
    check_bounds(found)


def test_forwards_that_count_for_less_do_so_in_all_of_the_work(monkeypatch):
    """A stage of 1 ms each way before two replicas of one that takes 6: its second forward runs
    beside them, and nothing but 1 + 6 + 2 · 1 ms bounds the period."""
    monkeypatch.setattr(layer_graph, "_LEFT_OUT", 0.5)
    layers = [("n0", 0, 1e-3, 1e-3, 0, []), ("n1", 0, 2e-3, 4e-3, 0, [])]
    profile = row_of_layers(layers, 1, 4, sizes=(1,))
    question = Question(profile, on_machines("aaa", FAST), "pipedream-flush", 2, 1.0)
    found = all_of(question, Freedom(replicas=True))
    check_bounds(found)
    assert any(plan.prediction.period_s == pytest.approx(9e-3) for _, plan in found.plans)


def test_a_layer_that_nearly_only_runs_forward_does_not_weaken_the_bound():
    """Of 8 forwards of a stage on the first of 8 devices 7 may run beside other work; were its
    backwards all that counts, 2 of 3 parts of its work would be left, and with an addition whose
    backward takes nothing just an eighth."""

    def speeds(addition_s):
        layers = [("n0", 0, 1e-3, 2e-3, 0, []), ("add", 0, addition_s, 0.0, 0, [])]
        profile = row_of_layers(layers, 16, 4, sizes=(1,))
        question = Question(profile, on_machines("a" * 8, FAST), "pipedream-flush", 8, 1.0)
        problem = Relaxation(question, ALONE).problem(Branch(8), Assumptions(view="return"))
        return problem.place(0, 8).speed, problem.modes[0].compute_s

    speed, compute_s = speeds(1e-6)
    assert speed == pytest.approx(1 / (1 - 7 / 8 / 3))
    assert list(compute_s) == pytest.approx([0.024, 0.0])
    # Where it takes long it counts, as it is.
    speed, compute_s = speeds(1e-3)
    assert speed == pytest.approx(8)
    assert list(compute_s) == pytest.approx([0.024, 0.008])


def check_case(case):
    """A question as a file has it, and the period of a plan that the answer must be as good as."""
    profile = msgspec.convert(case["profile"], Profile)
    cluster = msgspec.convert(case["cluster"], Cluster)
    for solver in ("dp", "ilp"):
        plan = solve(
            profile,
            cluster,
            case["variant"],
            replicas=case["replicas"],
            recompute=case["recompute"],
            solver=solver,
            run_ahead="auto",
        )
        assert plan.predicted.period_s <= case["better_period_s"] * (1 + 1e-9)
        assert plan.solver.optimal
        # One of them took the ILP so long that its time was over: it tried 600.
        assert plan.solver.plans_tried < 400


@pytest.mark.slow
@pytest.mark.parametrize("path", FALSE_PROOFS or ["false_proofs"], ids=str)
def test_questions_once_answered_wrongly(path):
    """Each file has a question, and a plan that was better than the one called optimal."""
    check_case(json.loads(published(path).read_text()))


# Causes --------------------------------------------------------------------------------------


def all_of(question: Question, freedom: Freedom = ALONE, asked: int | None = None) -> Drawn:
    """The question with all its plans."""
    plans = [(n, evaluate(question, s, n)) for n, s in all_plans(question, freedom, asked)]
    return Drawn(question, freedom, asked, plans)


def check(found: Drawn) -> None:
    check_bounds(found)
    for solver in ("dp", "ilp"):
        check_solved(found, solver)


def on_machines(homes: str, network: Network, between: Network | None = None, **each) -> Cluster:
    """A device for each letter, in the machine of that name."""
    devices = tuple(Device(name=f"d{k}", machine=home, **each) for k, home in enumerate(homes))
    return Cluster(devices=devices, network=network, between_machines=between)


FAST = Network(bandwidth_bytes_per_s=1e9, latency_s=0.0)
SLOW = Network(bandwidth_bytes_per_s=1e4, latency_s=0.0)
BLOCKING = Network(bandwidth_bytes_per_s=1e4, latency_s=0.0, overlap=False)


def asked_of(profile, cluster, variant):
    return Question(profile, cluster, variant, profile.batch_size, 1.0)


@pytest.mark.choice(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("homes", "network", "between"),
    [
        ("aab", BLOCKING, SLOW),
        ("aab", SLOW, BLOCKING),
        ("ab", BLOCKING, FAST),
        ("aba", SLOW, FAST),
        ("aba", FAST, SLOW),
    ],
)
def test_links_inside_and_between_machines_differ(homes, network, between):
    """Only what every link does is in a bound: some overlap computing, some are faster."""
    check(all_of(asked_of(chain(3), on_machines(homes, network, between), "timeprest")))
    freedom = Freedom(replicas=True)
    check(all_of(asked_of(chain(3), on_machines(homes, network, between), "pipedream"), freedom))


def layers_alike(count, nbytes=1000, sizes=(1, 2, 4)):
    """A chain of layers that take 3 ms per sample, and what they send, in bytes per sample."""
    layers = [(f"n{k}", 0, 1e-3, 2e-3, 0, []) for k in range(count)]
    return row_of_layers(layers, nbytes, sizes=sizes)


def no_gradient_comes_back():
    """Four layers of 12 ms per mini-batch, which is one micro-batch: stages of a flushing system
    take turns, 48 ms in all. But a cut that no gradient crosses makes them independent: 36 and 12.
    """
    near = Network(bandwidth_bytes_per_s=1e9, latency_s=5e-4)
    profile = without_gradients(layers_alike(4, sizes=(4,)), "n2")
    return asked_of(profile, on_machines("ab", near, FAST), "pipedream-flush"), 0.036


def a_device_is_left_out():
    """Four layers of 12 ms: some device has two. That is enough with the two machines' link, which
    works beside them; the link inside a machine would keep its devices from computing."""
    near = Network(bandwidth_bytes_per_s=2e8, latency_s=5e-4, overlap=False)
    far = Network(bandwidth_bytes_per_s=1e8, latency_s=1e-5)
    return asked_of(layers_alike(4, 10**5), on_machines("aab", near, far), "timeprest"), 0.024


def few_fit():
    """A chain of 12, 8 and 12 ms beside a layer of 20 ms, which would decide were there memory for
    several mini-batches. Many cuts have the same bound, and few fit; none is better than the chain
    on one device, as trying all plans shows."""
    layers = [
        ("n0", 600_000, 1e-3, 2e-3, 500_000, []),
        ("n1", 0, 1e-3, 1e-3, 0, []),
        ("n2", 0, 1e-3, 2e-3, 500_000, []),
        ("beside", 400_000, 2e-3, 3e-3, 300_000, []),
    ]
    edges = [("n0", "n1", "a", 1000), ("n1", "n2", "b", 200_000), ("beside", "output", "y", 50_000)]
    profile = profile_by_hand(layers, edges, sizes=(2, 4), tied=(("n0", "n1"),))
    near = Network(bandwidth_bytes_per_s=1e9, latency_s=1e-3, half_duplex=True)
    cluster = on_machines("aaa", near, memory_bytes=6 * 10**6)
    return asked_of(profile, cluster, "timeprest"), 0.032


@pytest.mark.choice("gradient", "left_out")
@pytest.mark.parametrize("make", [no_gradient_comes_back, a_device_is_left_out, few_fit])
def test_questions_like_those_once_answered_wrongly(make):
    """Solved as a file's questions are; the period to reach is of the best of all plans."""
    question, known_s = make()
    best_s = all_of(question).best_s
    assert best_s == pytest.approx(known_s, rel=1e-9)
    case = {
        "variant": question.variant,
        "replicas": False,
        "recompute": "off",
        "better_period_s": best_s,
        "profile": question.profile,
        "cluster": question.cluster,
    }
    check_case(json.loads(msgspec.json.encode(case)))


@pytest.mark.choice(3)
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gpipe", "pipedream-flush", "zb-h1"])
@pytest.mark.parametrize("dead", [("n0",), ("n1",), ("n2",), ("n0", "n2")])
def test_a_cut_that_no_gradient_crosses_holds_nothing_up(variant, dead):
    """Stages before it begin the next mini-batch while this one is still behind it."""
    profile = without_gradients(chain(4), *dead)
    check(all_of(asked_of(profile, on_machines("aaa", FAST), variant)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gpipe", "pipedream-flush", "zb-h1"])
def test_a_layer_beside_the_others_that_sends_no_gradients_holds_nothing_up(variant):
    layers = [(name, 0, 1e-3, 2e-3, 0, []) for name in ("first", "mask", "left", "last")]
    pairs = [("first", "left"), ("first", "mask"), ("mask", "last"), ("left", "last")]
    edges = [(a, b, f"{a}-{b}", 8) for a, b in pairs] + [("last", "output", "y", 8)]
    for dead in ("mask", "left", "first"):
        profile = without_gradients(profile_by_hand(layers, edges), dead)
        check(all_of(asked_of(profile, on_machines("aaa", FAST), variant), asked=2))


def test_a_message_may_pass_beside_what_a_mini_batch_fills_the_pipeline_with():
    times = {"first": (1e-3, 1e-3), "middle": (5e-3, 1e-3), "last": (5e-4, 5e-4)}
    layers = [(name, 0, forward, backward, 0, []) for name, (forward, backward) in times.items()]
    edges = [
        ("first", "middle", "x", 8),
        ("first", "last", "skip", 400),
        ("middle", "last", "z", 8),
        ("last", "output", "y", 8),
    ]
    profile = without_gradients(profile_by_hand(layers, edges), "skip")
    network = Network(bandwidth_bytes_per_s=400 / 6e-3, latency_s=0.0)
    for variant in ("gpipe", "pipedream-flush"):
        check(all_of(asked_of(profile, on_machines("aaa", network), variant), asked=1))


def test_replicas_behind_a_stage_begin_backwards_before_its_last_forward():
    profile = chain(3)
    question = asked_of(profile, on_machines("aaa", FAST), "gpipe")
    check(all_of(question, Freedom(replicas=True)))


def test_stages_without_parameters_sum_no_gradients():
    network = Network(bandwidth_bytes_per_s=1e9, latency_s=1e-3)
    question = asked_of(chain(2, parameters=0), on_machines("aa", network), "pipedream-2bw")
    check(all_of(question, Freedom(replicas=True)))


def test_the_loss_is_not_computed_again_with_the_last_layer():
    layers = [("n0", 0, 1e-3, 2e-3, 10, []), ("n1", 0, 1e-4, 2e-4, 1000, [])]
    loss = [measurement(m, m * 2e-3, m * 2e-3, 0) for m in (1, 2, 4)]
    profile = row_of_layers(layers, 8, 4, loss=loss)
    question = asked_of(profile, on_machines("aa", FAST, memory_bytes=10**9), "gpipe")
    check(all_of(question, Freedom(recompute="selective"), asked=2))


def test_gradients_are_summed_once_an_update():
    network = Network(bandwidth_bytes_per_s=1e9, latency_s=1e-3)
    cluster = on_machines("aa", network, memory_bytes=10**6)
    question = Question(chain(2), cluster, "pipedream-flush", 4, 1.0, 2)
    check(all_of(question, Freedom(replicas=True)))


@pytest.mark.parametrize("variant", ["gpipe", "pipedream-flush", "zb-h1"])
def test_replicas_do_not_drain_between_updates(variant):
    """The first stage's go on with the next mini-batch one by one."""
    question = Question(chain(3), on_machines("aaa", FAST), variant, 4, 1.0, 3)
    check(all_of(question, Freedom(replicas=True), asked=2))


def test_the_same_stages_on_other_devices_are_other_plans():
    """Which devices are in one machine isn't told by the relaxed load."""
    late = Network(bandwidth_bytes_per_s=1e9, latency_s=0.05)
    for homes in ("aab", "abb", "aba"):
        for near, far in ((FAST, late), (late, FAST)):
            check(all_of(asked_of(chain(2), on_machines(homes, near, far), "pipedream")))


def test_stages_that_nothing_comes_to_may_run_ahead_of_the_first():
    layers = [("slow", 100, 9e-3, 9e-3, 0, []), ("beside", 100, 1e-3, 1e-3, 0, [])]
    edges = [("beside", "output", "y", 8)]
    profile = profile_by_hand(layers, edges)
    for variant in ("timeprest", "i-timeprest", "pipedream-vertical-sync"):
        check(all_of(asked_of(profile, on_machines("aa", FAST), variant)))


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_messages_pile_up_behind_a_stage_that_nothing_comes_back_from(slow):
    layers = [(f"n{k}", 0, 1e-3 * (1 + 2 * (k == slow)), 1e-3, 0, []) for k in range(3)]
    profile = without_gradients(row_of_layers(layers), "n0")
    question = asked_of(profile, on_machines("aaa", FAST), "pipedream")
    found = evaluate(question, lone_stages([["n0"], ["n1"], ["n2"]], (3, 2, 1)), 1)
    ahead = running_ahead(found.pipeline, found.prediction.period_s)
    # The first one is held up by nothing behind it, the second one by the third.
    assert [(link.source, link.target) for link, _ in ahead] == [(0, 1)][: slow > 0]
    assert [lead for _, lead in ahead] == pytest.approx([1 - 2 / 4][: slow > 0])
    plan = solve(profile, question.cluster, "pipedream", stages=3)
    assert (piling_up(plan) is None) == (slow == 0)
    assert slow == 0 or "up to 16 B more wait to be sent" in piling_up(plan)


def test_no_messages_pile_up_where_gradients_come_back_by_way_of_another_stage():
    """Though the pipeline idles, and none comes back for that message, as for a mask's."""
    layers = [(f"n{k}", 0, 1e-3, 1e-3, 0, []) for k in range(3)]
    edges = [("n0", "n1", "a", 8), ("n1", "n2", "b", 8), ("n0", "n2", "mask", 8)]
    profile = profile_by_hand(layers, [*edges, ("n2", "output", "y", 8)])
    profile = without_gradients(profile, "mask")
    question = asked_of(profile, on_machines("aaa", FAST), "gpipe")
    found = evaluate(question, lone_stages([["n0"], ["n1"], ["n2"]], (1, 1, 1)), 4)
    assert not running_ahead(found.pipeline, found.prediction.period_s)
