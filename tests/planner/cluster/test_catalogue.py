"""Clusters of devices by their data sheets."""

from __future__ import annotations

import msgspec
import pytest
from helpers.by_hand.profiles import chain
from timeprest.planner.cluster.catalogue import relative_speed
from timeprest.planner.search.request import PlanRequest
from timeprest.profiles.device_specs import load_spec
from timeprest.profiles.errors import UserError

ON_A100 = msgspec.structs.replace(chain(4), device="meta:a100-80gb", autocast="bfloat16")


def planning(devices, profile=ON_A100, **asked):
    return PlanRequest(profile, devices=devices, **asked).read()


def test_machines_of_one_kind():
    found = planning("a100-80gb:8x2", between_bandwidth="100Gbit/s")
    cluster = found.cluster
    assert [device.name for device in cluster.devices] == [f"a100-80gb-{k}" for k in range(16)]
    assert [device.machine for device in cluster.devices] == ["machine0"] * 8 + ["machine1"] * 8
    assert {(d.memory_bytes, d.speed, d.reserved_share) for d in cluster.devices} == {
        (80 * 10**9, 1.0, 0.08)
    }
    assert cluster.network.bandwidth_bytes_per_s == pytest.approx(0.77 * 300e9)
    assert cluster.network.latency_s == pytest.approx(10e-6)
    assert cluster.between_machines.bandwidth_bytes_per_s == pytest.approx(12.5e9)
    assert cluster.between_machines.latency_s == pytest.approx(20e-6)
    assert found.notes == (
        "a100-80gb by NVLink 3: 77% of 300GB/s, as measured; a latency of 10 µs is assumed; "
        "a latency of 20 µs between machines is assumed",
    )


def test_one_machine_has_no_links_between():
    cluster = planning("A100-80GB:8").cluster
    assert {device.machine for device in cluster.devices} == {None}
    assert cluster.between_machines is None
    assert len(planning("t4").cluster.devices) == 1


def test_what_is_asked_for_is_not_the_data_sheets():
    found = planning("t4:2", bandwidth="1GB/s", latency="1us", memory="8GiB", headroom="1GiB")
    assert {d.memory_bytes for d in found.cluster.devices} == {8 * 2**30}
    assert {d.says_reserved for d in found.cluster.devices} == {False}
    assert found.cluster.network.bandwidth_bytes_per_s == 1e9
    assert found.cluster.network.latency_s == pytest.approx(1e-6)
    assert not any("assumed" in note for note in found.notes)


def test_kinds_are_as_fast_as_their_sheets_say():
    mixed = planning("h100:4+a100-80gb:4", between_bandwidth="400Gbit/s", between_latency="5us")
    speeds = [device.speed for device in mixed.cluster.devices]
    assert speeds == [speeds[0]] * 4 + [1.0] * 4
    # Between what memory and what matrix units say.
    assert 3350 / 2039 < speeds[0] < 989.5 * 0.803 / (312 * 0.869)
    assert (
        "beside NVIDIA A100 SXM4 80 GB, which the profile is of, counts h100 2." in mixed.notes[0]
    )
    cluster = mixed.cluster
    assert cluster.link(0, 3).bandwidth_bytes_per_s == pytest.approx(0.84 * 450e9)
    assert cluster.link(4, 7).bandwidth_bytes_per_s == pytest.approx(231e9)
    assert cluster.link(3, 4).bandwidth_bytes_per_s == pytest.approx(50e9)
    assert cluster.link(3, 4).latency_s == pytest.approx(5e-6)


def test_speeds_are_relative_to_what_was_profiled():
    t4, v100 = load_spec("t4"), load_spec("v100-sxm2-16gb")
    measured = msgspec.structs.replace(chain(4), device="cuda", gpu="Tesla T4", dtype="float16")
    speed = planning("v100-sxm2-16gb:2", measured).cluster.devices[0].speed
    assert speed == pytest.approx(relative_speed(v100, t4, "float16"), rel=1e-3)
    assert speed == pytest.approx(2 / (65 / 125 + 320 / 900), rel=1e-3)
    wide = msgspec.structs.replace(measured, dtype="float32")
    speed = planning("v100-sxm2-16gb:2", wide).cluster.devices[0].speed
    assert speed == pytest.approx(2 / (8.1 / 15.7 + 320 / 900), rel=1e-3)
    assert planning("t4:2", measured).notes[0].startswith("t4 by PCIe")


@pytest.mark.parametrize(
    "profile",
    [
        msgspec.structs.replace(chain(4), device="cpu"),
        msgspec.structs.replace(chain(4), device="cuda", gpu="GeForce 256"),
        msgspec.structs.replace(chain(4), device="meta:my own"),
    ],
)
def test_an_unknown_device_counts_as_the_first_kind(profile):
    found = planning("a100-80gb:1+t4:1", profile, between_bandwidth="1GB/s")
    first, second = found.cluster.devices
    assert first.speed == 1.0 > second.speed
    assert found.notes[0].startswith("no data sheet is known of what the profile was made on (")
    assert "a100-80gb counts as that, t4 0." in found.notes[0]


def test_a_spec_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    spec = (
        'name = "mine"\nmemory_bytes = "10GB"\nmemory_bandwidth_bytes_per_s = "1TB/s"\n'
        'peak_flops_per_s = { float32 = 1e12 }\nlaunch_s = "5us"\nsource = "me"\n'
    )
    path.write_text(spec)
    profile = msgspec.structs.replace(chain(4), device="meta:mine")
    assert planning(str(path), profile).cluster.devices[0].memory_bytes == 10**10
    with pytest.raises(UserError, match="its file has no link; add one, or give --bandwidth"):
        planning(f"{path}:2", profile)
    assert planning(f"{path}:2", profile, bandwidth="1GB/s").cluster.devices[1].speed == 1.0
    path.write_text(
        spec + 'link = { name = "wire", bandwidth_bytes_per_s = "5GB/s", latency_s = "7us" }\n'
    )
    assert planning(f"{path}:2", profile).cluster.network.bandwidth_bytes_per_s == 5e9


def test_the_plan_says_what_was_assumed():
    plan = planning("t4:2", msgspec.structs.replace(chain(4), device="cpu")).best()
    assert plan.solver.chosen[-2:] == planning("t4:2", chain(4)).notes[-2:]
    assert len(plan.cluster.devices) == 2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"devices": "a101:8"}, "devices: no device 'a101': give one of a10, "),
        ({"devices": "a100:8"}, "devices: device 'a100': may be a100-40gb or a100-80gb$"),
        ({"devices": "8x2"}, "devices '8x2': give a number of devices, or kinds"),
        ({"devices": "a100-80gb:8x"}, "devices 'a100-80gb:8x': give a number of devices, or kinds"),
        ({"devices": "a100-80gb:0"}, "devices 'a100-80gb:0': give a number of devices"),
        ({"devices": "t4:8+"}, r"devices 't4:8\+': give a number of devices"),
        ({"devices": ""}, "devices '': give a number of devices"),
        ({"devices": "t4:65537"}, "65537 devices; 65536 at most"),
        ({"devices": "t4:8x2"}, "say how fast its machines are linked: between_bandwidth 100Gbit"),
        ({"devices": "t4:8", "per_machine": 4}, "per_machine: leave it out; devices t4:8 says it"),
        (
            {"devices": "t4:8", "between_bandwidth": "1GB/s"},
            "devices t4:8: is one machine, with no",
        ),
        ({"devices": "t4:2", "latency": "5"}, "latency: 5 is 5 seconds; write its unit, as in 5us"),
        ({"devices": "t4:8", "memory": "0"}, "memory: must be more than 0"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(asked, words):
    with pytest.raises(UserError, match=words) as caught:
        PlanRequest(ON_A100, **asked).read()
    assert "\n" not in str(caught.value)
