"""Orders that users give: what they mean, what is wrong with bad ones, and our own as such."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.by_hand.unit_pipelines import unit_pipeline
from helpers.output.schedules import schedule_text
from timeprest.planner.schedules.check import check_schedule
from timeprest.planner.schedules.given import in_rules_of, read_order
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.simulator.pipeline import in_a_row
from timeprest.planner.systems.orders import parse_order
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import FileError, OrderError

STRAIGHT = [name for name, variant in VARIANTS.items() if variant.placement == "any"]


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("variant", STRAIGHT)
def test_our_own_orders_go_on_as_by_their_rules(variant, stages):
    """Written out for some mini-batches, read, and run for more."""
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    pipeline = unit_pipeline(variant, stages, n)
    steady = steady_state(pipeline)
    count = 4 * stages + 2 * steady.cycle
    order = parse_order(schedule_text(make_schedule(pipeline, count)))
    system = in_rules_of(VARIANTS[variant], order)
    same = replace(pipeline, variant=system, limits=order.limits)
    for mini_batches in (1, count, count + 9):
        found = make_schedule(same, mini_batches)
        assert found == make_schedule(pipeline, mini_batches)
        check_schedule(same, found, mini_batches)
    assert steady_state(same).period_s == pytest.approx(steady.period_s)
    # Plan files hold the lines.
    assert parse_order(order.lines()) == order


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        # One mini-batch goes on as it is; updates follow the backwards.
        ("0F0.0 0B0\n1F0.0 1B0", ("0F0.0 0B0 0U0", "1F0.0 1B0 1U0")),
        # What is drained at the end doesn't repeat.
        ("0F0.0 0F1.0 0B0 0F2.0 0B1 0B2", ("0F0.0 | 0F1.0 0B0 0U0",)),
        # The same with a mark, wherever it stands.
        ("0F0.0 0F1.0 | 0B0 0F2.0", ("0F0.0 | 0F1.0 0B0 0U0",)),
        ("0F0.0 | 0F1.0 0B0 0F2.0 0B1", ("0F0.0 | 0F1.0 0B0 0U0",)),
        # Without it, the shortest part that makes the same; with it, what it says.
        ("0F0.0 0F1.0 0B0 0B1", ("0F0.0 | 0F1.0 0B0 0U0",)),
        ("| 0F0.0 0F1.0 0B0 0B1", ("| 0F0.0 0F1.0 0B0 0U0 0B1 0U1",)),
        # A beginning of its own stays one.
        (
            "0F0.0 0B0 0F1.0 0F2.0 0B1 0B2 0F3.0 0B3",
            ("0F0.0 0B0 0U0 0F1.0 0F2.0 0B1 0U1 | 0B2 0U2 0F3.0",),
        ),
        # Lines are devices; they are sorted by their stages.
        ("1F0.0 1B0 # behind\n\n0F0.0 2F0.0 2B0 0B0", None),
    ],
)
def test_what_repeats(text, lines):
    order = parse_order(text)
    if lines is None:
        lines = ("0F0.0 2F0.0 2B0 2U0 0B0 0U0", "1F0.0 1B0 1U0")
        assert [row.device for row in order.rows] == [1, 0]
        assert order.placement == (0, 1, 0)
    assert order.lines() == lines
    assert parse_order(order.lines()) == order


def test_a_stage_may_update_twice_before_another_of_its_device_does():
    order = parse_order("0F0.0 0F1.0 1F0.0 1B0 1F1.0 1B1 | 0B0 0F2.0 1F2.0 1B2")
    system = in_rules_of(VARIANTS["pipedream"], order)
    found = make_schedule(in_a_row(system, 1, order.limits, order.placement), 4)
    assert [sum(op.kind == "U" for op in row) for row in found.stages] == [4, 4]


def test_mini_batches_of_different_cycles():
    """A period of two mini-batches: found by the simulation, after the beginning."""
    order = parse_order("0F0.0 0F1.0 0F2.0 | 0B0 0B1 0F3.0 0F4.0\n1F0.0 | 1B0 1F1.0")
    pipeline = unit_pipeline("pipedream", 2, 1)
    pipeline = replace(
        pipeline, variant=in_rules_of(VARIANTS["pipedream"], order), limits=order.limits
    )
    assert order.limits == (3, 1)
    steady = steady_state(pipeline)
    assert steady.cycle % 2 == 0
    assert steady.period_s == 2.0
    check_schedule(pipeline, make_schedule(pipeline, 7), 7)
    by_two = make_schedule(replace(pipeline, update_every=2), 7)[0]
    assert [op.mini_batch for op in by_two if op.kind == "U"] == [1, 3, 5, 6]


GOOD = ["0F0.0 0F0.1 0B0.0 0B0.1", "1F0.0 1F0.1 1B0.0 1B0.1"]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["0F0.0 0G0.0"], "line 1: '0G0.0' is no operation"),
        ([], "has no operations"),
        ([GOOD[0], "1F0.0 1F0.1 1B0.0"], "line 2: 1B0.1 is missing; each stage"),
        ([GOOD[0], "1F0.1 1B0.0 1B0.1"], "line 2: 1F0.1: 1F0.0 is missing before it"),
        ([GOOD[0], "1F0.0 1F0.0 1F0.1 1B0.0"], "line 2: 1F0.0: stands twice"),
        ([GOOD[0], "1F0.1 1F0.0 1B0.0 1B0.1"], "line 2: 1F0.1: stands before 1F0.0; a stage"),
        (["0F0.0 0B0.0 0B0.1 0F0.1"], "line 1: 0B0.1: stands before 0F0.1, which it needs"),
        (["0F0.0 0B0 0F0.1"], "line 1: 0B0: stands before 0F0.1, which it needs"),
        (["0F0.0 0W0.0 0B0.0"], "line 1: 0W0.0: stands before 0B0.0, which it needs"),
        (["0F0.0 0U0 0B0"], "line 1: 0U0: stands before 0B0, which it needs"),
        (["0F0.0 0F1.0 0B0 0B1 0U0 0U1"], "line 1: 0B1: stands before 0U0; gradients of two"),
        (["0F0.0 0F0.1 0B0.0 0B0"], "line 1: 0B0: some backwards take a micro-batch"),
        (["0F0 0B0"], "line 1: 0F0: names no micro-batch"),
        ([*GOOD, "0F1.0"], "line 3: 0F1.0: stage 0 stands on line 1, too"),
        ([GOOD[0], GOOD[1].replace("1", "2")], "stage 1 has no operations, stage 2 has"),
        (["0F0.0 | 0B0 | 0F1.0"], "line 1: has two |"),
        (["0F0.0 0B0 |"], "line 1: nothing stands behind |"),
        (["0F0.0 | 0F1.0 0B0", "1F0.0 1B0"], "line 2: has no |, line 1 has"),
        (["0F0.0 | 0F1.0 0B0 0F2.0"], "line 1: what repeats behind | has 2 forwards of stage 0"),
        (
            ["0F0.0 0F0.1 0B0.0 0B0.1", "1F0.0 1B0.0 1F0.1 1B0.1", "", "2B0.0"],
            "line 4: 2B0.0: stands before 2F0.0",
        ),
        # Each waits for the other: stage 0 for a gradient, before it sends what that one needs.
        (
            ["0F0.0 0B0.0 0F0.1 0B0.1", "1F0.0 1F0.1 1B0.0 1B0.1"],
            r"deadlock: these operations wait for each other: 0B0.0 \(line 1\), 1F0.1 \(line 2\)"
            "; if the lines as they are don't, what they go on with does",
        ),
    ],
)
def test_bad_orders(lines, why, tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("\n".join(lines))
    with pytest.raises(OrderError, match=rf"mine\.txt: {why.replace('|', '[|]')}") as raised:
        read_order(path)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_byte_order_mark_is_no_operation(tmp_path):
    lines = "0F0.0 0B0.0\n"
    (tmp_path / "marked.txt").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "plain.txt").write_text(lines, encoding="utf-8")
    assert read_order(tmp_path / "marked.txt") == read_order(tmp_path / "plain.txt")


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\0")
    for name, why in (("bytes", "isn't text"), ("none", "No such file")):
        with pytest.raises(FileError, match=f"{name}: can't be read: {why}"):
            read_order(tmp_path / name)


@pytest.mark.parametrize(
    ("lines", "variant", "why"),
    [
        (["0F0.0 | 0F1.0 0B0"], "gpipe", "line 1: 0F1.0: stands before 0U0; gpipe flushes"),
        (GOOD, "timeprest", "each backward takes a micro-batch, in timeprest a mini-batch; such"),
        (["0F0.0 0F0.1 0B0"], "gpipe", "each backward takes a mini-batch, in gpipe a micro-batch"),
        (["0F0.0 0F0.1 0B0"], "spectrain", "has 2 micro-batches in a mini-batch; spectrain"),
        (["0F0.0 0B0.0 0W0.0"], "pipemare", "its backwards have two parts, which pipemare"),
        (
            ["0F0.0 0F0.1 0B0.1 0B0.0"],
            "pipedream-2bw",
            "line 1: 0B0.1: backwards run from the last micro-batch to the first; pipedream-2bw",
        ),
        # Stage 1 updates so late that stage 0 is ahead of it.
        (
            ["| 0F0.0 0B0", "1F0.0 1B0 | 1F1.0 1U0 1B1"],
            "timeprest",
            "line 2: 1F1.0: stands before 1U0, which stage 0 had made",
        ),
    ],
)
def test_what_weight_rules_dont_allow(lines, variant, why):
    text = "\n".join(lines)
    if "U" in text:
        text = text.replace("0F0.0 0B0\n", "0F0.0 0B0 0U0\n")
    with pytest.raises(OrderError, match=why):
        in_rules_of(VARIANTS[variant], parse_order(text))
    # The same order in others' rules.
    others = {"gpipe": "v-timeprest", "timeprest": "pipedream", "pipemare": "gpipe"}
    if variant in others and "micro-batch" not in why:
        in_rules_of(VARIANTS[others[variant]], parse_order(text))
