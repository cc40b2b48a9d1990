"""Pipeline against data parallelism over a slow wire: `make bench-links`, as root.

Two hosts on one machine, joined by a wire of a given speed
(tests/helpers/processes/two_hosts.py). A VGG-16 shape, planned for that wire.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click
import msgspec
from timeprest.planner.plan import read_plan
from timeprest.runtime.prepare.workers import all_replicas
from timeprest.runtime.records.run_dir import RunDir
from timeprest.tests.helpers.processes.two_hosts import TwoHosts, why_not

from .machine.machine import machine
from .machine.quiet import MOST, Watch, wait_for_quiet
from .racing.ours import DRAIN, command, window_of
from .racing.processes import rank_environment
from .racing.rank import RankFigures, RankSpec
from .racing.rivals import Length
from .report.page import write_page
from .report.records import DOCS, LinkRun, read_results, write_results
from .tasks import MEMORY_RACES, target_of

MODEL = "vgg16"
RATES = {"1gbit": "125MB/s", "100mbit": "12.5MB/s"}
"""As tc writes them, and as tp-plan does."""
LATENCY = "100us"
SYSTEMS = ("timeprest", "pipedream")
PORT = 29611
LONGEST_S = 600.0


def planned(system: str, rate: str, folder: Path) -> Path:
    """The plan for two hosts with that wire, of a profile that is made once for a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    profile, plan = folder / "profile.json", folder / f"{system}-{rate}.json"
    if not profile.exists():
        size = str(MEMORY_RACES[MODEL].mini_batch)
        command("profile", target_of(MODEL), "--batch-size", size, "-q", "-o", str(profile))
    if not plan.exists():
        wire = ["--bandwidth", RATES[rate], "--latency", LATENCY]
        what = ["--variant", system, "--devices", "2", "--stages", "2", "--replicas", "off"]
        command("plan", "solve", str(profile), *what, *wire, "-q", "-o", str(plan))
    return plan


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for all; nobody is left behind."""
    try:
        codes = [process.wait(LONGEST_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"exit codes {codes}")


def ours(system: str, rate: str, folder: Path, length: Length) -> LinkRun:
    """tp-run under torchrun on both hosts."""
    path = planned(system, rate, folder)
    plan = read_plan(path)
    steps = length.warm + length.timed + DRAIN
    quick = ["--no-evaluate", "--no-distances", "--checkpoint-every", "0", "--log-operations"]
    with TwoHosts(rate) as hosts, tempfile.TemporaryDirectory() as runs:
        started = [
            hosts.torchrun(
                host,
                1,
                [str(path), "--steps", str(steps), "--run-dir", f"{runs}/{host}", "-q", *quick],
            )
            for host in (0, 1)
        ]
        finish(started)
        sent = sum(hosts.sent_bytes(host) for host in (0, 1))
        windows = [
            window_of(RunDir(f"{runs}/{worker.rank}").operations(worker), length)
            for worker in all_replicas(plan)
        ]
    return LinkRun(
        rate=rate,
        contestant=system,
        period_s=max(window.period_s for window in windows),
        wire_bytes=sent / steps,
        micro_batches=plan.micro_batches,
        cuts=tuple(stage.nodes[0] for stage in plan.stages[1:]),
        predicted_period_s=plan.predicted.period_s,
    )


def data_parallel(rate: str, length: Length) -> LinkRun:
    """DistributedDataParallel, a process on each host."""
    spec = RankSpec(
        model=MODEL,
        kind="ddp",
        processes=2,
        warm=length.warm,
        timed=length.timed,
        address=f"{TwoHosts.addresses[0]}:{PORT}",
        device="wire",
        longest_s=LONGEST_S,
    )
    with TwoHosts(rate) as hosts, tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        line = [sys.executable, "-m", f"{__package__}.rank", msgspec.json.encode(spec).decode()]
        started = [
            hosts.start(host, [*line, "-", out], env=rank_environment(spec, host))
            for host in (0, 1)
        ]
        finish(started)
        found = [
            msgspec.json.decode(Path(f"{out}.{host}").read_bytes(), type=RankFigures)
            for host in (0, 1)
        ]
    return LinkRun(
        rate=rate,
        contestant="ddp",
        period_s=max(rank.period_s for rank in found),
        wire_bytes=sum(rank.sent_bytes or 0.0 for rank in found),
        micro_batches=1,
    )


@click.command()
@click.option("--rates", default=",".join(RATES), show_default=True)
@click.option("--contestants", default=",".join(["ddp", *SYSTEMS]), show_default=True)
@click.option("--warm", default=2, show_default=True)
@click.option("--timed", default=6, show_default=True)
@click.option("--noisy", is_flag=True, help="Take what comes, to try things out: no figures.")
@click.option("--work", default="runs/bench-links", show_default=True)
@click.option("--results", default=str(DOCS / "benchmarks" / "races.json"))
@click.option("--page", default=str(DOCS / "benchmarks.md"))
def main(
    rates: str,
    contestants: str,
    warm: int,
    timed: int,
    noisy: bool,
    work: str,
    results: str,
    page: str,
) -> None:
    """Train over slow wires and add what that took to the results."""
    reason = why_not()
    if reason is not None:
        print(f"slow links: {reason}", file=sys.stderr)
        sys.exit(2)
    path, folder = Path(results), Path(work).absolute()
    for rate in rates.split(","):
        for name in contestants.split(","):
            for _ in range(4):
                wait_for_quiet(1.0 if noisy else MOST)
                watch = Watch()
                length = Length(warm, timed)
                run = (
                    data_parallel(rate, length)
                    if name == "ddp"
                    else ours(name, rate, folder, length)
                )
                share = watch.foreign_share()
                print(
                    f"{rate} {name}: {run.period_s * 1e3:.0f} ms and {run.wire_bytes / 1e6:.2f} MB "
                    f"a mini-batch; others had {share:.1%}",
                    flush=True,
                )
                if noisy or share <= MOST:
                    break
            else:
                continue
            before = read_results(path, machine())
            rest = [e for e in before.links if (e.rate, e.contestant) != (rate, name)]
            write_results(path, msgspec.structs.replace(before, links=(*rest, run)))
    write_page(path, Path(page))


if __name__ == "__main__":
    main()
