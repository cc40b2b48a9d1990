"""Clusters of several machines: the file, links and wires, all-reduces, JSON."""

from __future__ import annotations

import tempfile
import warnings
from itertools import permutations
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers.paths import ROOT
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import Cluster, Device, read_cluster, uniform_cluster
from timeprest.planner.cluster.links import AllReduce, Network
from timeprest.profiles.errors import TaskWarning, UserError

NETWORKS = st.builds(
    Network,
    bandwidth_bytes_per_s=st.integers(10**3, 10**12).map(float),
    latency_s=st.floats(0, 1e-2),
    half_duplex=st.booleans(),
    overlap=st.booleans(),
)


@st.composite
def clusters(draw, least=1):
    """Flat ones, and ones whose machines have one to four devices, in any order."""
    named = draw(st.booleans())
    homes = draw(st.lists(st.sampled_from("abcd" if named else [None]), min_size=least, max_size=9))
    devices = tuple(
        Device(
            name=f"d{k}",
            memory_bytes=draw(st.none() | st.integers(1, 2**40)),
            speed=draw(st.floats(0.1, 8)),
            machine=home,
        )
        for k, home in enumerate(homes)
    )
    between = draw(st.none() | NETWORKS) if named else None
    return Cluster(devices=devices, network=draw(NETWORKS), between_machines=between)


def toml(cluster):
    """The cluster as a file, an entry for each device."""
    lines = []
    for device in cluster.devices:
        lines += ["[[devices]]", f'name = "{device.name}"', f"speed = {device.speed!r}"]
        if device.memory_bytes is not None:
            lines.append(f'memory = "{device.memory_bytes}B"')
        if device.machine is not None:
            lines.append(f'machine = "{device.machine}"')
    for name in ("network", "between_machines"):
        link = getattr(cluster, name)
        if link is not None:
            lines += [
                f"[{name}]",
                f'bandwidth = "{link.bandwidth_bytes_per_s:.0f}B/s"',
                f'latency = "{link.latency_s:.30f}s"',
                f"half_duplex = {str(link.half_duplex).lower()}",
                f"overlap = {str(link.overlap).lower()}",
            ]
    return "\n".join(lines)


def read_text(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(text)
        return read_cluster(path)


def rounded(cluster):
    """Latencies to the digits of the file."""
    links = {
        name: msgspec.structs.replace(link, latency_s=float(f"{link.latency_s:.30f}"))
        for name in ("network", "between_machines")
        if (link := getattr(cluster, name)) is not None
    }
    return msgspec.structs.replace(cluster, **links)


@given(clusters())
def test_a_written_file_reads_back(cluster):
    assert read_text(toml(cluster)) == rounded(cluster)


@given(clusters())
def test_json_reads_back(cluster):
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


@given(clusters(least=2))
def test_links_and_wires_of_every_pair(cluster):
    """Against the definitions, written out."""
    wires = {}
    for a, b in permutations(range(len(cluster.devices)), 2):
        here, there = cluster.devices[a].machine, cluster.devices[b].machine
        inside = here == there or cluster.between_machines is None
        link = cluster.network if inside else cluster.between_machines
        assert cluster.link(a, b) == cluster.link(b, a) == link
        assert (cluster.wire(a, b) == cluster.wire(b, a)) == link.half_duplex
        ends = (a, b) if here == there else (here, there)
        wires.setdefault(cluster.wire(a, b), set()).add(
            frozenset(ends) if link.half_duplex else ends
        )
    # A wire is of one pair of ends, and every pair of ends has one wire.
    assert all(len(ends) == 1 for ends in wires.values())
    assert len({next(iter(ends)) for ends in wires.values()}) == len(wires)


@given(clusters(least=2), st.floats(0, 1e12), st.floats(0, 1e12), st.data())
def test_a_ring_is_bound_by_its_links(cluster, few, many, data):
    """It grows with the bytes, and no device sends or receives faster than a link it must use."""
    count = len(cluster.devices)
    devices = data.draw(st.permutations(range(count)))[: data.draw(st.integers(2, count))]
    few, many = sorted((few, many))
    share = 2 * (len(devices) - 1) / len(devices)
    assert cluster.all_reduce_s(devices, few) <= cluster.all_reduce_s(devices, many)
    for a in devices:
        # Whoever sits beside it in the ring, the fastest link out of it has to do.
        others = [cluster.link(a, b) for b in devices if b != a]
        fastest = max(link.bandwidth_bytes_per_s for link in others)
        least_s = 2 * (len(devices) - 1) * min(link.latency_s for link in others)
        bound_s = share * many / fastest + least_s
        assert cluster.all_reduce_s(devices, many) >= bound_s * (1 - 1e-9)
    if len({cluster.devices[k].machine for k in devices}) > 1:
        out = cluster.between_machines or cluster.network
        wire_s = share * many / out.bandwidth_bytes_per_s * (2 if out.half_duplex else 1)
        assert cluster.all_reduce_s(devices, many) >= wire_s * (1 - 1e-9)
    shuffled = data.draw(st.permutations(devices))
    assert cluster.all_reduce_s(shuffled, many) == cluster.all_reduce_s(devices, many)


def two_by_two(**network):
    """a0 b0 a1 b1: 1 GB/s and 1 ms inside, 100 MB/s and 10 ms between."""
    fast, slow = (
        Network(bandwidth_bytes_per_s=b, latency_s=s, **network)
        for b, s in ((1e9, 1e-3), (1e8, 1e-2))
    )
    devices = tuple(Device(name=m + str(k), machine=m) for k in range(2) for m in "ab")
    return Cluster(devices=devices, network=fast, between_machines=slow)


def test_rings_by_hand():
    cluster, turns = two_by_two(), two_by_two(half_duplex=True)
    assert cluster.all_reduce_s([], 1e9) == cluster.all_reduce_s([3], 1e9) == 0
    assert cluster.all_reduce_s([0, 2], 1e9) == pytest.approx(1 + 2e-3)
    assert cluster.all_reduce_s([0, 1], 1e9) == pytest.approx(10 + 2e-2)
    assert cluster.all_reduce_s([0, 1, 2, 3], 1e9) == pytest.approx(15 + 6e-2)
    assert turns.all_reduce_s([0, 2], 1e9) == pytest.approx(2 + 2e-3)
    assert turns.all_reduce_s([0, 1, 2, 3], 1e9) == pytest.approx(30 + 6e-2)
    # The slow link is inside the machines now, where a ring of one device of each never goes.
    swapped = msgspec.structs.replace(
        cluster, network=cluster.between_machines, between_machines=cluster.network
    )
    assert swapped.all_reduce_s([0, 1], 1e9) == pytest.approx(1 + 2e-3)
    assert swapped.all_reduce_s([0, 1, 2], 1e9) == pytest.approx(40 / 3 + 4e-2)


def test_a_measured_all_reduce_goes_before_the_ring():
    measured = AllReduce(processes=3, latency_s=0.5, bandwidth_bytes_per_s=1e6)
    cluster = msgspec.structs.replace(two_by_two(), all_reduce=measured)
    assert cluster.all_reduce_s([0, 1, 2], 2e6) == 2.5
    for devices in ([0], [0, 1], [0, 1, 2, 3]):
        assert cluster.all_reduce_s(devices, 2e6) == two_by_two().all_reduce_s(devices, 2e6)


def test_the_example_of_the_docs():
    text = (ROOT / "docs" / "cluster.md").read_text()
    cluster = read_text(text.split("## Machines")[1].split("```toml\n")[1].split("```")[0])
    assert [device.machine for device in cluster.devices] == ["node0"] * 8 + ["node1"] * 8
    assert cluster.devices[15].name == "gpu15"
    assert cluster.uniform
    assert not cluster.flat
    assert cluster.link(7, 8).bandwidth_bytes_per_s == 12.5e9
    assert cluster.link(8, 15).bandwidth_bytes_per_s == 300e9
    assert cluster.wire(0, 8) == cluster.wire(7, 15) != cluster.wire(8, 0)


def test_machines_are_numbered_over_the_whole_file():
    cluster = read_text("[[devices]]\ncount = 3\nper_machine = 2\n" * 2)
    homes = [device.machine for device in cluster.devices]
    assert homes == [f"machine{k}" for k in (0, 0, 1, 2, 2, 3)]


def test_entries_share_a_machine_by_its_name():
    cluster = read_text('[[devices]]\nmachine = "x"\nspeed = 2.0\n[[devices]]\nmachine = "x"\n')
    assert cluster.flat
    assert not cluster.uniform
    assert cluster.wire(0, 1) != cluster.wire(1, 0)


def test_512_machines_of_8():
    cluster = read_text(
        "[[devices]]\ncount = 4096\nper_machine = 8\n"
        "[between_machines]\nbandwidth = '25GB/s'\nlatency = '10us'\n"
    )
    assert len(cluster.devices) == 4096
    assert len({device.machine for device in cluster.devices}) == 512
    assert cluster.uniform
    assert cluster.all_reduce_s(range(4096), 0) == pytest.approx(2 * 4095 * 50e-6)
    assert cluster.all_reduce_s(range(4088, 4096), 4e9) == pytest.approx(1.75 + 14 * 50e-6)
    assert cluster == uniform_cluster(
        4096, per_machine=8, between_bandwidth="25GB/s", between_latency="10us"
    )


def test_uniform_clusters_of_machines():
    cluster = uniform_cluster(
        5, None, "1GB/s", "2us", per_machine=2, between_latency="7us", half_duplex=True
    )
    assert [device.machine for device in cluster.devices] == [
        f"machine{k}" for k in (0, 0, 1, 1, 2)
    ]
    near, far = cluster.network, cluster.between_machines
    assert far == msgspec.structs.replace(near, latency_s=pytest.approx(7e-6))
    assert near.half_duplex
    assert uniform_cluster(4, per_machine=2).between_machines is None
    assert not uniform_cluster(2, overlap=False).network.overlap
    with pytest.raises(UserError, match="per_machine: say"):
        uniform_cluster(4, between_bandwidth="1GB/s")
    with pytest.raises(UserError, match="per_machine: give"):
        uniform_cluster(4, per_machine=0)
    with pytest.raises(UserError, match="between_latency: can't read"):
        uniform_cluster(4, per_machine=2, between_latency="soon")


@pytest.mark.parametrize("latency", ["50us", "50\u00b5s", "50 \u03bcs", "0.05ms", 5e-5])
def test_microseconds_by_every_sign(latency):
    assert uniform_cluster(2, latency=latency).network.latency_s == pytest.approx(5e-5)


@pytest.mark.parametrize(
    ("amounts", "why"),
    [
        ({"memory": 10**400}, "memory: '1000+' is too large"),
        ({"memory": -1}, "memory: can't read '-1'"),
        ({"bandwidth": 0.5}, "bandwidth: must be at least a byte per second"),
        ({"latency": []}, r"latency: can't read \[\]; write it like 10us"),
    ],
)
def test_numbers_that_are_no_amounts_are_named(amounts, why):
    with pytest.raises(UserError, match=why):
        uniform_cluster(2, **amounts)


@pytest.mark.parametrize("name", ["half_duplex", "overlap"])
def test_yes_and_no_are_true_or_false(name):
    """What else stands in a file isn't read back."""
    for value in ("no", None, 2, 1.0, []):
        with pytest.raises(UserError, match=f"^{name}: give True or False, not "):
            uniform_cluster(2, **{name: value})
    for value in (True, False):
        cluster = uniform_cluster(2, **{name: np.bool_(value)})
        assert cluster == uniform_cluster(2, **{name: value})
        assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


def test_plans_of_flat_clusters_have_the_fields_they_had():
    fields = msgspec.json.decode(msgspec.json.encode(uniform_cluster(1, latency="0s")))
    assert fields == {
        "devices": [{"name": "device0", "memory_bytes": None, "speed": 1.0}],
        "network": {"bandwidth_bytes_per_s": 4e9, "latency_s": 0.0},
        "all_reduce": None,
    }
    assert msgspec.convert(fields, Cluster) == uniform_cluster(1, latency="0s")


LINK = "bandwidth = '1GB/s'\nlatency = '1us'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("machine = 3", r"devices\[0\]\.machine: expected text in quotes, got"),
        ("machine = ''", r"devices\[0\]\.machine: expected text in quotes of length >= 1"),
        ("per_machine = 0", r"devices\[0\]\.per_machine: expected a whole number >= 1"),
        ("per_machine = true", r"\.per_machine: expected a whole number, got true or false"),
        ("name = 'a'\n[[devices]]\nname = 'a'", r"devices\[1\].name: another device is 'a' too"),
        ("count = 2\n[[devices]]\nname = 'device1'", r"\[1\].name: another device is 'device1'"),
        ("[[devices]]\nmachine = 'a'", r"devices\[1\]\.machine: name the machine of all"),
        ("machine = 'a'\n[[devices]]", r"devices\[1\]\.machine: name the machine of all"),
        ("machine = 'a1'\n[[devices]]\nmachine = 'a'\nper_machine = 1", r"\[1\]\.machine: 'a1' is"),
        (f"[between_machines]\n{LINK}", r"between_machines: give each of \[\[devices\]\]"),
        (
            "machine = 'a'\n[between_machines]\nlatency = '1us'",
            r"between_machines\.bandwidth: is missing",
        ),
        (
            f"machine = 'a'\n[between_machines]\nwire = 1\n{LINK}",
            r"between_machines: unknown field 'wire'",
        ),
        (
            "machine = 'a'\n[between_machines]\nlatency = 'x'\nbandwidth = '1B/s'",
            r"between_machines\.latency: can't",
        ),
        (
            "[network]\nhalf_duplex = 1",
            r"half_duplex: expected true or false, got a whole number",
        ),
        (
            "[network]\noverlap = 'no'",
            r"network\.overlap: expected true or false, got text",
        ),
        ("[between]\n", r"unknown field 'between'; known: devices, network, between_machines"),
    ],
)
def test_what_is_wrong_with_machines_is_named(text, message, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(f"[[devices]]\n{text}\n")
    with pytest.raises(UserError, match=message) as caught:
        read_cluster(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_says_no_bandwidth_is_warned_of(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text("[[devices]]\ncount = 2\n[network]\nlatency = '1us'\n")
    with pytest.warns(TaskWarning, match=r"cluster.toml: network: says no bandwidth, .* 4GB/s"):
        assert read_cluster(path).network.bandwidth_bytes_per_s == 4e9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path.write_text("[[devices]]\ncount = 1\n")
        read_cluster(path)


def test_a_file_that_shares_cores_says_what_to_do_instead():
    with pytest.raises(UserError, match=r"unknown field 'cores'; .+ --stages-per-device$"):
        read_text("cores = 2\n[[devices]]\ncount = 3\n")
