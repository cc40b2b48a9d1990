"""Schedules of torch.distributed.pipelining: its own trained here, ours as CSV and back."""

from __future__ import annotations

import csv
import io
from unittest.mock import MagicMock

import pytest
from helpers.by_hand.profiles import chain
from helpers.plain_training import assert_trained_as, train_plainly
from helpers.plans import chain_plan, with_times
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.exports.export import exported
from timeprest.planner.plan import pipeline_of
from timeprest.planner.schedules.given import read_order
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.schedules.torch_csv import csv_text
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import OrderError, PlanError
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

STEPS = 6


def torchs_own(name, ranks, per_rank, n):
    """The operations that a class of torch's has for these ranks, as it would write them."""
    # Loading it takes two seconds, which only who runs these tests has to wait for.
    from torch.distributed.pipelining import schedules

    stages = [
        MagicMock(num_stages=ranks * per_rank, group_size=ranks, group_rank=0, stage_index=k)
        for k in range(per_rank)
    ]
    made = getattr(schedules, f"Schedule{name}")
    single = issubclass(made, schedules.PipelineScheduleSingle)
    found = made(stages[0] if single else stages, n, loss_fn=lambda *_: 0).pipeline_order
    out = io.StringIO()
    # As its _dump_csv; bubbles are empty.
    csv.writer(out).writerows(found.values())
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "ranks", "per_rank", "variant"),
    [
        ("GPipe", 2, 1, "gpipe"),
        # 1F1B: with one stage on each rank, the interleaved schedule is.
        ("Interleaved1F1B", 3, 1, "pipedream-flush"),
        ("Interleaved1F1B", 2, 2, "interleaved-1f1b"),
        # Its backwards run from the last micro-batch to the first.
        ("LoopedBFS", 2, 2, "gpipe"),
        ("InterleavedZeroBubble", 2, 2, "zb-h1"),
        ("ZBVZeroBubble", 2, 2, "zb-v"),
        # Some of its backwards are split and others whole, and operations overlap.
        ("DualPipeV", 2, 2, "zb-v"),
        ("DualPipeV", 2, 2, "gpipe"),
    ],
)
def test_torchs_schedules_train_plainly(
    name, ranks, per_rank, variant, mlp_profile, mlp_target, tmp_path
):
    path = tmp_path / "schedule.csv"
    path.write_text(torchs_own(name, ranks, per_rank, 4))
    order = read_order(path)
    assert (order.stages, order.micro_batches, len(order.rows)) == (ranks * per_rank, 4, ranks)
    cluster = uniform_cluster(ranks)
    plan = solve(with_times(mlp_profile), cluster, variant, order=order, mini_batch=8)
    run(
        plan,
        RunSettings(task=mlp_target, steps=STEPS, evaluate=False),
        tmp_path / "run",
        inline=True,
    )
    assert_trained_as(tmp_path / "run", train_plainly(mlp_target, plan.mini_batch, STEPS))
    # And out again: what torch wrote, in the parts that are run here, without its bubbles.
    again = read_csv(csv_text(make_schedule(pipeline_of(plan), 1)), path)
    assert (again.rows, again.reverse) == (order.rows, order.reverse)


def read_csv(text, path):
    path.write_text(text)
    return read_order(path)


@pytest.mark.parametrize(
    ("variant", "placement"),
    [
        ("gpipe", ()),
        ("pipedream-flush", ()),
        ("zb-h1", ()),
        ("interleaved-1f1b", (0, 1, 0, 1)),
        ("zb-v", (0, 1, 1, 0)),
    ],
)
def test_our_schedules_come_back(variant, placement, tmp_path):
    """The same plan, out as CSV and in again: nothing but its order is new."""
    plan = chain_plan(variant, stages=3, placement=placement)
    (text,) = [
        text for name, text in exported_for_torchtitan(plan).items() if name.endswith(".csv")
    ]
    order = read_csv(text, tmp_path / "ours.csv")
    again = solve(
        chain(len(plan.stages)),
        plan.cluster,
        variant,
        order=order,
        mini_batch=plan.mini_batch,
        optimizer_state_factor=plan.optimizer_state_factor,
    )
    for field in ("variant", "micro_batches", "stages", "edges", "predicted"):
        assert getattr(again, field) == getattr(plan, field), field
    assert again.order == order.lines()


def exported_for_torchtitan(plan):
    return exported(plan, "torchtitan", None).files


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0F0,0F1,0B0,0B1\n1F0,1B0", "line 2: 1F1 is missing; each stage"),
        ("0F0,0B0\n1F0,1F0,1B0", "line 2: 1F0: stands twice"),
        ("0F0,0B0\n1B0,1F0", "line 2: 1B0: stands before 1F0, which it needs"),
        ("0F0,0I0\n1F0,1B0", "line 1: 0W0 is missing"),
        ("0F0,0W0,0I0", "line 1: 0W0: stands before 0I0, which it needs"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            r"deadlock: these operations wait for each other: 0B0 \(line 1\), 1F1 \(line 2\)",
        ),
        ("0F0,1F0,1B0,0B0\n1F0,1B0", "line 2: 1F0: stage 1 stands on line 1, too"),
        ("0F0,0B0\n2F0,2B0", "stage 1 has no operations, stage 2 has"),
        ("0F0,0SEND_F0,0B0", "line 1: 0SEND_F0 isn't computing; give the compute-only CSV"),
        ("0F0,0F,0B0", "line 1: '0F' is no operation; torch's are as 1F0"),
        ("0F0.0,0B0", "line 1: '0F0.0' is no operation"),
        (f"0F{'1' * 5000},0B0", "line 1: '0F1{38}…' is no operation"),
        # torch 2.13 itself lists the last rank of its 1F1B so.
        (torchs_own("1F1B", 2, 1, 4), "line 1: 0F4 is missing"),
        # Backwards of one stage run the other way round.
        (
            "0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1",
            "line 2: 1B0: stands before 1B1; .* all backwards in that one or all in the other",
        ),
    ],
)
def test_bad_csv(text, why, tmp_path):
    with pytest.raises(OrderError, match=rf"bad\.csv: {why}"):
        read_csv(text, tmp_path / "bad.csv")


def test_an_order_goes_to_torch_where_it_can(tmp_path):
    """As CSV; one that torch can't have is refused."""

    def plan(text, variant):
        order = read_csv(text, tmp_path / "mine.csv")
        return solve(chain(2), uniform_cluster(2), variant, order=order, mini_batch=4)

    text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    found = exported_for_torchtitan(plan(text, "gpipe"))
    assert found["schedule.csv"] == text
    assert "schedule_csv" in found["torchtitan.toml"]
    with pytest.raises(PlanError, match="pipemare never flushes"):
        exported_for_torchtitan(plan(text, "pipemare"))
    for engine, variant, do in (
        ("megatron", "pipedream-flush", "--order out$"),
        ("deepspeed", "pipedream-flush", "--order out$"),
        ("deepspeed", "gpipe", "--order out, and plan with --variant pipedream-flush$"),
    ):
        with pytest.raises(PlanError, match=f"there schedules are built in; leave {do}"):
            exported(plan(text, variant), engine, None)
    both = "| {s}F0.0 {s}F0.1 {s}B0.0 {s}B0.1 {s}F1.0 {s}B1.0 {s}F1.1 {s}B1.1"
    (tmp_path / "two.txt").write_text("\n".join(both.format(s=s) for s in range(2)))
    order = read_order(tmp_path / "two.txt")
    two = solve(chain(2), uniform_cluster(2), "gpipe", order=order, mini_batch=4)
    with pytest.raises(PlanError, match="differs from mini-batch to mini-batch"):
        exported_for_torchtitan(two)
