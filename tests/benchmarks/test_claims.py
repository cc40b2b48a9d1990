"""The claims' page: verdicts and tables, of studies made by hand. Nothing is trained."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest
import timeprest
import torch
from helpers.by_hand.profiles import chain
from helpers.by_hand.studies import arm, curve, study
from helpers.plans import chain_plan
from timeprest.planner.search.answer.recheck import recheck
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import UserError
from timeprest.runtime.study.figures.curves import points_of
from timeprest.runtime.study.figures.study import PLAIN, EvaluationPoint, studied, write_study
from timeprest.tests.benchmarks.claims import originals, small, tasks
from timeprest.tests.benchmarks.claims.alike import delayed, lags_of, order_on_two, training_of
from timeprest.tests.benchmarks.claims.claims import (
    CLAIMS,
    FoundCell,
    as_many_samples,
    fewer_samples,
    less_memory,
    less_time,
    more_samples,
    shorter_period,
)
from timeprest.tests.benchmarks.claims.further import PARTS, at_unit_times, in_whole
from timeprest.tests.benchmarks.claims.page import (
    _choices,
    _mini_batches,
    found_cells,
    verdict,
    write_page,
)
from timeprest.tests.benchmarks.claims.plans import (
    BANDWIDTHS,
    SWEPT,
    CellPlans,
    SystemPlan,
    plans_path,
    write_plans,
)
from timeprest.tests.benchmarks.claims.studies import FULL, SHORT, STUDIES, cells, study_path

SLOW = {
    "timeprest": (1.2, 1.22, 1.21),
    "pipedream": (0.9, 0.91, 0.9),
    "v-timeprest": (1.1, 1.25, 1.2),
    "i-timeprest": (1.21, 1.22, 1.2),
}
"""Samples over plain training's, by seed; of all others 1.1."""
SOME = chain_plan("v-timeprest")
PERIODS = {"timeprest": 0.5, "pipedream": 1.0}


def found(slow=SLOW):
    unflushed = [name for name, v in VARIANTS.items() if not v.flushes]
    arms = [arm(name, slow.get(name, (1.1, 1.1, 1.1))) for name in unflushed]
    arms.append(arm("uniform delay of 1", (2.0, 2.0, 2.1), kind="uniform delay"))
    periods = {name: PERIODS.get(name, 0.8) for name in unflushed}
    own = {name: msgspec.structs.replace(SOME, variant=name) for name in {*unflushed, *SWEPT}}
    made = study([arm(PLAIN, (1, 1, 1), kind="plain"), *arms], periods, plans=own)
    flushing = [
        msgspec.structs.replace(studied(own[name], name, f"{name}.json", PLAIN), period_s=1.5)
        for name in SWEPT
        if VARIANTS[name].flushes
    ]
    made = msgspec.structs.replace(made, plans=(*made.plans, *flushing))
    one = {
        "versions": (2, 2),
        "differences": (1, 0),
        "distance": 1,
        "message_bytes": 100,
    }
    systems = {
        name: SystemPlan(
            memory_bytes=(10, 30) if name == "timeprest" else (20, 25),
            weight_bytes=(4, 4) if name == "v-timeprest" else (8, 4),
            periods_s=dict.fromkeys(BANDWIDTHS, PERIODS.get(name, 0.8)),
            **one,
        )
        for name in {*unflushed, *SWEPT}
    }
    plans = CellPlans(
        systems=systems,
        parallel_periods_s=dict.fromkeys(BANDWIDTHS, 3.0),
        parallel_bytes=1000,
    )
    return FoundCell(cells("plain", "2")[0], made, made, plans)


@pytest.mark.parametrize(
    ("judge", "outcome", "figure"),
    [
        (more_samples("timeprest", "pipedream"), "yes", "1.3"),
        (fewer_samples("timeprest", "pipedream"), "no", "1.3"),
        (fewer_samples("v-timeprest", "timeprest"), "equal", "0.98"),
        (as_many_samples("i-timeprest", "timeprest"), "yes", "1.0"),
        (as_many_samples("v-timeprest", "timeprest"), "equal", "0.98"),
        (as_many_samples("timeprest", "pipedream"), "no", "1.3"),
        (shorter_period("timeprest", "pipedream"), "yes", "0.50"),
        (less_time("timeprest", "pipedream"), "yes", "0.6"),
        (less_memory("timeprest", "pipedream"), "yes", "0.89; by stage 0.50, 1.20"),
    ],
)
def test_a_claim_holds_where_its_interval_is_on_its_side(judge, outcome, figure):
    judged = judge(found())
    assert judged.outcome == outcome
    assert judged.figure.startswith(figure)


def test_pipedream_stands_with_both_mini_batches():
    """A curve of parts counts in whole mini-batches, at the same samples."""
    parts = curve(window=4, length=1200)
    whole = in_whole(parts, 4)
    assert (whole.length, whole.window) == (300, 1)
    assert points_of(whole, "loss", 8) == points_of(parts, "loss", 2)
    assert in_whole(curve(diverged_at=3), 4).diverged_at == 1
    some = found()
    assert _mini_batches([some]) == []
    name = f"pipedream, {PARTS}"
    plan = msgspec.structs.replace(some.plan("pipedream"), name=name, arm=name, period_s=0.1)
    study_of_both = msgspec.structs.replace(
        some.study,
        arms=(*some.study.arms, arm(name, (0.5, 0.5, 0.5))),
        plans=(*some.study.plans, plan),
    )
    both = replace(some, study=study_of_both)
    *_, table = _mini_batches([both])
    assert "| plain, S = 2 | M | 0.90" in table
    assert "| plain, S = 2 | M / N | 0.50" in table
    # It isn't a plan that mini-batches of M can be planned with.
    assert _choices([both]) == _choices([some])


def test_who_never_gets_there_has_a_bound():
    late = found({**SLOW, "timeprest": (9, 9, 9)})
    judged = fewer_samples("timeprest", "pipedream")(late)
    assert judged.outcome == "no"
    assert judged.figure.startswith("> 1.6")
    assert fewer_samples("pipedream", "timeprest")(late).figure.startswith("< 0.6")
    # At half the period it may be first in the end, but isn't on the way there.
    judged = less_time("timeprest", "pipedream")(late)
    assert judged.outcome == "no"
    assert judged.figure.endswith("at ⅔ (timeprest not reached)")
    both = found({**SLOW, "timeprest": (9, 9, 9), "pipedream": (9, 9, 9)})
    judged = fewer_samples("timeprest", "pipedream")(both)
    assert judged == ("unknown", "timeprest, pipedream: not reached at ⅓")


def test_where_neither_gets_to_the_end_an_earlier_level_says_it():
    """The lowest loss that one of both reaches with every seed."""
    both = found({**SLOW, "timeprest": (2.6, 2.7, 2.6), "pipedream": (1.9, 2.0, 1.9)})
    judged = more_samples("timeprest", "pipedream")(both)
    assert judged.outcome == "yes"
    assert judged.figure.endswith("at ⅔ (timeprest not reached)")


def test_plans_that_share_a_training_are_equal_and_their_periods_decide():
    cell = found({**SLOW, "timeprest": (9, 9, 9)})
    plans = tuple(
        msgspec.structs.replace(plan, arm="timeprest") if plan.name == "pipedream" else plan
        for plan in cell.study.plans
    )
    shared = replace(cell, study=msgspec.structs.replace(cell.study, plans=plans))
    assert fewer_samples("timeprest", "pipedream")(shared).outcome == "equal"
    assert as_many_samples("timeprest", "pipedream")(shared).outcome == "yes"
    assert less_time("timeprest", "pipedream")(shared) == ("yes", "0.50; they train alike")


# Which plans train alike -------------------------------------------------------------------------


def at_paper_limits(variant, stages=4, n=4):
    plan = chain_plan(variant, stages, n)
    limits = (stages - s for s in range(stages))
    replace = msgspec.structs.replace
    own = (replace(stage, in_flight=most) for stage, most in zip(plan.stages, limits, strict=True))
    return recheck(replace(plan, stages=tuple(own)), chain(stages)).plan


def test_without_a_stash_n_doesnt_matter_but_where_samples_mix():
    """Real backwards are long, so that all micro-batches are S − 1 updates late."""
    several, whole = at_paper_limits("timeprest"), at_paper_limits("pipedream-unstashed")
    assert lags_of(several)[0][-1] == (3,) * 4
    for mixes in (False, True):
        same = training_of(several, mixes=mixes) == training_of(whole, mixes=mixes)
        assert same is not mixes
    stashed = at_paper_limits("timeprest-stashed")
    assert training_of(stashed, mixes=False) == delayed(3)
    assert training_of(several, mixes=False) != delayed(3)


def test_where_stages_use_their_own_latest_cuts_matter():
    plan = at_paper_limits("v-timeprest")
    moved = msgspec.structs.replace(plan, stages=plan.stages[::-1])
    assert training_of(plan, mixes=False) != training_of(moved, mixes=False)
    with pytest.raises(ValueError, match="v-timeprest: its stages use different versions"):
        order_on_two(plan, 100)


@pytest.mark.parametrize(
    ("stages", "n", "late"), [(4, 4, (2, 2, 1, 1)), (2, 4, (1, 1, 0, 0)), (4, 1, (3,))]
)
def test_unit_times_are_those_of_the_journals_figures(stages, n, late):
    """Its figure 2b: of the third of four micro-batches on, a mini-batch has a newer update."""
    plan = at_unit_times(at_paper_limits("timeprest", stages, n))
    assert lags_of(plan)[0][-1] == late


def at_times(plan, shares):
    """With stages that take so much less time."""
    replace = msgspec.structs.replace
    stages = [
        replace(stage, forward_s=share * stage.forward_s, backward_s=share * stage.backward_s)
        for stage, share in zip(plan.predicted.stages, shares, strict=True)
    ]
    return replace(plan, predicted=replace(plan.predicted, stages=tuple(stages)))


@pytest.mark.parametrize(
    ("plan", "repeats"),
    [
        (at_paper_limits("timeprest"), True),
        (at_unit_times(at_paper_limits("timeprest")), True),
        (at_times(at_paper_limits("timeprest", 3, 3), (1, 0.95, 0.8)), True),
        (at_times(at_paper_limits("timeprest", 6, 3), (0.95, 0.95, 0.95, 0.8, 0.95, 0.9)), False),
    ],
)
def test_two_stages_train_as_more(plan, repeats, tmp_path):
    """Where stages drift against one another and nothing repeats, for an epoch."""
    (tmp_path / "order.txt").write_text(order_on_two(plan, 200))
    asked = {"variant": "timeprest", "devices": 2, "mini_batch": plan.mini_batch}
    two = timeprest.plan(chain(4), order=str(tmp_path / "order.txt"), **asked)
    assert len(two.stages) == 2
    assert training_of(two, mixes=True) == training_of(plan, mixes=True)
    if not repeats:
        with pytest.raises(ValueError, match=r"don't repeat within 240 .* epoch has 1000"):
            order_on_two(plan, 1000)


def test_verdicts_over_cells():
    cell = found()
    yes, no, equal = (
        judge(cell)
        for judge in (
            more_samples("timeprest", "pipedream"),
            fewer_samples("timeprest", "pipedream"),
            fewer_samples("v-timeprest", "timeprest"),
        )
    )
    assert verdict([yes]) == "holds"
    assert verdict([yes, no]) == "holds in 1 of 2 (doesn't in 1)"
    assert verdict([no]) == "doesn't hold"
    assert verdict([no, equal]) == "doesn't hold (doesn't in 1; equal in 1)"
    assert verdict([equal]) == "not shown (equal in 1)"


def test_the_page_has_every_claim_and_what_is_missing(tmp_path):
    cell = found()
    write_study(study_path(cell.cell, FULL, tmp_path), cell.study)
    write_study(study_path(cell.cell, SHORT, tmp_path), cell.study)
    write_plans(plans_path(cell.cell, tmp_path), cell.plans)
    assert [each.cell.name for each in found_cells(tmp_path)] == ["plain-2"]
    told = write_page(tmp_path, tmp_path / "claims.md")
    assert told.startswith(f"{len(CLAIMS)} claims, 1 cells: ")
    page = (tmp_path / "claims.md").read_text()
    assert all(claim.text in page for claim in CLAIMS)
    assert "**Not studied yet**: plain-4" in page
    assert f"$ make claims\n...\n{told}\n" in page
    choices = (tmp_path / "claims" / "choices.md").read_text()
    assert "| plain, S = 2 | `timeprest` | `timeprest` | 1.00 | within 5 % |" in choices
    assert "(claims/plain.md)" in page
    assert "| `timeprest` |" in (tmp_path / "claims" / "plain.md").read_text()


def test_the_originals_set_ups_show_who_is_ahead_half_way(tmp_path):
    assert originals.originals(tmp_path) == []
    slow = {"timeprest": (0.8, 0.8, 0.81), "pipedream": (1.0, 1.3, 0.8)}
    arms, plans = [arm(PLAIN, (1, 1, 1), kind="plain")], []
    for stages, names in originals.SYSTEMS.items():
        for name in names:
            own = msgspec.structs.replace(SOME, variant=name)
            plan = studied(own, f"{name} S={stages}", "x.json", f"{name} S={stages}")
            fields = {"in_flight": (1,), "version_differences": (0,), "parameter_bytes": (1,)}
            fields = {field: stages * value for field, value in fields.items()}
            plans.append(msgspec.structs.replace(plan, stages=stages, delays=None, **fields))
            slows = slow.get(name, (1, 1, 1)) if stages == 2 else (1.5, 1.5, 1.5)
            arms.append(arm(plan.arm, slows))
    tests = [EvaluationPoint(mini_batches=n, figures={"accuracy": n / 400}) for n in (150, 300)]
    arms = [
        msgspec.structs.replace(
            each, curves=tuple(msgspec.structs.replace(c, tests=tuple(tests)) for c in each.curves)
        )
        for each in arms
    ]
    made = msgspec.structs.replace(study(arms, {}), plans=tuple(plans))
    write_study(tmp_path / "llama-0.003.json", made)
    _, _, losses, told, ahead = originals.originals(tmp_path)
    assert told.startswith("**That `timeprest` is ahead of both half-way isn't seen in any of 2 (")
    assert "| small Llama | 0.003 | accuracy | 37.5% / 75.0% |" in losses
    assert (
        "`timeprest` over `pipedream-flush`: ahead in 1, equal within the seeds' spread in 0"
        in told
    )
    assert "`pipedream` over `plain`: ahead in 0, equal within the seeds' spread in 1" in told
    assert "| small Llama | 0.003 | ✓ 0.80 (0.79–0.82) | ✗ 1.50 (1.50–1.50) | = 1.00 (" in ahead


def test_cells_are_those_asked_for():
    assert [cell.name for cell in cells("plain,normed", "2,8")] == [
        *("plain-2", "plain-8"),
        *("normed-2", "normed-8"),
    ]
    assert {cell.micro_batches for cell in cells("all", "all")} == {4, 8}
    with pytest.raises(UserError, match="task 'nobody': choose of plain"):
        cells("nobody", "2")
    with pytest.raises(UserError, match="devices 'x': choose of 2, 4, 8"):
        cells("plain", "2,x")


def test_what_is_kept_names_no_folder_of_a_machine():
    kept = sorted(STUDIES.glob("*.json"))
    assert kept
    assert not [path.name for path in kept if re.search(r'": "/', path.read_text())]


@pytest.mark.parametrize(
    "task", [tasks.plain, tasks.normed, tasks.characters, small.bottlenecks, small.llama]
)
def test_tasks_are_the_same_for_every_stage(task):
    first, again = (task.data("test")[3] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    x, y = (torch.stack([part, part]) for part in map(torch.as_tensor, first))
    torch.manual_seed(0)
    output = task.model()(x)
    assert 1.0 < float(task.loss(output, y).detach()) < 6.0
    assert set(task.metrics(output, y)) == {"accuracy"}


def test_plans_are_read_as_they_were_written(tmp_path):
    cell = found()
    write_plans(plans_path(cell.cell, tmp_path), cell.plans)
    again = msgspec.json.decode(plans_path(cell.cell, tmp_path).read_bytes(), type=CellPlans)
    assert again == cell.plans
