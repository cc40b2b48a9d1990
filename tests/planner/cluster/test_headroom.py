"""What plans leave free of a device's memory: said, planned with, kept to by a check."""

from __future__ import annotations

import msgspec
import pytest
from helpers.by_hand.profiles import chain
from timeprest.planner.cluster.cluster import Cluster, Device, uniform_cluster
from timeprest.planner.cluster.headroom import Headroom, parse_headroom, usual_headroom
from timeprest.planner.plan import Plan
from timeprest.planner.search.answer.recheck import recheck
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import FileError, InfeasibleError, UserError

GIB = 2**30


def test_a_share_or_bytes():
    assert {parse_headroom(each) for each in ("8%", "0.08", 0.08)} == {Headroom(share=0.08)}
    assert parse_headroom("4GiB") == Headroom(nbytes=4 * GIB)
    assert parse_headroom("0") == Headroom()
    for text in ("100%", "-1%", "much%", "nan%"):
        with pytest.raises(UserError, match=r"--headroom .*: give a share below 100%"):
            parse_headroom(text)


def test_what_is_usual_of_a_device():
    profile = chain(2)
    gpu = msgspec.structs.replace(profile, device="meta:a100-80gb")
    assert usual_headroom(msgspec.structs.replace(profile, device="cpu")) == Headroom()
    assert usual_headroom(gpu) == Headroom(share=0.08)
    assert usual_headroom(msgspec.structs.replace(gpu, device="cuda")) == Headroom(share=0.08)
    # It is counted with what stages need.
    measured = msgspec.structs.replace(gpu, device="cuda", reserved_bytes=GIB)
    assert usual_headroom(measured) == Headroom()
    assert usual_headroom(msgspec.structs.replace(gpu, front_end="table")) == Headroom()


def test_what_stages_may_take():
    whole, none = Device(name="a", memory_bytes=100), Device(name="b")
    assert (whole.usable_bytes, whole.free_bytes, none.usable_bytes) == (100, 0, None)
    share = msgspec.structs.replace(whole, reserved_share=0.081)
    assert (share.usable_bytes, share.free_bytes) == (91, 9)
    assert msgspec.structs.replace(whole, reserved_bytes=30).usable_bytes == 70
    for device in (whole, share, msgspec.structs.replace(whole, reserved_bytes=30)):
        grown = msgspec.structs.replace(device, memory_bytes=device.memory_for(1000))
        assert grown.usable_bytes == 1000


def test_devices_may_say_it_themselves(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[[devices]]\nmemory = "10GiB"\nreserved = "10%"\n'
        '[[devices]]\nmemory = "10GiB"\nreserved = "2GiB"\n[[devices]]\nmemory = "10GiB"\n'
    )
    found = Cluster.load(path).with_headroom(Headroom(nbytes=GIB))
    assert [device.usable_bytes for device in found.devices] == [9 * GIB, 8 * GIB, 9 * GIB]
    assert not found.uniform
    assert found.tightest([0, 1, 2]).name == "device1"
    path.write_text('[[devices]]\nmemory = "1GiB"\nreserved = "2GiB"\n')
    with pytest.raises(FileError, match=r"devices\[0\].reserved: '2GiB' is all of its memory"):
        Cluster.load(path)
    with pytest.raises(UserError, match=r"--headroom 3.0 GiB: device0 has 2.0 GiB in all"):
        uniform_cluster(1, "2GiB").with_headroom(Headroom(nbytes=3 * GIB))


def test_plans_keep_to_it_and_so_do_their_checks(tmp_path):
    profile = chain(4)
    free = solve(profile, uniform_cluster(2), stages=2)
    most = max(stage.memory_bytes for stage in free.predicted.stages)
    cluster, tenth = uniform_cluster(2, f"{most * 21 // 20}B"), Headroom(share=0.1)
    assert solve(profile, cluster, stages=2).stages == free.stages
    plan = solve(profile, cluster, stages=2, headroom=tenth)
    held = max(stage.memory_bytes for stage in plan.predicted.stages)
    assert held <= 0.9 * (most * 21 // 20) < most
    assert {device.reserved_share for device in plan.cluster.devices} == {0.1}
    path = tmp_path / "plan.json"
    plan.save(path)
    assert recheck(Plan.load(path), profile).over is None
    # The stages of the other plan are over what this one's devices have for them.
    edited = msgspec.structs.replace(plan, stages=free.stages, micro_batches=free.micro_batches)
    assert "kept free" in recheck(edited, profile).over
    with pytest.raises(InfeasibleError, match="that --headroom leaves of") as caught:
        solve(profile, uniform_cluster(2, f"{most // 2}B"), stages=2, headroom=Headroom(share=0.9))
    enough = str(caught.value).partition("would do: ")[2].split()[0]
    solve(profile, uniform_cluster(2, f"{enough}B"), stages=2, headroom=Headroom(share=0.9))


def test_on_a_gpu_some_is_left_unless_another_share_is_asked_for():
    profile = msgspec.structs.replace(chain(4), device="meta:a100-80gb")
    plan = solve(profile, uniform_cluster(2, "1GiB"), stages=2)
    assert {device.reserved_share for device in plan.cluster.devices} == {0.08}
    plan = solve(profile, uniform_cluster(2, "1GiB"), stages=2, headroom=Headroom())
    assert {device.free_bytes for device in plan.cluster.devices} == {0}
