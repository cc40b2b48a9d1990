"""Sailor's bandwidths as a cluster file."""

from __future__ import annotations

import json

import pytest
import timeprest
from click.testing import CliRunner
from timeprest.cli.profile import main
from timeprest.planner.cluster.cluster import read_cluster
from timeprest.planner.cluster.sailor_links import cluster_of_bandwidths
from timeprest.profiles.errors import UserError

SAME, FAR = [[0.0, 1.0, 4.0], 6e9], [[0.5], 1e9]


@pytest.fixture
def table(tmp_path):
    """Two zones, one with two kinds of GPUs."""
    ends = {"a": {"X": {"1": SAME}, "Y": {"1": FAR}}, "b": {"X": {"1": FAR}}}
    zones = {"a": {"X": {"1": ends}, "Y": {"1": {"a": {"X": {"1": FAR}}}}}, "b": {"X": {}}}
    path = tmp_path / "multizone.json"
    path.write_text(json.dumps(zones))
    inside = {"X": {"2": [[20.0], 2e10], "4": [[10.0], 1e10]}}
    (tmp_path / "intra_node_bandwidths.json").write_text(json.dumps(inside))
    return path


def took_s(link, nbytes):
    return link.latency_s + link.wire_s(nbytes)


def test_machines_and_their_links(table):
    found = cluster_of_bandwidths(str(table), "X:2x2@a+X:1@b")
    assert [device.name for device in found.devices] == ["X-0", "X-1", "X-2", "X-3", "X-4"]
    assert len({device.machine for device in found.devices}) == 3
    assert took_s(found.link(0, 1), 4e6) == pytest.approx(4e6 / 20e9)
    # 4 + log2(megabytes) GB/s, 6 at most; nothing is known where that isn't above 0.
    assert took_s(found.link(1, 2), 2e6) == pytest.approx(2e6 / 5e9)
    assert took_s(found.link(1, 2), 64e6) == pytest.approx(64e6 / 6e9)
    assert min(size for size, _ in found.link(1, 2).times) == 1e6 / 8
    assert took_s(found.link(2, 4), 8e6) == pytest.approx(8e6 / 0.5e9)
    mixed = cluster_of_bandwidths(str(table), "X:2+Y:1")
    assert took_s(mixed.link(0, 2), 8e6) == pytest.approx(8e6 / 0.5e9)


def test_the_command_writes_them(table):
    path = table.with_name("cluster.toml")
    asked = [str(table), "--links", "--machines", "X:2x2@a", "-o", str(path)]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    found = read_cluster(path)
    assert took_s(found.link(1, 2), 2e6) == pytest.approx(2e6 / 5e9)
    assert took_s(found.link(0, 1), 2e6) == pytest.approx(2e6 / 20e9)


def test_python_writes_the_same(table):
    path = table.with_name("cluster.toml")
    found = timeprest.links(path, target=table, machines="X:2x2@a")
    assert found == cluster_of_bandwidths(str(table), "X:2x2@a")
    read = read_cluster(path)
    assert [device.name for device in read.devices] == [device.name for device in found.devices]
    assert took_s(read.link(1, 2), 2e6) == pytest.approx(took_s(found.link(1, 2), 2e6), rel=1e-3)
    for half in ({"target": table}, {"machines": "X:2x2@a"}):
        with pytest.raises(UserError, match="machines: goes with a target"):
            timeprest.links(path, **half)


@pytest.mark.parametrize(
    ("machines", "words"),
    [
        ("Z:2", "has no Z; zones: a, b; GPUs: X, Y"),
        ("Y:2@b", "has no Y in b; zones"),
        ("X:0", "write GPU:N"),
        ("X:1", "one device has no links"),
        ("X", "write GPU:N"),
        ("Y:2", "no bandwidth between several Y of a machine; give Y:1"),
        ("Y:1x2", "no bandwidth between a Y and a Y"),
        ("Y:1+X:1@b", "no bandwidth between a Y and b X"),
    ],
)
def test_what_is_not_there_is_said(table, machines, words):
    with pytest.raises(UserError, match=words) as caught:
        cluster_of_bandwidths(str(table), machines)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"a": 3}', '{"a": {"X": {"1": {"a": {"X": {"1": 3}}}}}}']
)
def test_another_file_is_told(table, text):
    table.write_text(text)
    with pytest.raises(UserError, match=r"multizone\.json: "):
        cluster_of_bandwidths(str(table), "X:2x2")
