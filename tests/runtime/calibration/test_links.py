"""Links: the fit, the cluster file, and measuring between real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeprest.cli.errors import errors_as_lines, output
from timeprest.cli.links import _fit_lines, _tables, links_command
from timeprest.planner.cluster.cluster import Cluster, read_cluster
from timeprest.planner.cluster.cluster_toml import write_bandwidth, write_latency
from timeprest.planner.cluster.link_fit import LinkPoint, error_of_median, fit_link, typical_pair
from timeprest.profiles.errors import RunError, UserError
from timeprest.profiles.units import parse_bandwidth, parse_seconds
from timeprest.runtime.calibration.link_report import cluster_text, report_of
from timeprest.runtime.calibration.link_worker import _names
from timeprest.runtime.calibration.links import MESSAGE_BYTES, LinkTimes, measure_links

FEW = (4096, 262144, 16777216)


def points(seconds, sizes=MESSAGE_BYTES):
    """Points with the times that `seconds` gives for each size."""
    return [
        LinkPoint(message_bytes=n, seconds=seconds(n), error=0.01, repetitions=9) for n in sizes
    ]


def squares(latency_s, bandwidth, found):
    """What the fit minimizes."""
    return sum(((latency_s + p.message_bytes / bandwidth) / p.seconds - 1) ** 2 for p in found)


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e11))
def test_exact_times_give_back_their_latency_and_bandwidth(latency_s, bandwidth):
    fit = fit_link(points(lambda n: latency_s + n / bandwidth))
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-6)
    assert fit.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)
    assert fit.ratios == pytest.approx([1.0] * len(MESSAGE_BYTES))


@given(
    st.floats(1e-6, 1e-3),
    st.floats(1e7, 1e10),
    st.lists(st.floats(0.7, 1.4), min_size=len(MESSAGE_BYTES), max_size=len(MESSAGE_BYTES)),
)
def test_noisy_times_are_fitted_best_within_the_bounds(latency_s, bandwidth, noise):
    """No neighbour within the bounds has smaller squares, and no point is far off."""
    factor = dict(zip(MESSAGE_BYTES, noise, strict=True))
    found = points(lambda n: (latency_s + n / bandwidth) * factor[n])
    fit = fit_link(found)
    best = squares(fit.latency_s, fit.bandwidth_bytes_per_s, found)
    assert best <= squares(latency_s, bandwidth, found) + 1e-9
    assert fit.latency_s >= 0
    for more in (0.99, 1.01):
        assert best <= squares(fit.latency_s * more, fit.bandwidth_bytes_per_s, found) + 1e-9
        assert best <= squares(fit.latency_s, fit.bandwidth_bytes_per_s * more, found) + 1e-9
    assert best <= squares(1e-8, fit.bandwidth_bytes_per_s, found) + 1e-3


def test_a_link_without_latency_has_none_rather_than_less():
    """Times that rise faster than the size: the best line would cross zero below zero."""
    fit = fit_link(points(lambda n: n**1.2 / 1e9))
    assert fit.latency_s == 0
    assert fit.bandwidth_bytes_per_s > 0


@pytest.mark.parametrize(
    "found",
    [
        points(lambda n: 1e-3, sizes=[4096]),
        points(lambda n: 1e-3),
        points(lambda n: 1 / n),
        points(lambda n: 0.0),
    ],
    ids=["one size", "all the same", "falling", "none"],
)
def test_times_that_hold_no_bandwidth_are_refused(found):
    with pytest.raises(RunError, match=r"two sizes|measure again"):
        fit_link(found)


def test_the_typical_pair_is_the_median_one():
    slow, middle, fast = (points(lambda n, k=k: k * n * 1e-9) for k in (9, 2, 1))
    typical = typical_pair([slow, fast, middle])
    assert [p.seconds for p in typical] == [p.seconds for p in middle]
    assert typical[0].repetitions == 27


def test_the_error_of_a_median_is_its_own_spread():
    """Against the spread of medians of many samples of a uniform distribution, 1.5 to 2.5."""
    import random

    source = random.Random(0)
    draws = [[source.uniform(1.5, 2.5) for _ in range(49)] for _ in range(400)]
    medians = [sorted(d)[24] for d in draws]
    spread = (sum((m - 2) ** 2 for m in medians) / len(medians)) ** 0.5 / 2
    said = sum(error_of_median(d) for d in draws) / len(draws)
    assert said == pytest.approx(spread, rel=0.15)
    assert error_of_median([3.0] * 5) == 0


@given(st.floats(1e3, 1e14), st.floats(1e-9, 1e3))
def test_amounts_are_written_as_they_are_read(bandwidth, seconds):
    assert parse_bandwidth(write_bandwidth(bandwidth)) == pytest.approx(bandwidth, rel=6e-3)
    assert parse_seconds(write_latency(seconds)) == pytest.approx(seconds, rel=6e-3)


def test_amounts_as_text():
    bandwidths, latencies = (4.312e9, 999.7e6, 12.0), (52.1e-6, 0.0, 0.9996e-3, 2.5)
    assert [*map(write_bandwidth, bandwidths)] == ["4.31GB/s", "1GB/s", "12B/s"]
    assert [*map(write_latency, latencies)] == ["52.1us", "0ns", "1ms", "2.5s"]


def times_by_hand(pairs=1):
    link, all_reduce = points(lambda n: 5e-5 + n / 2e9), points(lambda n: 5e-4 + n / 1e9)
    return LinkTimes(
        processes=pairs + 1,
        device="cpu",
        backend="gloo",
        pairs=(tuple(link),) * pairs,
        all_reduce=tuple(all_reduce),
    )


@pytest.mark.parametrize("pairs", [1, 3])
def test_the_cluster_file_reads_back(pairs, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_text(report_of(times_by_hand(pairs), str(path))))
    cluster = read_cluster(path)
    assert [device.name for device in cluster.devices] == [f"cpu{k}" for k in range(pairs + 1)]
    assert all(device.memory_bytes is None for device in cluster.devices)
    assert cluster.network.latency_s == pytest.approx(5e-5)
    assert cluster.network.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert cluster.all_reduce is not None
    assert cluster.all_reduce.processes == pairs + 1
    assert cluster.all_reduce.latency_s == pytest.approx(5e-4)
    assert cluster.all_reduce.bandwidth_bytes_per_s == pytest.approx(1e9)
    # Every measured point stands in the comments, for both.
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert all(sum(str(n) in line.split() for line in comments) == 2 for n in MESSAGE_BYTES)
    assert max(len(line) for line in comments) <= 100


def test_links_of_several_machines_are_told_apart(tmp_path, capsys):
    """Of pairs on one machine the median, of pairs on two the other; in devices' sequence."""
    near, far = points(lambda n: 5e-5 + n / 2e9), points(lambda n: 1e-3 + n / 1e8)
    times = LinkTimes(
        processes=4,
        device="cpu",
        backend="gloo",
        pairs=(tuple(near), tuple(far), tuple(far)),
        all_reduce=tuple(points(lambda n: 2e-3 + n / 5e7)),
        machines=("a", "a", 'b "2"', "c"),
    )
    report = report_of(times, "cluster.toml")
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_text(report))
    cluster = read_cluster(path)
    assert [(d.name, d.machine) for d in cluster.devices] == [
        ("cpu0", "a"),
        ("cpu1", "a"),
        ("cpu2", 'b "2"'),
        ("cpu3", "c"),
    ]
    assert cluster.network.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert cluster.between_machines.bandwidth_bytes_per_s == pytest.approx(1e8)
    assert cluster.between_machines.latency_s == pytest.approx(1e-3)
    assert cluster.all_reduce.processes == 4
    for part in _tables(report, 50):
        output().print(part, width=50)
    narrow = capsys.readouterr().out
    assert narrow.count("meas./fit") == 3
    assert "…" not in narrow
    for part in (*_tables(report, 100), *_fit_lines(report)):
        output().print(part)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert "neighbours on one machine (the median of 1 pair)" in " ".join(printed.split())
    assert "neighbours on different machines (the median of 2 pairs)" in " ".join(printed.split())
    assert "between machines: 1ms + bytes / 100MB/s" in printed


def test_where_no_line_fits_the_file_has_the_times(tmp_path):
    """As with a shaped wire, which lets a burst through at once; not where the fit holds."""
    path = tmp_path / "cluster.toml"
    assert not [line for line in _fit_lines(report_of(times_by_hand(), "")) if "by size" in line]
    shaped = points(lambda n: n / 25e6 if n < 2**20 else n / 12.5e6)
    # Larger messages that took less take as long.
    shaped[1] = msgspec.structs.replace(shaped[1], seconds=shaped[0].seconds / 2)
    times = msgspec.structs.replace(times_by_hand(), pairs=(tuple(shaped),), machines=("a", "b"))
    report = report_of(times, "")
    (line,) = [line for line in _fit_lines(report) if "the file has the times by size" in line]
    assert line.startswith("between machines: ")
    path.write_text(cluster_text(report))
    found = read_cluster(path)
    link = found.between_machines
    assert [size for size, _ in link.times] == [point.message_bytes for point in shaped]
    for point in (shaped[0], *shaped[2:]):
        took_s = link.latency_s + link.wire_s(point.message_bytes)
        assert took_s == pytest.approx(point.seconds, rel=0.01)
    assert link.times[1][1] == link.times[0][1]
    assert not found.all_reduce.times


def test_machines_of_one_name_are_told_apart():
    assert _names([("x", "0"), ("x", "0"), ("y", "1"), ("x", "2")]) == ("x-0", "x-0", "y", "x-2")
    assert _names([("x", "0"), ("x", "0")]) == ("x", "x")


def test_clusters_of_older_plans_still_load():
    old = b'{"devices":[{"name":"a"}],"network":{"bandwidth_bytes_per_s":1e9,"latency_s":0.0}}'
    assert msgspec.json.decode(old, type=Cluster).all_reduce is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("processes = 2\nlatency = '1us'", r"all_reduce\.bandwidth: is missing"),
        ("processes = 1\nlatency = '1us'\nbandwidth = '1GB/s'", r"all_reduce.processes: expected"),
        (
            "processes = true\nlatency = '1us'\nbandwidth = '1GB/s'",
            r"all_reduce.processes: expected",
        ),
        ("processes = 2\nlatency = '1x'\nbandwidth = '1GB/s'", r"all_reduce\.latency: unknown"),
        ("processes = 2\nlatency = '1us'\nbandwidth = '0'", r"all_reduce\.bandwidth: must be"),
        ("ring = 2", r"all_reduce: unknown field 'ring'"),
    ],
)
def test_a_broken_all_reduce_is_named(text, message, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(f"[[devices]]\n[all_reduce]\n{text}\n")
    with pytest.raises(UserError, match=message) as caught:
        read_cluster(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "processes", "device", "message"),
    [
        ("c.toml", 1, "cpu", "processes: give 2 to"),
        ("c.toml", 10**9, "cpu", "processes: give 2 to"),
        ("c.toml", 2, "abacus", "cpu or cuda, not 'abacus'"),
        ("c.toml", 64, "cuda", "need a GPU each"),
        (".", 2, "cpu", "is a folder"),
        ("/dev/null/c.toml", 2, "cpu", "/dev/null isn't a folder"),
    ],
)
def test_bad_options_end_before_anything_starts(
    path, processes, device, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        links_command(path, processes=processes, device=device, quiet=False, as_json=False)
    assert not list(tmp_path.iterdir())


def link_workers(parent):
    """The processes below one that measure links, by their rank: as they were started."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        try:
            if "timeprest.runtime.calibration.link_worker" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue  # It has just ended, or just begun.
    return sorted(found, key=lambda process: process.pid)


def alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def once(action):
    """A progress callback that does something once: measuring has begun then."""
    done = []

    def progress(what, count, of):
        if not done:
            done.append(what)
            action()

    return progress


@pytest.mark.processes
def test_the_command_measures_writes_and_prints(tmp_path, monkeypatch, capsys):
    """Two processes over gloo, few sizes; they listen on the loopback device alone."""
    seen = set()

    def look():
        for process in link_workers(os.getpid()):
            listening = (c for c in process.net_connections() if c.status == psutil.CONN_LISTEN)
            seen.update(c.laddr.ip for c in listening)

    def measure_few(processes, device, *, progress):
        return measure_links(processes, device, message_bytes=FEW, cap_s=0.1, progress=once(look))

    monkeypatch.setattr("timeprest.runtime.calibration.links.measure_links", measure_few)
    path = tmp_path / "cluster.toml"
    links_command(str(path), processes=2, device="cpu", quiet=False, as_json=False)
    assert seen == {"127.0.0.1"}
    cluster = read_cluster(path)
    assert len(cluster.devices) == 2
    # Between what no machine reaches and what would be no link.
    assert 1e6 < cluster.network.bandwidth_bytes_per_s < 1e12
    assert cluster.network.latency_s < 0.1
    assert cluster.all_reduce is not None
    assert cluster.all_reduce.processes == 2
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()[:-1]) <= 100
    for word in ("4.0 KiB", "256.0 KiB", "16.0 MiB", "half trip", "all-reduce of 2: "):
        assert word in printed
    assert f"wrote {path}; next: tp-plan solve PROFILE --cluster {path}" in printed
    assert not link_workers(os.getpid())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (signal.SIGKILL, r"^process 1 was killed by SIGKILL(; process 0: .*)?$"),
        (signal.SIGSTOP, r"^process 1 .* is stopped .SIGSTOP.; process 0: waiting for .* 2 s$"),
    ],
)
def test_a_lost_worker_ends_the_measurement(how, message):
    lost = []

    def lose():
        lost.append(time.monotonic())
        link_workers(os.getpid())[1].send_signal(how)

    with pytest.raises(RunError, match=message) as caught:
        measure_links(2, message_bytes=FEW, cap_s=60, timeout_s=2, progress=once(lose))
    assert time.monotonic() - lost[0] < 25
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert not link_workers(os.getpid())


COMMAND = """
from timeprest.cli.errors import errors_as_lines
from timeprest.cli.links import links_command
errors_as_lines(links_command)("c.toml", processes=2, device="cpu", quiet=False, as_json=True)
"""


@pytest.mark.choice("worker")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("whom", "how", "code", "message"),
    [
        ("command", signal.SIGINT, 130, "timeprest: stopped"),
        ("worker", signal.SIGKILL, 1, "timeprest: process 1 was killed by SIGKILL"),
    ],
)
def test_the_command_ends_in_one_line_without_file_or_worker(whom, how, code, message, tmp_path):
    command = [sys.executable, "-c", COMMAND]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while len(link_workers(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        workers = link_workers(process.pid)
        target = process if whom == "command" else workers[1]
        target.send_signal(how)
        begin = time.monotonic()
        out, err = process.communicate(timeout=40)
    assert time.monotonic() - begin < 30
    assert process.returncode == code
    assert out == ""
    (line,) = err.strip().splitlines()
    assert line.startswith(message)
    assert not list(tmp_path.iterdir())
    assert len(workers) == 2
    assert not any(alive(worker) for worker in workers)


def test_json_is_one_object_and_a_failure_writes_nothing(monkeypatch, tmp_path, capsys):
    path = tmp_path / "c.toml"

    def command():
        errors_as_lines(links_command)(
            str(path), processes=2, device="cpu", quiet=False, as_json=True
        )

    monkeypatch.setattr(
        "timeprest.runtime.calibration.links.measure_links", lambda *a, **k: times_by_hand()
    )
    command()
    found = msgspec.json.decode(capsys.readouterr().out)
    assert found["processes"] == 2
    assert found["link"]["bandwidth_bytes_per_s"] == pytest.approx(2e9)
    assert [p["message_bytes"] for p in found["link"]["points"]] == list(MESSAGE_BYTES)
    assert len(found["pairs"]) == 1
    path.unlink()

    def fail(*arguments, **options):
        raise RunError("process 1 was killed by SIGKILL")

    monkeypatch.setattr("timeprest.runtime.calibration.links.measure_links", fail)
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1
    assert not path.exists()
