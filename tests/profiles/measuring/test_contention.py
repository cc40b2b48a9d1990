"""Processes that slow each other down: measured for a profile, and what plans make of it."""

from __future__ import annotations

import os

import msgspec
import pytest
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.cluster.contention import contention_on, slowdown, with_contention
from timeprest.profiles.errors import TargetError
from timeprest.profiles.measuring.contention import measure_together, size_to_time
from timeprest.profiles.profile import Together
from timeprest.profiles.target import resolve

FOUR = Together(processes=4, slowdown=1.3)


def test_between_one_process_and_those_measured_it_grows_evenly():
    assert [slowdown(FOUR, n) for n in (1, 2, 4, 9)] == pytest.approx([1.0, 1.1, 1.3, 1.3])
    assert slowdown(None, 4) == 1.0


def test_devices_of_a_machine_are_as_fast_as_together():
    cluster = uniform_cluster(6, per_machine=4)
    speeds = [device.speed for device in with_contention(cluster, FOUR).devices]
    assert speeds == pytest.approx([1 / 1.3] * 4 + [1 / 1.1] * 2, rel=1e-3)
    assert with_contention(cluster, None) == cluster
    assert [d.speed for d in with_contention(uniform_cluster(1), FOUR).devices] == [1.0]


def test_clusters_that_name_speeds_have_these():
    """One of devices as fast as the one that was profiled says nothing of how fast they are."""
    cluster = uniform_cluster(4)
    assert contention_on(cluster, FOUR) == FOUR
    assert contention_on(cluster, None) is None
    assert contention_on(with_contention(cluster, FOUR), FOUR) is None


def test_a_profile_without_it_is_read_as_before(mlp_profile):
    text = msgspec.json.encode(mlp_profile)
    assert b'"together":null' in text
    older = msgspec.json.decode(text.replace(b'"together":null,', b""), type=type(mlp_profile))
    assert older == mlp_profile


def measured(name, inputs=()):
    return measure_together(
        resolve(name),
        inputs,
        2,
        batch_size=4,
        threads=1,
        autocast=None,
        seconds=0.1,
    )


def test_steps_are_timed_beside_another_process():
    found = measured("mlp:width=16,depth=1")
    assert found.processes == 2
    assert 1 <= found.slowdown < 100


def test_the_shortest_step_that_is_long_enough_is_timed(mlp_profile):
    def sizes(*seconds):
        return [
            msgspec.structs.replace(m, forward_s=s / 4, backward_s=s * 3 / 4)
            for m, s in zip(mlp_profile.whole_model, seconds, strict=True)
        ]

    assert mlp_profile.micro_batch_sizes == (2, 4, 8)
    assert size_to_time(sizes(0.03, 0.06, 0.12)) == 4
    assert size_to_time(sizes(0.06, 0.12, 0.24)) == 2
    assert size_to_time(sizes(0.001, 0.002, 0.003)) == 8


def test_a_model_that_another_process_cant_have_is_refused(tmp_path):
    once = tmp_path / "once.py"
    once.write_text("from timeprest.profiles.zoo.mlp import make_task\nT = make_task('mlp', '')\n")
    target = f"{once}:T"
    found = resolve(target)
    once.unlink()
    with pytest.raises(TargetError, match="several processes"):
        measure_together(found, (), 2, batch_size=4, threads=1, autocast=None, seconds=0.1)


@pytest.mark.slow
def test_a_model_that_prints_is_measured_all_the_same(tmp_path):
    task = tmp_path / "talks.py"
    task.write_text(
        "import sys\nfrom timeprest.profiles.zoo.mlp import make_task\n"
        "sys.stdout.write('hello')\nsys.stdout.flush()\nT = make_task('mlp', '')\n"
    )
    assert measured(f"{task}:T").processes == 2


def test_no_wait_for_another_process_is_endless(tmp_path, monkeypatch):
    task = tmp_path / "waits.py"
    task.write_text(
        "import os, time\nfrom timeprest.profiles.zoo.mlp import make_task\n"
        f"time.sleep(0 if os.getpid() == {os.getpid()} else 600)\nT = make_task('mlp', '')\n"
    )
    monkeypatch.setattr("timeprest.profiles.measuring.contention._PATIENCE_S", 0.5)
    with pytest.raises(TargetError, match="not ready in another process"):
        measured(f"{task}:T")
