"""Orders that users give: run in any system's weight rules, equal to the oracle."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import timeprest
from click.testing import CliRunner
from helpers.against_oracle import train
from helpers.output.doc_pages import ROOT, blocks
from helpers.plans import with_times
from timeprest.cli.plan import main as tp_plan_main
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.plan import check_plan, read_plan
from timeprest.planner.schedules.given import check_order
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.orders import parse_order
from timeprest.profiles.errors import PlanError
from timeprest.profiles.files import write_file

(DOCUMENTED,) = (
    block.text for block in blocks(ROOT / "docs/orders.md") if block.text.startswith("# order.txt")
)

WHOLE = """
0F0.0 0F1.0 | 0B0 0F2.0
1F0.0 | 1B0 1F1.0
"""
"""1F1B over mini-batches."""

TWO = """
0F0.0 0F0.1 0F1.0 | 0F1.1 0B0 0F2.0   # one micro-batch further than the rule of nF1B
1F0.0 1F0.1 | 1B0 1F1.0 1F1.1
"""

PAIRS = """
| 0F0.0 0F0.1 0F1.0 0F1.1 0B0 0B1
| 1F0.0 1F0.1 1F1.0 1F1.1 1B0 1B1
"""
"""Two mini-batches forward, then two backward."""

LATE_UPDATES = """
0F0.0 0F1.0 0F2.0 0B0 0F3.0 0U0 | 0B1 0F4.0 0U1
1F0.0 1B0 1F1.0 1U0 | 1B1 1F2.0 1U1
"""

BEHIND = """
0F0.0 | 0B0 0U0 0F1.0
1F0.0 1B0 | 1F1.0 1U0 1B1
"""
"""An update behind a forward that another device runs behind as many updates."""

BETWEEN = """
| 0F0.0 0F0.1 0F0.2 0B0 0F1.0 0U0 0F1.1 0F1.2 0B1 0U1
| 1F0.0 1F0.1 1F0.2 1B0 1U0 1F1.0 1F1.1 1F1.2 1B1 1U1
"""
"""An update between forwards of one mini-batch."""

BOTTOM = """
0F0.0 2F0.0 0F1.0 | 2B0 0B0 2F1.0 0F2.0
1F0.0 | 1F1.0 1B0
"""
"""Two stages on one device: updates at different moments."""

BACK = """
0F0.0 0F0.1 0F0.2 0B0.2 0B0.1 0B0.0
1F0.0 1F0.1 1F0.2 1B0.2 1B0.1 1B0.0
"""
"""GPipe with backwards from the last micro-batch to the first, as its paper draws them."""

BACK_IN_PARTS = """
0F0.0 0F0.1 0F0.2 0B0.2 0B0.1 0W0.2 0B0.0 0W0.1 0W0.0
1F0.0 1F0.1 1F0.2 1B0.2 1W0.2 1B0.1 1B0.0 1W0.1 1W0.0
"""

BY_MICRO_BATCH = """
0F0.0 0F0.1 0F1.0 | 0B0.0 0F1.1 0B0.1 0F2.0
1F0.0 | 1B0.0 1F0.1 1B0.1 1F1.0
"""


def plan_of(profile, text, variant, **more):
    order = parse_order(text)
    check_order(order)
    cluster = uniform_cluster(len(order.rows))
    return solve(with_times(profile), cluster, variant, order=order, mini_batch=8, **more)


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        (DOCUMENTED, "timeprest"),
        (DOCUMENTED, "pipedream"),
        (WHOLE, "timeprest"),
        (WHOLE, "pipedream"),
        (WHOLE, "spectrain"),
        (WHOLE, "pipedream-nesterov"),
        (WHOLE, "pipemare"),
        (BACK, "gpipe"),
        (BACK, "pipedream-flush"),
        (BACK_IN_PARTS, "zb-h1"),
        (TWO, "timeprest"),
        (TWO, "timeprest-stashed"),
        (TWO, "pipedream"),
        (TWO, "i-timeprest"),
        (PAIRS, "pipedream"),
        (PAIRS, "v-timeprest"),
        (LATE_UPDATES, "pipedream"),
        (LATE_UPDATES, "pipeoptim"),
        (BEHIND, "pipedream"),
        (BEHIND, "v-timeprest"),
        (BEHIND, "spectrain"),
        (BETWEEN, "timeprest"),
        (BETWEEN, "v-timeprest"),
        (BOTTOM, "timeprest"),
        (BOTTOM, "pipedream"),
        (BY_MICRO_BATCH, "pipedream-2bw"),
        (BY_MICRO_BATCH, "pipemare"),
    ],
)
def test_runs_equal_the_oracle(text, variant, mlp_profile, mlp_target, tmp_path):
    plan = plan_of(mlp_profile, text, variant)
    summary = train(plan, mlp_target, "momentum", tmp_path / "run")
    # What the plan said holds in the run.
    for stage, predicted in zip(summary.stages, plan.predicted.stages, strict=True):
        assert stage.versions_held <= predicted.versions_held
        assert max(map(int, stage.version_differences)) <= predicted.version_difference


def test_an_order_from_file_to_run(mlp_profile, mlp_target, tmp_path, monkeypatch):
    """Solved, shown and checked by the commands; trained in processes, as inline."""
    monkeypatch.chdir(tmp_path)
    Path("order.txt").write_text(TWO)
    write_file("profile.json", with_times(mlp_profile))

    def tp_plan(*words):
        return CliRunner().invoke(tp_plan_main, words)

    solved = tp_plan(
        "solve", "profile.json", "--order", "order.txt", "--mini-batch", "8", "-o", "plan.json"
    )
    assert solved.exit_code == 0, solved.output
    assert "in timeprest's weight rules" in " ".join(solved.output.split())
    plan = read_plan("plan.json")
    assert plan.order == parse_order(TWO).lines()
    assert [stage.in_flight for stage in plan.stages] == [2, 1]
    shown = tp_plan("show", "plan.json", "--svg", "order.svg", "--html", "order.html")
    assert "0F0.0 0F0.1 0F1.0 0F1.1 0B0 0U0 0F2.0" in shown.output
    assert {"order.svg", "order.html"} <= {path.name for path in tmp_path.iterdir()}
    checked = tp_plan("check", "plan.json", "--profile", "profile.json", "-o", "again.json")
    assert checked.exit_code == 0, checked.output
    assert Path("again.json").read_bytes() == Path("plan.json").read_bytes()
    as_planned = timeprest.plan(
        with_times(mlp_profile), order="order.txt", mini_batch=8, variant="timeprest"
    )
    assert (as_planned.stages, as_planned.predicted) == (plan.stages, plan.predicted)
    train(plan, mlp_target, "momentum", tmp_path / "run", inline=False)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({}, "order: has 3 lines, one for each device; the cluster has 2 (--devices 3)"),
        ({"stages": 2}, "--stages 2: order has 3 stages; leave it out"),
        ({"micro_batches": 4}, "--micro-batches 4: order has 1 in a mini-batch; leave it out"),
        ({"stages_per_device": 2}, "--stages-per-device 2: order says which device runs"),
        ({"placement": "v"}, "--placement v: order says which device runs which stage"),
        ({"solver": "x"}, "--solver x: give one of"),
        ({"solver": "ilp"}, "--solver ilp: cuts of order are found by their loads; leave it out"),
        ({"stages": 8}, "order: has 8 stages; the model can be cut into 7 stages at most"),
    ],
)
def test_what_an_order_leaves_open(asked, why, mlp_profile):
    stages = asked.get("stages", 3) if "cut" in why else 3
    order = parse_order([f"{s}F0.0 {s}B0" for s in range(stages)])
    cluster = uniform_cluster(stages if asked else 2)
    with pytest.raises(PlanError) as raised:
        solve(mlp_profile, cluster, order=order, **asked)
    assert str(raised.value).startswith(why)


def test_edited_orders(mlp_profile):
    plan = plan_of(mlp_profile, TWO, "timeprest")
    for order, why in (
        ((*plan.order, "| 2F0.0 2F0.1 2B0 2U0"), "order: has 3 stages, the plan 2"),
        (("0F0.0 0B0", "1F0.0 1B0"), "micro_batches: the order has 1 in a mini-batch, not 2"),
        (("0F0.0 0F0.1 1F0.0 1F0.1 1B0 0B0",), "order: its lines have other stages than"),
        (("0F0.0", "1F0.0 1B0"), "order: line 1: 0B0 is missing"),
        (("0F0.0 0F0.1 0B0", "1F0.0 1F0.1 1B0"), r"stages\[0\].in_flight: must be 1"),
    ):
        with pytest.raises(PlanError, match=f"plan.json: {why}"):
            check_plan(msgspec.structs.replace(plan, order=order), "plan.json")
