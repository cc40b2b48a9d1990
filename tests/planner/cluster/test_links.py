"""Links by pair and group, and times by size of messages: files, rules, sums, changes."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import msgspec
import pytest
from helpers.drawn.questions import drawn_cluster, with_links
from timeprest.planner.cluster.changes import changed, parse_change
from timeprest.planner.cluster.cluster import Cluster, read_cluster
from timeprest.planner.cluster.cluster_toml import cluster_toml
from timeprest.planner.cluster.contention import AllReduceTimes
from timeprest.planner.cluster.links import AllReduce, Network, costs_by_size
from timeprest.profiles.errors import UserError
from timeprest.profiles.files import converted

ISLANDS = """
[[devices]]
name = "gpu"
count = 4
machine = "east"
per_machine = 2
group = "east"

[[devices]]
name = "far"
count = 4
machine = "west"
per_machine = 2
group = "west"

[network]
bandwidth = "100GB/s"
latency = "1us"

[between_machines]
bandwidth = "10GB/s"
latency = "2us"

[[links]]
between = ["east", "west"]
bandwidth = "1GB/s"
latency = "3us"
half_duplex = true

[[links]]
between = ["east0", "west3"]
bandwidth = "5MB/s"
latency = "4us"
overlap = false

[[links]]
between = ["gpu0", "far7"]
bandwidth = "7GB/s"
latency = "5us"

[[links]]
between = ["gpu2", "*"]
bandwidth = "9GB/s"
latency = "6us"
"""


def read(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster(path)


def test_the_most_exact_link_counts(tmp_path):
    found = read(tmp_path, ISLANDS)
    assert [d.machine for d in found.devices[::2]] == ["east0", "east1", "west2", "west3"]

    def rate(a, b):
        assert found.link(a, b) == found.link(b, a)
        return found.link(a, b).bandwidth_bytes_per_s

    assert rate(0, 1) == 100e9
    # In an island, between islands, a pair of machines, one of devices.
    assert rate(0, 3) == 10e9
    assert rate(1, 4) == 1e9
    assert rate(1, 7) == 5e6
    assert rate(0, 6) == 5e6
    assert rate(0, 7) == 7e9
    # One device to all other machines, not in its own.
    assert rate(2, 0) == rate(2, 5) == 9e9
    assert rate(2, 3) == 100e9
    assert {link.latency_s for link in found.networks} >= {k * 1e-6 for k in range(1, 7)}
    assert found.fastest_bytes_per_s == 100e9
    assert not found.flat


def test_wires_of_links(tmp_path):
    found = read(tmp_path, ISLANDS)
    # All devices of two machines share a wire, half duplex in both directions.
    assert found.wire(1, 4) == found.wire(5, 0) == found.wire(4, 1)
    assert found.wire(0, 6) == found.wire(1, 7) != found.wire(7, 1)
    # A link between two devices has its own.
    assert found.wire(0, 7) != found.wire(0, 6)
    assert found.wire(0, 7) == (0, 7)
    assert found.wire(0, 1) == (0, 1)


def test_a_sum_goes_over_the_slowest_link_of_its_ring(tmp_path):
    found = read(tmp_path, ISLANDS)
    assert found.all_reduce_s([1, 7], 100.0) == pytest.approx(2 * (4e-6 + 50 / 5e6))
    assert found.all_reduce_s([0, 1, 3], 3e6) == pytest.approx(4 * (2e-6 + 1e6 / 10e9))
    assert found.all_reduce_s([1, 4, 5], 3e6) == pytest.approx(4 * (3e-6 + 2 * 1e6 / 1e9))


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_below_the_least(seed):
    """Links, rates and sums, of all devices; and files and JSON read back."""
    rng = random.Random(seed)
    found = with_links(rng, drawn_cluster(rng))
    count = len(found.devices)
    fastest, earliest = found.fastest_bytes_per_s, min(k.latency_s for k in found.networks)
    sizes = [1.0, 70.0, 2e3, 4e4, 123456.0, 7e6, 1e9]
    for a, b in permutations(range(count), 2):
        link = found.link(a, b)
        assert link in found.networks
        assert link.latency_s >= earliest
        walls = [link.wire_s(n) for n in sizes]
        assert walls == sorted(walls)
        assert all(n / wall <= fastest * (1 + 1e-12) for n, wall in zip(sizes, walls, strict=True))
    times = AllReduceTimes(found)
    for size in range(2, count + 1):
        least_s, least_per_byte = times.least(size)
        for some in combinations(range(count), size):
            rows = [times.of(range(some[0], some[-1] + 1))] * (some[-1] - some[0] == size - 1)
            for fixed_s, per_byte in [(least_s, least_per_byte), *rows]:
                for n in (0.0, *sizes):
                    exact_s = found.all_reduce_s(some, n)
                    assert fixed_s + n * per_byte <= exact_s * (1 + 1e-9) + 1e-15
    assert converted(msgspec.to_builtins(found), Cluster, "") == found
    assert msgspec.json.decode(msgspec.json.encode(found), type=Cluster) == found


@pytest.mark.parametrize("seed", range(10))
def test_files_say_what_they_were_made_of(seed, tmp_path):
    rng = random.Random(seed)
    found = with_links(rng, drawn_cluster(rng))
    again = read(tmp_path, cluster_toml(found, ["a note"]))
    assert again.devices == found.devices
    assert [each.between for each in again.links] == [each.between for each in found.links]
    for a, b in combinations(range(len(found.devices)), 2):
        assert again.wire(a, b) == found.wire(a, b)
        for n in (1e3, 1e5, 1e8):
            before, after = found.link(a, b), again.link(a, b)
            assert after.latency_s + after.wire_s(n) == pytest.approx(
                before.latency_s + before.wire_s(n), rel=0.02
            )
    assert len(again.sums) == len(found.sums)


def test_times_between_sizes_lie_on_lines():
    link = Network(**costs_by_size([(1e3, 3e-6), (1e6, 103e-6), (2e6, 303e-6)], 1e-6))
    assert link.wire_s(500) == pytest.approx(1e-6)
    assert link.wire_s(1e3) == pytest.approx(2e-6)
    assert link.wire_s(500_500) == pytest.approx(52e-6)
    assert link.wire_s(1.5e6) == pytest.approx(202e-6)
    assert link.wire_s(4e6) == pytest.approx(604e-6)
    assert link.top_bytes_per_s == pytest.approx(1e6 / 102e-6)
    assert link.bandwidth_bytes_per_s == pytest.approx(2e6 / 302e-6)
    # The latency where it isn't said.
    assert Network(**costs_by_size([(1e3, 3e-6), (2e3, 5e-6)], None)).latency_s == pytest.approx(
        1e-6
    )
    assert Network(**costs_by_size([(1e3, 3e-6), (2e3, 3e-6)], None)).latency_s == pytest.approx(
        2.7e-6
    )
    assert Network(**costs_by_size([(1e3, 3e-6)], None)).latency_s == 0.0


def test_a_file_with_times_and_several_sums(tmp_path):
    found = read(
        tmp_path,
        '[[devices]]\ncount = 8\n[network]\ntimes = [["1MB", "1ms"], ["10MB", "2GB/s"]]\n'
        '[[all_reduce]]\nprocesses = 2\nlatency = "1us"\nbandwidth = "1GB/s"\n'
        '[[all_reduce]]\nprocesses = 4\nlatency = 0\ntimes = [[1000, "1ms"]]\n',
    )
    assert found.network.times == ((1e6, 1e-3), (1e7, 5e-3))
    assert found.network.latency_s == pytest.approx(1e-3 - 4e-3 / 9)
    assert found.all_reduce_s([0, 1], 1e6) == pytest.approx(1e-6 + 1e-3)
    assert found.all_reduce_s([0, 1, 2, 3], 500) == pytest.approx(0.5e-3)
    # Of three, a ring's.
    link = found.network
    third = link.latency_s + link.wire_s(1e6)
    assert found.all_reduce_s([0, 1, 2], 3e6) == pytest.approx(4 * third)


DEVICES = "[[devices]]\ncount = 2\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[links]]\nbetween = ["device0", "b"]\nbandwidth = 1e9\nlatency = 0\n', "called 'b'"),
        ('[[links]]\nbetween = ["device0"]\n', r"links\[0\]\.between"),
        ('[[links]]\nbetween = ["device0", "*"]\nlatency = 0\n', r"links\[0\]\.bandwidth: is miss"),
        ('[network]\ntimes = [[8, "1s"], [4, "2s"]]\n', "network.times: give rising sizes"),
        ('[network]\ntimes = [[4, "2s"], [8, "1s"]]\n', "8 bytes take less than 4"),
        ('[network]\ntimes = [[0, "2s"]]\n', "give sizes of a byte or more"),
        ('[network]\ntimes = [[4, "2 miles"]]\n', r"network\.times\[0\]: unknown unit"),
        ('[network]\nlatency = "2s"\ntimes = [[4, "2s"]]\n', "no longer than the latency"),
        ('[network]\nbandwidth = 1e9\ntimes = [[4, "2s"]]\n', "bandwidth: leave it out"),
        ("[[all_reduce]]\nprocesses = 2\n", r"all_reduce\[0\]\.latency: is missing"),
        (
            '[[all_reduce]]\nprocesses = 2\ntimes = [[4, "1s"]]\n' * 2,
            "all_reduce: 2 processes are there twice",
        ),
    ],
)
def test_what_cannot_be_names_its_field(text, words, tmp_path):
    with pytest.raises(UserError, match=words) as caught:
        read(tmp_path, DEVICES + text)
    assert "\n" not in str(caught.value)


def test_a_name_that_may_mean_two_things(tmp_path):
    text = '[[devices]]\nname = "a"\nmachine = "a"\n[[links]]\nbetween = ["a", "*"]\n'
    with pytest.raises(UserError, match="'a' is a device and a machine; rename one"):
        read(tmp_path, f'{text}bandwidth = "1GB/s"\nlatency = 0\n')


def test_an_edited_plans_table_is_checked():
    link = Network(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    for times in (((8, 1.0), (4, 2.0)), ((4, 2.0), (8, 1.0)), ((4, 0.0),)):
        bad = {**msgspec.to_builtins(link), "times": times}
        with pytest.raises(UserError, match="times: "):
            converted(bad, Network, "plan.json")


def test_what_if_links_were_faster(tmp_path):
    found = read(tmp_path, ISLANDS)
    after = changed(found, parse_change("bandwidth=2x,between-latency=2x"))
    assert after.network.bandwidth_bytes_per_s == 200e9
    assert after.link(0, 3).bandwidth_bytes_per_s == 10e9
    assert after.link(1, 4).latency_s == pytest.approx(6e-6)
    assert after.link(1, 7).latency_s == pytest.approx(8e-6)
    table = Network(**costs_by_size([(1e3, 3e-6), (1e6, 103e-6)], 1e-6))
    sums = tuple(
        AllReduce(processes=n, **costs_by_size([(1e3, 2e-6), (1e6, n * 1e-3)], 1e-6))
        for n in (2, 4)
    )
    flat = msgspec.structs.replace(
        found, network=table, between_machines=None, links=(), all_reduce=sums
    )
    after = changed(flat, parse_change("bandwidth=4x,latency=3x"))
    for n in (10.0, 1e3, 4e5, 1e8):
        assert after.network.wire_s(n) == pytest.approx(table.wire_s(n) / 4)
        for was, now in zip(sums, after.sums, strict=True):
            assert now.seconds(n) - now.latency_s == pytest.approx(
                (was.seconds(n) - was.latency_s) / 4
            )
    assert after.network.latency_s == pytest.approx(3e-6)
