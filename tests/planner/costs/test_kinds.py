"""Devices of several kinds, each with seconds of its own for every layer and direction."""

from __future__ import annotations

import msgspec
import pytest
import timeprest
from helpers.by_hand.profiles import chain
from timeprest.planner.cluster.catalogue import with_speeds
from timeprest.planner.cluster.cluster import Cluster, Device, read_cluster
from timeprest.planner.cluster.links import Network
from timeprest.planner.evaluate import evaluate
from timeprest.planner.plan import PlanStage
from timeprest.planner.question import Question
from timeprest.planner.search.answer.recheck import recheck
from timeprest.profiles.errors import FileError, PlanError, UserError
from timeprest.profiles.profile import KindTimes, Profile, check_profile

FAST = Network(bandwidth_bytes_per_s=1e15, latency_s=0.0)


def of_kinds(count=4):
    """ "one" takes 1 s a sample for forwards and 2 s for backwards; "two" half of that forward and
    three times that backward, and on the last layer the other way round."""
    profile = msgspec.structs.replace(chain(count), loss=(), operation=None, together=None)

    def times(field, first, last):
        return tuple(
            tuple(m.micro_batch * (last if k == count - 1 else first) for m in la.measurements)
            for k, la in enumerate(profile.layers)
        )

    own = tuple(
        msgspec.structs.replace(
            layer,
            measurements=tuple(
                msgspec.structs.replace(
                    m, forward_s=float(m.micro_batch), backward_s=2.0 * m.micro_batch
                )
                for m in layer.measurements
            ),
        )
        for layer in profile.layers
    )
    kinds = (
        KindTimes(
            name="one",
            forward_s=times("forward_s", 1.0, 1.0),
            backward_s=times("backward_s", 2.0, 2.0),
            update_fixed_s=1.0,
            update_s_per_byte=0.0,
        ),
        KindTimes(
            name="two",
            forward_s=times("forward_s", 0.5, 3.0),
            backward_s=times("backward_s", 6.0, 1.0),
            update_fixed_s=0.5,
            update_s_per_byte=0.0,
        ),
    )
    return check_profile(msgspec.structs.replace(profile, layers=own, kinds=kinds))


def devices(*kinds, **more):
    found = (Device(name=f"d{k}", kind=kind, **more) for k, kind in enumerate(kinds))
    return Cluster(devices=tuple(found), network=FAST)


def evaluated(profile, cluster, *stages, n=2):
    names = [layer.name for layer in profile.layers]
    laid, first = [], 0
    for count, mine in stages:
        laid.append(PlanStage(nodes=tuple(names[first : first + count]), devices=mine, in_flight=1))
        first += count
    question = Question(profile, cluster, "pipedream-flush", n, 0.0)
    return evaluate(question, laid, n)


def test_a_stage_takes_what_its_kind_does():
    profile = of_kinds()
    found = evaluated(profile, devices("two", "one"), (3, (0,)), (1, (1,)))
    first, last = found.prediction.stages
    assert (first.forward_s, first.backward_s, first.update_s) == (1.5, 18, 0.5)
    assert (last.forward_s, last.backward_s, last.update_s) == (1, 2, 1)
    found = evaluated(profile, devices("two", "one"), (3, (1,)), (1, (0,)))
    assert [stage.forward_s for stage in found.prediction.stages] == [3, 3]


def test_replicas_are_as_slow_as_the_slowest_in_each_direction():
    found = evaluated(of_kinds(), devices("two", "one"), (4, (0, 1)))
    (stage,) = found.prediction.stages
    assert (stage.forward_s, stage.backward_s, stage.update_s) == (4.5, 19, 1)


def test_a_speed_counts_besides():
    found = evaluated(of_kinds(), devices("two", speed=2.0), (4, (0,)))
    assert found.prediction.stages[0].forward_s == 4.5 / 2
    cluster = with_speeds(devices("two", speed=2.0), of_kinds())
    assert with_speeds(cluster, of_kinds()) == cluster
    # 12 s for a sample of all layers, of which "two" takes 23.5.
    assert cluster.devices[0].speed == pytest.approx(2 * 12 / 23.5, rel=1e-3)
    found = evaluated(of_kinds(), cluster, (4, (0,)))
    assert found.prediction.stages[0].forward_s == pytest.approx(4.5 / 2)


def test_the_search_finds_which_kind_suits_which_layers(tmp_path):
    """Layers behind go to "two", which is fast there, though it is slow on the whole."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[[devices]]\nkind = "two"\n[[devices]]\nkind = "one"\n'
        '[network]\nbandwidth = "1TB/s"\nlatency = "0us"\n'
    )
    profile = of_kinds()
    asked = {"variant": "pipedream-flush", "micro_batches": 4, "replicas": False, "stages": 2}
    plan = timeprest.plan(profile, str(cluster), **asked)
    assert [stage.devices for stage in plan.stages] == [(1,), (0,)]
    assert plan.solver.optimal
    again = recheck(plan, profile)
    assert (again.plan, again.changes) == (plan, ())
    assert Profile.load(saved(profile, tmp_path)) == profile


def saved(profile, folder):
    profile.save(folder / "p.json")
    return folder / "p.json"


def test_what_kinds_there_are_is_said():
    profile, cluster = of_kinds(), devices("one", "three")
    with pytest.raises(UserError, match=r"d1: kind: three: the profile has one, two"):
        timeprest.plan(profile, cluster)
    with pytest.raises(UserError, match=r"d1: kind: none: the profile has one, two"):
        timeprest.plan(profile, devices("one", None))
    with pytest.raises(UserError, match=r"d0: kind: one: the profile has no seconds of several"):
        timeprest.plan(chain(2), cluster)
    with pytest.raises(PlanError, match="'three': the profile has no seconds of such a device"):
        evaluated(profile, cluster, (4, (1,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": 2 * (of_kinds().kinds[0],)}, "names must be unique"),
        ({"loss": of_kinds().layers[0].measurements}, "are of one kind of device"),
        ({"layers": of_kinds().layers[:3], "edges": ()}, "one: give seconds of each layer"),
    ],
)
def test_a_profile_with_kinds_is_whole(change, message):
    with pytest.raises(FileError, match=message):
        check_profile(msgspec.structs.replace(of_kinds(), **change))


def test_a_cluster_file_names_kinds(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[[devices]]\nkind = "RTX-3090"\ncount = 2\n[[devices]]\nkind = ""\n')
    with pytest.raises(FileError, match="kind"):
        read_cluster(path)
    path.write_text('[[devices]]\nkind = "RTX-3090"\ncount = 2\n')
    assert [device.kind for device in read_cluster(path).devices] == ["RTX-3090"] * 2
