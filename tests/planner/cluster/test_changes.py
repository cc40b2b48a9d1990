"""Changes of a cluster, as people ask what they would bring."""

from __future__ import annotations

import msgspec
import pytest
from timeprest.planner.cluster.changes import changed, parse_change
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.cluster.links import AllReduce
from timeprest.profiles.errors import UserError

FLAT = uniform_cluster(2, "8GiB", "1GB/s", "10us")
HOSTS = uniform_cluster(3, None, "4GB/s", "5us", per_machine=2, between_bandwidth="1GB/s")


def after(cluster, text):
    return changed(cluster, parse_change(text))


def test_amounts_and_factors():
    found = after(FLAT, "bandwidth=2x, latency=3us,memory=24GiB,speed=1.5x")
    assert found.network.bandwidth_bytes_per_s == 2e9
    assert found.network.latency_s == pytest.approx(3e-6)
    assert {(d.memory_bytes, d.speed) for d in found.devices} == {(24 * 2**30, 1.5)}
    assert after(FLAT, "memory=0.5x").devices[1].memory_bytes == 4 * 2**30
    assert after(FLAT, "bandwidth=800Mbit/s").network.bandwidth_bytes_per_s == 1e8
    assert after(FLAT, "devices=2") == FLAT


def test_links_in_a_machine_and_between():
    found = after(HOSTS, "between-bandwidth=10x")
    assert found.network == HOSTS.network
    assert found.between_machines.bandwidth_bytes_per_s == 1e10
    assert after(HOSTS, "bandwidth=10x").between_machines == HOSTS.between_machines
    alike = uniform_cluster(3, per_machine=2, bandwidth="4GB/s")
    found = after(alike, "between-bandwidth=1GB/s")
    assert found.network == alike.network
    assert found.between_machines.bandwidth_bytes_per_s == 1e9


def test_what_was_measured_of_an_all_reduce_changes_with_the_links():
    measured = AllReduce(processes=2, latency_s=1e-4, bandwidth_bytes_per_s=5e8)
    cluster = msgspec.structs.replace(FLAT, all_reduce=measured)
    found = after(cluster, "bandwidth=3x,latency=0.5x").all_reduce
    assert found.bandwidth_bytes_per_s == pytest.approx(1.5e9)
    assert found.latency_s == pytest.approx(5e-5)


def test_an_all_reduce_over_several_machines_changes_with_the_links_between_them():
    measured = AllReduce(processes=4, latency_s=1e-4, bandwidth_bytes_per_s=5e8)
    far = msgspec.structs.replace(HOSTS.network, bandwidth_bytes_per_s=1e8)
    cluster = msgspec.structs.replace(HOSTS, all_reduce=measured, between_machines=far)
    assert after(cluster, "bandwidth=3x,latency=2x").all_reduce == measured
    found = after(cluster, "between-bandwidth=3x").all_reduce
    assert found.bandwidth_bytes_per_s == pytest.approx(1.5e9)


def test_more_devices_are_as_the_last_in_machines_as_full_as_the_first():
    assert [d.name for d in after(FLAT, "devices=4").devices] == [f"device{k}" for k in range(4)]
    assert [d.machine for d in after(HOSTS, "devices=6").devices] == [
        f"machine{k // 2}" for k in range(6)
    ]
    assert after(HOSTS, "devices=5").devices[:3] == HOSTS.devices
    assert after(HOSTS, "devices=1").devices == HOSTS.devices[:1]


@pytest.mark.parametrize(
    ("cluster", "text", "why"),
    [
        (FLAT, "bandwith=2x", "'bandwith' can't be changed; give bandwidth, latency"),
        (FLAT, "bandwidth", "write it like bandwidth=2x,memory=24GiB"),
        (FLAT, "memory=", "write it like"),
        (FLAT, "latency=1us,latency=2us", "latency is given twice"),
        (FLAT, "devices=0", "devices: give a whole number from 1"),
        (FLAT, "devices=2x", "devices: give a whole number from 1"),
        (FLAT, "speed=3", "how many times as fast"),
        (FLAT, "speed=0x", "isn't between"),
        (FLAT, "bandwidth=fast", "bandwidth: can't read 'fast'"),
        (HOSTS, "between-bandwidth=fast", "between-bandwidth: can't read 'fast'"),
        (HOSTS, "between-latency=9999999x", "between-latency: '9999999x' isn't between"),
        (FLAT, "memory=1000000x", r"devices\[0\].memory_bytes: expected a whole number <= 1125"),
        (FLAT, "memory=0", "memory: must be more than 0"),
        (HOSTS, "memory=2x", "device0 has no limit of memory"),
        (FLAT, "between-latency=2x", "there is one machine"),
        (HOSTS, "devices=2,between-latency=2x", "there is one machine"),
    ],
)
def test_what_cant_be_changed_is_said(cluster, text, why):
    with pytest.raises(UserError, match=f"what_if.*{why}"):
        after(cluster, text)
