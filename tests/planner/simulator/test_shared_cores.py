"""Devices that take turns on the cores of their machine."""

import os
from collections import Counter
from dataclasses import replace

import pytest
from click.testing import CliRunner
from helpers.by_hand.profiles import chain
from helpers.drawn.pipelines import laid_out
from hypothesis import given
from hypothesis import strategies as st
from timeprest.cli.plan import main
from timeprest.cli.run_commands.checks import device_lines
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.cluster.contention import with_contention
from timeprest.planner.plan import read_plan
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.search.solve import solve
from timeprest.planner.simulator.pipeline import Link, Pipeline
from timeprest.planner.simulator.timeline import idle_cores, least_period_s, simulate
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.files import write_file
from timeprest.profiles.profile import Together
from timeprest.runtime.settings import RunSettings


def pipeline(forward_s, cores, variant="timeprest", limits=None, wire_s=0.0):
    """Stages whose backward takes twice their forward, with free updates."""
    count = len(forward_s)
    return Pipeline(
        variant=VARIANTS[variant],
        micro_batches=1,
        forward_s=tuple(forward_s),
        backward_s=tuple(2 * seconds for seconds in forward_s),
        update_s=(0.0,) * count,
        links=tuple(Link(s, s + 1, wire_s, wire_s, 0.0) for s in range(count - 1)),
        limits=tuple(limits or range(count, 0, -1)),
        pools=((0,),) * count if cores else (),
        cores=(cores,) if cores else (),
    )


def test_two_stages_on_one_core_take_as_long_as_both():
    assert steady_state(pipeline((1.0, 2.0), 0)).period_s == 6.0
    assert steady_state(pipeline((1.0, 2.0), 1)).period_s == 9.0


def test_cuts_need_not_balance_where_stages_are_more_than_cores():
    """In two stages one has twice the other's work; with a third, the other core takes part."""
    two = pipeline((4.0, 2.0), 0, limits=(3, 1))
    assert steady_state(two).period_s == 12.0
    assert idle_cores(two, 12.0) == ()
    three = pipeline((3.0, 2.0, 1.0), 2)
    assert steady_state(three).period_s == pytest.approx(9.0)
    assert idle_cores(three, 9.0) == (0.0,)
    assert idle_cores(three, 12.0) == (0.25,)


def test_messages_keep_a_core_busy():
    free, slow = pipeline((1.0, 1.0, 1.0), 1), pipeline((1.0, 1.0, 1.0), 1, wire_s=0.5)
    assert least_period_s(free) == 9.0
    # Two cuts, forwards and backwards.
    assert least_period_s(slow) == 9.0 + 4 * 0.5
    assert steady_state(slow).period_s >= 11.0


@given(laid_out(), st.integers(1, 4))
def test_no_more_compute_at_once_than_there_are_cores(drawn, mini_batches):
    timeline = simulate(drawn, make_schedule(drawn, mini_batches))
    moments = []
    for s, workers in enumerate(timeline.replicas):
        for j, events in enumerate(workers):
            home = drawn.pools[s][j] if drawn.pools else (s, j)
            for event in events:
                if event.end_s > event.start_s and event.op.kind != "U":
                    moments += [(event.end_s, 0, home), (event.start_s, 1, home)]
    busy = Counter()
    for _, begins, home in sorted(moments, key=lambda m: (round(m[0], 9), m[1])):
        busy[home] += 1 if begins else -1
        assert busy[home] <= (drawn.cores[home] if drawn.pools else 1)


@given(laid_out(), st.integers(1, 3))
def test_enough_cores_change_nothing(drawn, mini_batches):
    """A pool with a core for each replica has the times of replicas with cores of their own."""
    alone = replace(drawn, pools=(), cores=())
    pools = tuple(
        tuple(0 for _ in (alone.paces[s] if alone.paces else (1.0,))) for s in range(alone.stages)
    )
    # One more for every message that is being copied.
    wide = replace(alone, pools=pools, cores=(1000,))
    order = make_schedule(alone, mini_batches)
    assert make_schedule(wide, mini_batches) == order
    assert simulate(wide, order).replicas == simulate(alone, order).replicas


def test_as_many_are_crowded_as_compute_at_once():
    together = Together(processes=4, slowdown=1.3)
    speeds = [
        with_contention(uniform_cluster(4, cores=cores), together).devices[0].speed
        for cores in (None, 4, 2, 1)
    ]
    assert speeds == [round(1 / 1.3, 4), round(1 / 1.3, 4), round(1 / 1.1, 4), 1.0]


def test_plans_for_shared_cores_from_the_command_line(tmp_path):
    profile, path = tmp_path / "profile.json", tmp_path / "plan.json"
    write_file(profile, chain(8, parameters=1000, saved=100))
    words = ["solve", str(profile), "--devices", "3", "--stages", "3", "-o", str(path)]

    def call(*more, code=0):
        done = CliRunner().invoke(main, [*words, *more])
        assert done.exit_code == code, done.output
        return done.output

    text = call("--cores", "1")
    assert "1 for 3 devices" in text
    plan = read_plan(path)
    assert plan.cluster.cores == 1
    work = sum(
        plan.micro_batches * (stage.forward_s + stage.backward_s) + stage.update_s
        for stage in plan.predicted.stages
    )
    assert plan.predicted.period_s >= work * (1 - 1e-9)
    assert plan.solver.bound_s <= plan.predicted.period_s
    assert "for 3 devices" not in call()
    assert read_plan(path).cluster.cores is None
    assert "cores" in call("--cores", "0", code=2)


@pytest.mark.parametrize(
    ("cores", "planned", "threads", "told"),
    [
        (2, None, 1, "--cores 2"),
        (4, None, 2, "--cores 2"),
        (2, 3, 1, "--cores 2"),
        (2, 2, 1, ""),
        (2, 1, 1, ""),
        (4, None, 1, ""),
        (8, None, 2, ""),
    ],
)
def test_a_run_says_that_its_processes_take_turns(monkeypatch, cores, planned, threads, told):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    profile = chain(8, parameters=1000, saved=100)
    plan = solve(profile, uniform_cluster(4, cores=planned), stages=4)
    settings = RunSettings(task="x", threads=threads)
    lines = device_lines(plan, settings, 4)
    assert [told in line for line in lines if "take turns" in line] == ([True] if told else [])
    assert not any("turns" in line for line in device_lines(plan, settings, 4, inline=True))
    assert not any("turns" in line for line in device_lines(plan, settings, 4, one_host=False))
