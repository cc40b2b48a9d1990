"""The benchmarks' own reckoning: cuts, ratios, goals, pages. Nothing is timed."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest
import torch
from helpers.by_hand.profiles import chain, profile_by_hand
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.plan import pipeline_of, read_plan
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import FileError, UserError
from timeprest.profiles.files import write_file
from timeprest.tests.benchmarks.speed import rounds as rounds_module
from timeprest.tests.benchmarks.speed.contestants import ALL, contestant_named
from timeprest.tests.benchmarks.speed.cuts import balanced, further, neighbours
from timeprest.tests.benchmarks.speed.held import at_equal_limits, plan_for
from timeprest.tests.benchmarks.speed.machine.machine import machine
from timeprest.tests.benchmarks.speed.racing.ours import UNEVEN, cut_as, whole_cycles, window_of
from timeprest.tests.benchmarks.speed.racing.processes import (
    StuckError,
    last_words,
    place_of,
    run_ranks,
)
from timeprest.tests.benchmarks.speed.racing.rank import RankSpec
from timeprest.tests.benchmarks.speed.racing.rivals import Choice, Length, counts
from timeprest.tests.benchmarks.speed.racing.steps import batches, plain
from timeprest.tests.benchmarks.speed.report import page
from timeprest.tests.benchmarks.speed.report.bars import bars
from timeprest.tests.benchmarks.speed.report.goals import goals
from timeprest.tests.benchmarks.speed.report.page import write_page
from timeprest.tests.benchmarks.speed.report.ratios import speed_ratio
from timeprest.tests.benchmarks.speed.report.records import (
    Figures,
    Held,
    Results,
    Round,
    StageFigures,
    add_rounds,
    read_results,
    write_results,
)
from timeprest.tests.benchmarks.speed.report.tables import speed_bars
from timeprest.tests.benchmarks.speed.rounds import Racer, Settings
from timeprest.tests.benchmarks.speed.tasks import MINI_BATCHES, Race
from torch import nn
from torch.utils.data import TensorDataset


def figures(speed, **more):
    stage = StageFigures(compute_s=0.9 / speed, idle_s=0.1 / speed, rss_bytes=1)
    given = {"micro_batches": 1, "cuts": (), "stages": (stage, stage), "losses": ()}
    return Figures(
        **{**given, "period_s": 1 / speed, "samples_per_s": speed, "foreign_share": 0.0, **more}
    )


def rounds(*speeds):
    """Rounds on "gpt" of one thread, timeprest and torch's 1F1B."""
    names = ("one-thread", "timeprest", "tdp-1f1b")
    return tuple(
        Round(model="gpt", begun="", runs=dict(zip(names, map(figures, each), strict=True)))
        for each in speeds
    )


def test_ratios_are_taken_within_rounds():
    """A machine that is twice as fast in one round changes no ratio."""
    found = speed_ratio(rounds((1, 2, 1), (2, 4, 3), (1, 1.5, 1)), "gpt", "timeprest")
    assert (found.value, found.least, found.most, found.rounds) == (2.0, 1.5, 2.0, 3)
    assert speed_ratio(rounds((1, 2, 1)), "vgg11", "timeprest") is None


def test_goals_tell_what_is_missed():
    found = list(goals(Results(machine=machine(), rounds=rounds((1, 1.9, 1.6)))))
    reached = {goal.key: goal.reached for goal in found}
    assert len(reached) == len(found)
    assert reached["gpt/timeprest/one-thread"]
    assert not reached["gpt/timeprest/1f1b"]
    assert reached["gpt/timeprest/best-of-torch"]
    assert not reached["gpt/timeprest/idle"]


def held(variant, peak, weights, **more):
    """On one stage."""
    nbytes = {"predicted_bytes": peak, "accounted_bytes": peak}
    nbytes |= {"predicted_weight_bytes": weights, "accounted_weight_bytes": weights}
    rest = {"model": "vgg16", "micro_batches": 4, "versions": (1,), "differences": (0,)}
    return Held(variant=variant, **{name: (n,) for name, n in nbytes.items()}, **rest, **more)


def test_what_systems_hold_is_judged_at_equal_limits(tmp_path):
    names = ("v-timeprest", "timeprest", "timeprest-stashed", "pipedream")
    alike = {"equal_limits": True, "in_flight": (1,), "predicted_period_s": 2.0}
    equal = [held(n, 90 + k, k + 1 << 20, **alike) for k, n in enumerate(names)]
    own = held("timeprest", 182, 7 << 20, in_flight=(5,), predicted_period_s=1.5)
    results = Results(machine=machine(), held=(own, *equal))
    weights, peak = goals(results)
    assert (weights.reached, peak.reached) == (True, True)
    assert weights.found.startswith("1, 2, 3 MiB; ")
    assert weights.found.endswith(" 1, 7, 3 MiB, in another order")
    assert peak.found == "0.98; at limits of the planner's choice 1.96"
    assert not list(goals(Results(machine=machine(), held=(own,))))
    write_results(tmp_path / "races.json", results)
    write_page(tmp_path / "races.json", tmp_path / "page.md")
    text = "".join(page.read_text() for page in (tmp_path / "page").glob("*_held.md"))
    assert "Stage by stage `timeprest` holds less on stage 0, against `pipedream`" in text
    assert "| 0 | 1 | 2.0 MiB | 91 B | 1 | 4.0 MiB | 93 B | 0.98 |" in text
    rows = [line for line in text.splitlines() if "| 4 |" in line]
    assert len(rows) == 5
    assert "| `timeprest` | 4 | 5 | 1 | 0 | 182 B | 182 B | +0.0% | 2.00 |" in rows[-1]
    assert rows[-1].endswith("| 3.50 | 0.75 |")


def test_equal_limits_are_those_of_1f1b():
    profile = chain(4)
    for variant, wanted in (
        ("timeprest", [4, 3, 2, 1]),
        ("pipedream", [4, 3, 2, 1]),
        ("pipedream-2bw", [2, 2, 2, 1]),
        ("gpipe", [1, 1, 1, 1]),
    ):
        found = at_equal_limits(plan_for(profile, variant, None), profile)
        assert [stage.in_flight for stage in found.stages] == wanted


def test_page_says_why_what_is_missed(tmp_path, monkeypatch, capsys):
    reasons = tmp_path / "reasons.toml"
    reasons.write_text('"gpt/timeprest/1f1b" = "Rain."\n"gpt/timeprest/one-thread" = "Sun."')
    monkeypatch.setattr(page, "REASONS", reasons)
    add_rounds(tmp_path / "races.json", rounds((1, 1.9, 1.6)), {})
    write_page(tmp_path / "races.json", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "- gpt: `timeprest` over torch's 1F1B: Rain." in text
    assert "Sun." not in text
    assert text.count(": not understood yet") == 2
    assert "reasons.toml: gpt/timeprest/idle, gpt/predicted-period\n" in capsys.readouterr().out


def test_goals_hold_losses_of_synchronous_rivals_against_one_threads():
    def found(loss):
        runs = {"one-thread": figures(1, losses=(2.0, 1.0)), "ddp": figures(1, losses=(2.0, loss))}
        runs["timeprest"] = figures(1, losses=(2.0, 7.0))
        raced = (Round(model="gpt", begun="", runs=runs),)
        return next(goals(Results(machine=machine(), rounds=raced)))

    assert found(1.0001)[3:] == ("within 0.0001 (`ddp`)", True)
    assert not found(1.01).reached


def test_results_are_added_to(tmp_path):
    path = tmp_path / "races.json"
    add_rounds(path, [], {"gpt/tdp-1f1b": "it failed"})
    add_rounds(path, rounds((1, 2, 1)), {"gpt/ddp": "no luck"})
    found = read_results(path, machine())
    assert len(found.rounds) == 1
    assert found.skipped == {"gpt/ddp": "no luck"}
    elsewhere = msgspec.structs.replace(machine(), processor="another")
    with pytest.raises(FileError, match="another machine"):
        read_results(path, elsewhere)
    write_results(path, found)
    assert read_results(path, machine()) == found


def test_page_has_every_contestant(tmp_path):
    add_rounds(tmp_path / "races.json", rounds((1, 2, 1.5), (1, 1.9, 1.4)), {"gpt/ddp": "no"})
    write_page(tmp_path / "races.json", tmp_path / "page.md")
    text = (tmp_path / "page" / "gpt.md").read_text()
    assert "| `timeprest` | **1.95** | 1.90–2.00 | 2 |" in text
    main = (tmp_path / "page.md").read_text()
    assert "| `gpt/ddp` | no |" in main
    assert "| gpt |  |  | " in main
    assert main.count("| 1.95 `timeprest` |") == 1
    assert "(page/gpt.md)" in main
    plot = ElementTree.fromstring((tmp_path / "page" / "gpt.svg").read_text())
    words = {element.text for element in plot.iter("{http://www.w3.org/2000/svg}text")}
    assert {"timeprest", "tdp-1f1b", "1.95×"} <= words


def test_bars_end_where_their_values_are():
    rows = speed_bars(rounds((1, 2, 1)), "gpt")
    plot = ElementTree.fromstring(bars("a < b & c", rows))
    space = "{http://www.w3.org/2000/svg}"
    widths = [float(each.get("width")) for each in plot.iter(f"{space}rect")][1:]
    assert widths[1] / widths[0] == pytest.approx(2, rel=0.01)


@given(st.lists(st.floats(0.1, 9), min_size=4, max_size=9), st.sampled_from([(2, 2), (4, 2)]))
def test_cuts_balance_best(costs, shape):
    stages, processes = shape

    def most(cuts):
        loads = [0.0] * processes
        for s, (a, b) in enumerate(itertools.pairwise((0, *cuts, len(costs)))):
            loads[s if s < processes else 2 * processes - 1 - s] += sum(costs[a:b])
        return max(loads)

    found = balanced(costs, stages, processes)
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    assert most(found) <= min(map(most, every)) * (1.03 if stages > processes else 1 + 1e-9)
    assert all(len(moved) == len(found) for moved in neighbours(found, len(costs)))


def test_a_v_has_stages_of_one_length():
    """Times that differ by what measuring can't tell don't make a lopsided one."""
    costs = [0.01, *(1.001, 1.0, 0.999, 1.0) * 2, 0.01]
    assert balanced(costs, 4, 2) == (3, 5, 7)


def test_cuts_go_on_the_way_they_went():
    assert further((5,), (6,), 11) == (7,)
    assert further((3, 5, 7), (3, 4, 7), 10) is None, "no stage would be left between 3 and 3"
    assert further((9,), (10,), 11) is None
    assert further((5,), (5,), 11) is None


def test_a_rank_that_fails_says_why_in_one_line():
    with pytest.raises(UserError, match=r"^times: KeyError: 'nobody'$"):
        run_ranks(RankSpec(model="nobody", kind="times"))
    assert last_words("[rank0]: a.B.SomeError: no\n[rank0]:  more\n") == "a.B.SomeError: no"
    assert last_words("killed\n") == "killed"
    assert last_words("") == ""


def test_a_rank_that_is_stuck_is_ended_and_says_where():
    with pytest.raises(StuckError, match=r"^plain: stuck for 0 s: rank 0 in .+:\d+ \(.+\)$"):
        run_ranks(RankSpec(model="gpt", kind="plain", timed=1000, longest_s=0.1))
    log = (
        "hello\nTimeout (0:02:00)!\nThread 0x2 (most recent call first):\n"
        '  File "/a/b.py", line 1 in other\n\nThread 0x1 (most recent call first):\n'
        '  File "/x/file_baton.py", line 50 in wait\n  File "/x/y.py", line 2 in load\n'
    )
    assert place_of(log) == "file_baton.py:50 (wait)"
    assert place_of("Timeout while waiting for others") is None


def test_names_and_counts():
    assert set(ALL) >= {"one-thread", "ddp", "tdp-zbv", "deepspeed", "timeprest", "zb-h1"}
    assert counts(contestant_named("tdp-dualpipev"), 16) == [4, 8, 16]
    assert counts(contestant_named("tdp-1f1b"), 12) == [2, 3, 4, 6, 12]
    assert counts(contestant_named("tdp-1f1b@4"), 16) == [4]
    assert contestant_named("gpipe@4").variant == "gpipe"
    placed = contestant_named("timeprest@4+2")
    assert (placed.variant, placed.micro_batches, placed.stages_per_rank) == ("timeprest", 4, 2)
    cut = contestant_named("zb-v=tdp-zbv")
    assert (cut.variant, cut.cut_as, cut.file_name) == ("zb-v", "tdp-zbv", "zb-v-as-tdp-zbv")
    assert contestant_named("timeprest@2").on(4).processes == 4
    for wrong in (
        "tdp-1f1b+2",
        "tdp-1f1b=tdp-zbv",
        "zb-v=ddp",
        "timeprest+",
        "timeprest+2@4",
        "nobody",
        "gpipe@",
        "gpipe@0",
        "gpipe@x",
        "gpipe/3",
    ):
        with pytest.raises(UserError, match="choose of"):
            contestant_named(wrong)


def test_what_is_cut_as_a_rival_has_its_cuts_and_is_predicted_anew(tmp_path):
    layers = [(name, 8, 1e-3, 2e-3, 8, []) for name in ("0", "1", "2.a", "2.b", "3", "4", "5")]
    names = [name for name, *_ in layers]
    edges = [(a, b, f"t{a}", 16) for a, b in zip(names, [*names[1:], "output"], strict=True)]
    profile = profile_by_hand(layers, edges)
    plan = solve(profile, uniform_cluster(2), "zb-v", mini_batch=4, micro_batches=4)
    path, profile_path = tmp_path / "plan.json", tmp_path / "profile.json"
    write_file(profile_path, profile)
    write_file(path, plan)
    cut_as(path, profile_path, Choice(micro_batches=4, cuts=(1, 2, 3)))
    found = read_plan(path)
    assert [stage.nodes[0] for stage in found.stages] == ["0", "1", "2.a", "3"]
    assert found.predicted.period_s > plan.predicted.period_s
    assert found.solver.bound_s == plan.solver.bound_s


def test_updates_in_bunches_are_timed_by_whole_bunches():
    """Two stages on a device may update as 1, 1, 2 mini-batches of time apart, and again."""
    placed = {"stages_per_device": 2, "placement": "loop", "micro_batches": 1, "run_ahead": "auto"}
    plan = solve(chain(7), uniform_cluster(2), "pipedream", mini_batch=4, **placed)
    steady = steady_state(pipeline_of(plan))
    assert steady.cycle == 3
    deep = max(stage.in_flight for stage in plan.stages)
    assert steady.mini_batches > deep
    assert whole_cycles(plan, Length(warm=1, timed=4)) == Length(steady.mini_batches, 6)
    uneven = Length(UNEVEN * deep, 2 * UNEVEN * deep)
    assert whole_cycles(plan, Length(warm=1, timed=2)) == uneven
    longer = Length(max(uneven.warm, steady.mini_batches) + 1, uneven.timed + 1)
    assert whole_cycles(plan, longer) == Length(longer.warm, -(-longer.timed // 3) * 3)


def test_results_of_another_machine_are_refused(tmp_path):
    here = machine()
    path = tmp_path / "races.json"
    # A kernel keeps now more, now less of the memory for itself.
    like = msgspec.structs.replace(here, memory_bytes=here.memory_bytes + 12_288)
    write_results(path, Results(machine=like))
    assert read_results(path, here).machine == like
    write_results(path, Results(machine=msgspec.structs.replace(here, cores=here.cores + 1)))
    with pytest.raises(FileError, match="another machine"):
        read_results(path, here)


def test_a_slow_machine_is_waited_for_or_told_of(tmp_path, monkeypatch):
    """Runs at a slow pace are left out, unless patience is said to end."""
    monkeypatch.setattr(rounds_module, "wait_for_quiet", lambda most: None)
    monkeypatch.setattr(rounds_module, "race_ours", lambda *_: figures(1.0))
    lines = []
    for patience_s, kept in ((None, False), (0.0, True)):
        settings = Settings(
            tmp_path, 1, Length(1, 1), until=0.0, most_foreign=1.0, patience_s=patience_s
        )
        racer = Racer(settings, lines.append)
        monkeypatch.setattr(racer._pace, "now", lambda: 0.5)
        found = racer._run(contestant_named("timeprest"), "gpt")
        assert (found is not None) == kept
        racer.close()
    assert any("not run" in line for line in lines)
    assert found.pace == 0.5
    # Of a moment, others' share of the processors says nothing.
    assert racer._good(msgspec.structs.replace(found, foreign_share=0.0))


def test_window_is_from_update_to_update(tmp_path):
    lines = [
        {"op": f"0{kind}{k}", "begin_s": k + begin, "end_s": k + begin + spent + 0.1}
        | {"compute_s": spent / 2, "loading_s": spent / 2, "communication_s": 0.05}
        for k in range(6)
        for kind, begin, spent in (("F", 0.0, 0.2), ("B", 0.3, 0.3), ("U", 0.8, 0.1))
    ]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))
    found = window_of(tmp_path / "log", Length(warm=2, timed=3))
    assert found == pytest.approx((1.0, 0.6, 0.15))


def test_micro_batches_train_as_a_whole_mini_batch():
    """And no sample is seen twice."""
    race = Race(
        "small",
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)),
        lambda n: TensorDataset(torch.randn(n, 3), torch.randint(4, (n,))),
        mini_batch=8,
    )
    steps = [plain(race, count) for count in (1, 4)]
    losses = [[step(k) for k in range(5)] for step in steps]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    take = batches(race)
    seen = torch.cat([take(k)[0] for k in range(MINI_BATCHES)])
    assert len(seen.unique(dim=0)) == 8 * MINI_BATCHES
    halves = [batches(race, rank, 2)(3)[0] for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), take(3)[0])
