"""Everyday questions, each held against a hill climb: `make bench-battery`.

    python -m timeprest.tests.benchmarks.planner.battery [--uneven | --replicas | --rented] [WORD]

Draws models of the zoo and of Hugging Face, 1 to 64 devices of one kind or two, memory from tight
to none and any system; plans each, and lets `climb` look for a plan too, within the same choices.
Writes docs/planner_battery.md from planner_battery.head.md beside it; with a sample or with words,
only cases whose lines have them all are run, and no page is written but where `--page` says so.
The page has the rows of wide gaps and beaten plans alone.
`--uneven`: of questions drawn otherwise: two kinds of devices in turns, some slow links, odd
numbers of devices and mini-batches, replicas. `--replicas`: of those of the battery whose stages
have a device each, with replicas allowed, as tp-plan has it by default. `--rented`: the same on
machines of one kind of GPUs or two, with the links of their data sheets and slow ones between.

All times are of this process's share of a processor, also those that searches end by, so that
neither side depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from timeprest.planner.cluster.catalogue import cluster_of_kinds
from timeprest.planner.cluster.cluster import Cluster, Device, EqualDevices, LinkBetween
from timeprest.planner.cluster.headroom import Headroom
from timeprest.planner.cluster.links import Network
from timeprest.planner.plan import PlanStage
from timeprest.planner.question import Question
from timeprest.planner.schedules.schedules import StalenessBounds, limit_ranges
from timeprest.planner.search.choices import micro_batch_counts
from timeprest.planner.search.device_sequences import cluster_in_sequence
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import InfeasibleError, PlanError
from timeprest.profiles.files import read_file
from timeprest.profiles.profile import Profile, check_profile
from timeprest.tests.benchmarks.planner.climb import Climb, ReplicaClimb
from timeprest.tests.benchmarks.shared import command, head_of, machine, markdown

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
WORK = ROOT / "runs" / "battery"
COUNT = 320
WIDE = 0.1
"""A gap that is wider gets a row on the page."""

SAME = 1e-9
BATCH, SIZES = 32, "1,2,4,8,16,32"
MODELS = {
    "gpt2": "gpt2",
    "gpt2-untied": "gpt2:tied=0",
    "gpt2-medium": "gpt2-medium",
    "gpt2-large": "gpt2-large:tied=0",
    "gpt2-xl": "gpt2-xl:tied=0",
    "bert-large": "bert-large",
    "vgg16": "vgg16",
    "resnet50": "resnet50",
    "resnet152": "resnet152",
    "densenet121": "densenet121",
    "gnmt": "gnmt",
    "hf-llama": "hf:llama,hidden_size=1024,intermediate_size=2816,num_hidden_layers=16,"
    "num_attention_heads=16,num_key_value_heads=16,vocab_size=32000,length=512",
    "hf-qwen2": "hf:qwen2,hidden_size=896,intermediate_size=4864,num_hidden_layers=12,"
    "num_attention_heads=14,num_key_value_heads=2,vocab_size=50000,length=512",
    "hf-t5": "hf:t5,d_model=512,d_ff=2048,num_layers=6,num_decoder_layers=6,num_heads=8,"
    "vocab_size=32128,length=256",
    "hf-vit": "hf:vit,hidden_size=768,num_hidden_layers=12,num_attention_heads=12,"
    "intermediate_size=3072,image_size=224,patch_size=16",
}
"""What tp-profile calls them."""

RENTED = (
    "a100-80gb:2x2",
    "a100-80gb:2x3",
    "a100-80gb:2x4",
    "a100-80gb:4x2",
    "a100-80gb:8x2",
    "h100-80gb:2+a100-80gb:2",
    "h100-80gb:2+a100-80gb:4",
    "h100-80gb:4+a100-80gb:4",
    "a100-40gb:4+l4:4",
    "v100-sxm2-32gb:4+t4:4",
    "l4:2x2",
    "t4:4x2",
)
"""As `--devices` names them."""

RENTED_SYSTEMS = (
    "gpipe",
    "pipedream",
    "pipedream-2bw",
    "pipedream-flush",
    "spectrain",
    "timeprest",
    "v-timeprest",
    "zb-h1",
)

UNEVEN_SYSTEMS = (
    "gpipe",
    "interleaved-1f1b",
    "pipedream",
    "pipedream-2bw",
    "pipedream-flush",
    "spectrain",
    "timeprest",
    "zb-h1",
)

TIED = {"gpt2", "gpt2-medium", "bert-large", "hf-t5"}
"""The first and the last layer share parameters."""


@dataclass(frozen=True)
class Case:
    """A question.

    Attributes:
        memory: GiB of a device; as a text ("0.7×"), times what the fullest needs where stages are
            even in time; None: no limit.
        second: speed and memory of the second kind of devices, as shares of the first one's; None:
            there is one kind.
        micro_batches, recompute: as tp-plan takes them; None: left open.
        per_device: stages on each device; the placement is a loop or a V.
        run_ahead: as tp-plan takes it: "paper" or "auto".
        turns: each so many-th device is of the second kind; 0: the second half of them.
        slow: k where the link between devices k and k + 1 has a tenth of the bandwidth.
        replicas: allowed, with any number of stages.
        kinds: of RENTED; then memory is that of the data sheets, and the bandwidth is that between
            machines.
    """

    number: int
    model: str
    system: str
    devices: int
    memory: float | str | None
    second: tuple[float, float] | None
    bandwidth_bytes_per_s: float
    micro_batches: int | None
    recompute: str
    per_device: int
    placement: str
    run_ahead: str
    mini_batch: int = BATCH
    turns: int = 0
    slow: tuple[int, ...] = ()
    replicas: bool = False
    kinds: str = ""

    @property
    def stages(self) -> int:
        """S."""
        return self.devices * self.per_device

    @property
    def device_of(self) -> tuple[int, ...]:
        """Per stage, the position of its device."""
        down = tuple(range(self.devices))
        if self.per_device == 1:
            return down
        return down + down[::-1] if self.placement == "v" else down * self.per_device

    def __str__(self) -> str:
        memory = "no limit" if self.memory is None else f"{self.memory}"
        memory += " GiB" if isinstance(self.memory, float) else ""
        memory = f"{self.kinds}" if self.kinds else memory
        kinds = "" if self.second is None else " of two kinds" + " in turns" * bool(self.turns)
        each = "" if self.per_device == 1 else f", {self.per_device} stages each ({self.placement})"
        n = "" if self.micro_batches is None else f", N = {self.micro_batches}"
        again = "" if self.recompute == "off" else f", recompute {self.recompute}"
        again += "" if self.run_ahead == "paper" else f", run-ahead {self.run_ahead}"
        link = f"{self.bandwidth_bytes_per_s / 1e9:g} GB/s" + f" ({len(self.slow)} slow)" * bool(
            self.slow
        )
        again += "" if self.mini_batch == BATCH else f", mini-batch {self.mini_batch}"
        again += ", replicas" * self.replicas
        return (
            f"{self.model}, {self.devices} devices{kinds}, {memory}, {link}, "
            f"{self.system}{each}{n}{again}"
        )


def drawn(number: int) -> Case:
    """The question with this number."""
    rng = random.Random(f"battery {number}")
    system = VARIANTS[rng.choice(sorted(VARIANTS))]
    per_device, placement = 1, "auto"
    if system.placement != "any":
        per_device, placement = 2, system.placement
    elif rng.random() < 0.12:
        per_device, placement = 2, rng.choice(["loop", "v"])
    most = 8 if per_device > 1 else 64
    devices = rng.choice([d for d in (1, 2, 2, 3, 4, 4, 6, 8, 8, 8, 16, 16, 32, 64) if d <= most])
    n = None if system.whole_mini_batches else rng.choice([None, None, 4, 8, 16])
    if n is not None and n < system.least_micro_batches(devices * per_device):
        n = None
    again = "off" if system.recompute_refusal else rng.choice(["off", "off", "auto"])
    second = None
    if devices > 1 and rng.random() < 0.25:
        second = rng.choice([0.5, 0.7, 2.0]), rng.choice([0.5, 1.0, 2.0])
    # Tied layers are on one stage where a system doesn't flush: that leaves but one.
    models = [name for name in sorted(MODELS) if system.flushes or name not in TIED]
    memories = [None, 16.0, 40.0, 80.0, "0.7×", "0.9×", "1.1×", "1.5×"]
    return Case(
        number=number,
        model=rng.choice(models),
        system=system.name,
        devices=devices,
        memory=rng.choice(memories),
        second=second,
        bandwidth_bytes_per_s=rng.choice([25e9, 25e9, 300e9, 10e9, 1.25e9]),
        micro_batches=n,
        recompute=again,
        per_device=per_device,
        placement=placement,
        run_ahead="paper" if system.flushes else rng.choice(["paper", "paper", "auto"]),
    )


def uneven(number: int) -> Case:
    """The question with this number, of those that are drawn otherwise."""
    rng = random.Random(f"uneven {number}")
    system = VARIANTS[rng.choice(UNEVEN_SYSTEMS)]
    per_device, placement = (2, system.placement) if system.placement != "any" else (1, "auto")
    if per_device == 1 and rng.random() < 0.25:
        per_device, placement = 2, rng.choice(["loop", "v"])
    devices = rng.choice([2, 3, 3, 5, 5, 6, 7])
    whole = system.whole_mini_batches
    models = [name for name in sorted(MODELS) if system.flushes or name not in TIED]
    links = range(devices - 1)
    return Case(
        number=number,
        model=rng.choice(models),
        system=system.name,
        devices=devices,
        memory=rng.choice([None, 24.0, "0.6×", "0.8×", "1.0×", "1.3×", "2.0×"]),
        # About as v100-sxm2-32gb or l4, and h100-80gb, beside a100-80gb.
        second=rng.choice([None, None, (0.4, 0.8), (0.4, 0.4), (0.3, 0.6), (1.8, 1.0)]),
        bandwidth_bytes_per_s=rng.choice([1.25e9, 12.5e9, 25e9, 300e9]),
        micro_batches=None,
        recompute="off" if system.recompute_refusal else rng.choice(["off", "auto"]),
        per_device=per_device,
        placement=placement,
        run_ahead="paper",
        mini_batch=24 if whole else rng.choice([24, 48, 96]),
        turns=rng.choice([0, 2, 3]),
        slow=tuple(k for k in links if rng.random() < 0.3) if rng.random() < 0.5 else (),
        replicas=per_device == 1 and rng.random() < 0.3,
    )


def replicated(number: int) -> Case:
    """The question with this number where replicas are allowed, as by default; of several stages on
    each device with one, and up to 16 devices."""
    case = drawn(number)
    system = VARIANTS[case.system]
    if system.placement != "any":
        case = replace(case, system="timeprest")
    devices = min(case.devices, 16)
    n = None if VARIANTS[case.system].whole_mini_batches else case.micro_batches
    return replace(
        case, devices=devices, per_device=1, placement="auto", micro_batches=n, replicas=True
    )


def rented(number: int) -> Case:
    """The question with this number, of clusters that people rent, with replicas allowed."""
    rng = random.Random(f"rented {number}")
    kinds, system = rng.choice(RENTED), rng.choice(RENTED_SYSTEMS)
    models = [x for x in sorted(MODELS) if VARIANTS[system].flushes or x not in TIED]
    return Case(
        number=number,
        model=rng.choice(models),
        system=system,
        devices=sum(machine_sizes(kinds)),
        memory=None,
        second=None,
        bandwidth_bytes_per_s=rng.choice([10e9, 25e9, 100e9, 400e9]) / 8,
        micro_batches=None,
        recompute=rng.choice(["off", "auto"]),
        per_device=1,
        placement="auto",
        run_ahead="paper",
        replicas=True,
        kinds=kinds,
    )


def machine_sizes(kinds: str) -> list[int]:
    """Devices of each machine, as `--devices` names them."""
    parts = [kind.split(":")[1].split("x") for kind in kinds.split("+")]
    return [int(part[0]) for part in parts for _ in range(int(part[1]) if part[1:] else 1)]


# What tp-plan is given ----------------------------------------------------------------------------


def profile_path(model: str) -> Path:
    """Its profile; made when it is first asked for."""
    path = WORK / "profiles" / f"{model}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        how = ("--device", "meta", "--spec", "a100-80gb", "--batch-size", BATCH)
        command("profile", MODELS[model], *how, "--micro-batch-sizes", SIZES, "-q", "-o", path)
    return path


@cache
def profile_of(model: str) -> Profile:
    """Read once."""
    path = profile_path(model)
    return check_profile(read_file(path, Profile), str(path))


def cluster_of(case: Case) -> Cluster:
    """Its devices; a second kind has the second half of the places."""
    if case.kinds:
        asked = EqualDevices(devices=case.kinds, between_bandwidth=case.bandwidth_bytes_per_s)
        return cluster_of_kinds(asked, profile_of(case.model), Headroom(), str)[0]
    memory = case.memory
    if isinstance(memory, str):
        nbytes: float | None = float(memory.rstrip("×")) * even_bytes(case)
    else:
        nbytes = None if memory is None else memory * 2**30
    kinds = [(1.0, 1.0), case.second or (1.0, 1.0)]
    devices = []
    for k in range(case.devices):
        other = (k + 1) % case.turns == 0 if case.turns else k >= case.devices / 2
        speed, share = kinds[other]
        limit = None if nbytes is None else max(round(nbytes * share), 1)
        devices.append(Device(name=f"device{k}", speed=speed, memory_bytes=limit))
    network = Network(bandwidth_bytes_per_s=case.bandwidth_bytes_per_s, latency_s=1e-5)
    slow = network.with_costs(case.bandwidth_bytes_per_s / 10, 1e-5)
    links = tuple(
        LinkBetween(between=(f"device{k}", f"device{k + 1}"), network=slow) for k in case.slow
    )
    return Cluster(devices=tuple(devices), network=network, links=links)


def even_bytes(case: Case) -> float:
    """What the fullest device needs where stages are even in time, with limits S − s."""
    devices = tuple(Device(name=f"device{k}") for k in range(case.devices))
    network = Network(bandwidth_bytes_per_s=case.bandwidth_bytes_per_s, latency_s=1e-5)
    asked = question_of(case, Cluster(devices=devices, network=network))
    even = climbs_of(case, asked)[0].usual()
    held = sum(layer.parameter_bytes for layer in asked.profile.layers)
    if even is None:
        return 4 * held / case.devices
    return max(even.prediction.device_of(s).memory_bytes for s in range(case.stages))


def question_of(case: Case, cluster: Cluster) -> Question:
    """As plans are judged."""
    profile = profile_of(case.model)
    factor = profile.optimizer.state_bytes_per_parameter_byte
    return Question(profile, cluster, case.system, case.mini_batch, factor, 1, tied_of(case))


def tied_of(case: Case) -> Any:
    """Copies of tied parameters may be on several stages wherever that is exact."""
    return "split" if VARIANTS[case.system].flushes else "together"


def options_of(case: Case) -> dict[str, Any]:
    """As `solve` takes them."""
    return {
        "micro_batches": case.micro_batches,
        "mini_batch": case.mini_batch,
        "stages": None if case.replicas else case.stages,
        "replicas": case.replicas,
        "stages_per_device": case.per_device,
        "placement": case.placement,
        "recompute": case.recompute,
        "tied": tied_of(case),
        "run_ahead": case.run_ahead,
        "tolerance": 0.0,
        "headroom": Headroom(),
        "sequence": "best" if case.kinds else "listed",
    }


def command_line(case: Case, seconds: float) -> str:
    """What asks tp-plan the same; where a cluster's file is needed, it is written."""
    if case.kinds:
        words = [f"--devices {case.kinds} --between {case.bandwidth_bytes_per_s:.0f}B/s"]
    else:
        words = [f"--cluster {cluster_file(case)} --sequence listed"]
    stages = "--replicas auto" if case.replicas else f"--replicas off --stages {case.stages}"
    words.append(f"--variant {case.system} {stages} --mini-batch {case.mini_batch}")
    if case.per_device > 1:
        words.append(f"--stages-per-device {case.per_device} --placement {case.placement}")
    if case.micro_batches:
        words.append(f"--micro-batches {case.micro_batches}")
    words.append(
        f"--recompute {case.recompute} --tied {tied_of(case)} --run-ahead {case.run_ahead}"
    )
    words.append(f"--tolerance 0% --headroom 0% --time-limit {seconds:g}")
    return f"tp-plan solve {profile_path(case.model)} {' '.join(words)} -o plan.json"


def cluster_file(case: Case) -> Path:
    """Its devices and links, written."""
    path = WORK / "clusters" / f"{case.number}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    cluster = cluster_of(case)
    lines = []
    for device in cluster.devices:
        lines += ["[[devices]]", f'name = "{device.name}"', f"speed = {device.speed}"]
        lines += [f'memory = "{device.memory_bytes}B"'] if device.memory_bytes else []
    network = cluster.network
    bandwidth = f'bandwidth = "{network.bandwidth_bytes_per_s:.0f}B/s"'
    lines += ["[network]", bandwidth, f'latency = "{network.latency_s * 1e6:g}us"']
    for link in cluster.links:
        slow = f"{link.network.bandwidth_bytes_per_s:.0f}B/s"
        lines += ["[[links]]", f"between = {[*link.between]}", f'bandwidth = "{slow}"']
        lines += [f'latency = "{link.network.latency_s * 1e6:g}us"']
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# One question, both ways --------------------------------------------------------------------------


class Found(NamedTuple):
    """What came of it; infinite periods: nothing was found to fit.

    Attributes:
        seconds: of a processor, that the search took.
        stopped: what ended it, where nothing was proven.
        tried: plans that the climb looked at.
        shape: of the climb's plan, layers and limits of its stages, for people.
    """

    period_s: float
    bound_s: float
    proven: bool
    seconds: float
    stopped: str
    climb_s: float
    tried: int
    shape: str = ""

    @property
    def beaten(self) -> float:
        """By how much of its period the climb's plan is shorter; less than 0: it is longer."""
        if math.isinf(self.climb_s):
            return 0.0 if math.isinf(self.period_s) else -1.0
        return 1.0 if math.isinf(self.period_s) else 1 - self.climb_s / self.period_s

    @property
    def gap(self) -> float:
        """Between period and bound, of the bound; 0 where it is proven."""
        return 0.0 if self.proven or not self.bound_s else self.period_s / self.bound_s - 1


def processor_s() -> float:
    """Of this process and of those that it has waited for, such as a solver's."""
    return sum(os.times()[:4])


def go_by_processor() -> None:
    """Have all that looks at the time look at this process's share of a processor from here on,
    also where a module has the clock under its own name."""
    clock = time.monotonic
    time.monotonic = processor_s
    for name, module in list(sys.modules.items()):
        if name.startswith("timeprest.") and vars(module).get("monotonic") is clock:
            module.monotonic = processor_s  # type: ignore[attr-defined]


def compared(case: Case, seconds: float, climb: float) -> Found:
    """Plan it both ways."""
    cluster = cluster_of(case)
    asked, began = question_of(case, cluster), processor_s()
    period_s, bound_s, proven, stopped = math.inf, 0.0, False, "no plan fits"
    try:
        plan = solve(asked.profile, cluster, case.system, time_limit_s=seconds, **options_of(case))
        report = plan.solver
        period_s, bound_s = plan.predicted.period_s, report.bound_s
        proven, stopped = report.optimal, report.stopped or ""
    except (InfeasibleError, PlanError):
        pass
    except Exception as error:
        stopped = f"failed: {error!r:.200}"
    spent = processor_s() - began
    climbers = climbs_of(case, asked)
    others = [x for c in climbers if (x := c.run(climb / len(climbers))) is not None]
    other = min(others, key=lambda x: x.prediction.period_s, default=None)
    found = math.inf if other is None else other.prediction.period_s
    shape = "" if other is None else shape_of(other.stages, other.micro_batches)
    return Found(
        period_s, bound_s, proven, spent, stopped, found, sum(c.tried for c in climbers), shape
    )


def climbs_of(case: Case, asked: Question) -> list[Climb]:
    """With what the search may choose."""
    several = case.per_device > 1
    within, counts = StalenessBounds(case.run_ahead), micro_batch_counts(asked, case.micro_batches)
    ranges = limit_ranges(asked.system, case.stages, several=several, within=within)
    alone = [(d,) for d in case.device_of]
    climbs = [Climb(asked, alone, counts, recompute=case.recompute, ranges=ranges)]
    for sequence in sequences(case) if case.replicas else ():
        cluster = cluster_in_sequence(asked.cluster, sequence)
        there = replace(asked, cluster=cluster)
        climbs.append(ReplicaClimb(there, counts, recompute=case.recompute, within=within))
    return climbs


def sequences(case: Case) -> list[tuple[int, ...]]:
    """Of devices, those that climbs take them in: as listed; where plans may have any, from the
    last one to the first, too, and the first machine's around the others."""
    listed = tuple(range(case.devices))
    if not case.kinds:
        return [listed]
    mine = machine_sizes(case.kinds)[0]
    half = mine // 2
    return [listed, listed[::-1], (*listed[half:mine], *listed[mine:], *listed[:half])]


def shape_of(stages: Sequence[PlanStage], micro_batches: int) -> str:
    """Its cut, limits and N."""
    layers = " ".join(f"{len(stage.nodes)}{'r' * bool(stage.recompute)}" for stage in stages)
    limits = " ".join(str(stage.in_flight) for stage in stages)
    return f"N {micro_batches}, layers {layers}, limits {limits}"


# The page -----------------------------------------------------------------------------------------

HEADINGS = ("number", "question", "period (ms)", "gap", "seconds", "climb (ms)", "climb longer by")
RESULTS = (
    "questions",
    "with a plan",
    "beaten",
    "by at most",
    "better than the climb's",
    "proven best",
    f"gap over {WIDE:.0%}",
    "seconds: median",
    "95th percentile",
)


def row(case: Case, found: Found) -> str:
    """A line of the page's table."""

    def shown(seconds: float) -> str:
        return "none fits" if math.isinf(seconds) else f"{1e3 * seconds:.5g}"

    gap = "0" if found.proven else "" if math.isinf(found.period_s) else f"{found.gap:.1%}"
    both = not math.isinf(found.period_s) and not math.isinf(found.climb_s)
    longer = f"{found.climb_s / found.period_s - 1:+.1%}" if both else ""
    cells = [str(case.number), str(case), shown(found.period_s), gap, f"{found.seconds:.1f}"]
    return f"| {' | '.join([*cells, shown(found.climb_s), longer])} |"


def wide(found: Found) -> bool:
    """Whether there is a plan, far from its bound."""
    return not math.isinf(found.period_s) and found.gap > WIDE


def results(all_found: Sequence[Found]) -> str:
    """A table of one line: what came of all of them; shares are of those with a plan."""
    fits = [f for f in all_found if not (math.isinf(f.period_s) and math.isinf(f.climb_s))]
    plans = [f for f in fits if not math.isinf(f.period_s)]
    worse = [f.beaten for f in fits if f.beaten > SAME]
    better = sum(f.beaten < -SAME for f in fits)
    seconds = sorted(f.seconds for f in all_found)
    late = seconds[min(math.ceil(0.95 * len(seconds)), len(seconds)) - 1]
    total = max(len(plans), 1)
    counts = [len(all_found), len(fits), len(worse)]
    cells = [*map(str, counts), f"{max(worse, default=0):.1%}", str(better)]
    cells += [f"{sum(f.proven for f in plans) / total:.0%}", f"{sum(map(wide, plans)) / total:.0%}"]
    cells += [f"{statistics.median(seconds):.1f}", f"{late:.1f}"]
    return markdown(RESULTS, [cells])


def by_system(cases: Sequence[Case], all_found: Sequence[Found]) -> str:
    """A table: where gaps are wide and plans are beaten, most wide ones first."""
    rows: dict[str, list[int]] = {}
    for case, found in zip(cases, all_found, strict=True):
        counts = rows.setdefault(case.system, [0, 0, 0])
        for k, one in enumerate((True, wide(found), found.beaten > SAME)):
            counts[k] += one
    ordered = sorted(rows.items(), key=lambda item: (-item[1][1], item[0]))
    cells = [[f"`{system}`", *map(str, counts)] for system, counts in ordered]
    return markdown(("system", "questions", f"gap over {WIDE:.0%}", "beaten"), cells)


def page(cases: Sequence[Case], all_found: Sequence[Found], seconds: float, climb: float) -> str:
    """The page's text."""
    head = (DOCS / "planner_battery.head.md").read_text(encoding="utf-8")
    both = list(zip(cases, all_found, strict=False))
    told = [row(case, found) for case, found in both if wide(found) or found.beaten > SAME]
    return head.format(
        machine=machine(),
        seconds=f"{seconds:g}",
        climb=f"{climb:g}",
        results=results(all_found),
        systems=by_system([case for case, _ in both], all_found),
        rows="\n".join([*head_of(HEADINGS), *told]),
    )


def main() -> None:
    """Run the cases, write the page."""
    parser = argparse.ArgumentParser(description="Hold everyday plans against a hill climb.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="cases whose lines have them all")
    parser.add_argument("--uneven", action="store_true", help="questions that are drawn otherwise")
    parser.add_argument("--replicas", action="store_true", help="questions with replicas")
    parser.add_argument("--rented", action="store_true", help="on machines that people rent")
    parser.add_argument("--sample", type=int, help="so many, drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--seconds", type=float, default=30.0, help="for a search")
    parser.add_argument("--climb", type=float, default=12.0, help="seconds for a climb")
    parser.add_argument("--numbers", help="of cases, with commas")
    parser.add_argument("--beaten", type=Path, help="where lines to repeat beaten plans go")
    parser.add_argument("--page", type=Path)
    asked = parser.parse_args()
    others = {uneven: asked.uneven, replicated: asked.replicas, rented: asked.rented}
    draw = next((draw for draw, wanted in others.items() if wanted), drawn)
    cases = [draw(number) for number in range(COUNT)]
    if asked.numbers:
        cases = [draw(int(number)) for number in asked.numbers.split(",")]
    cases = [case for case in cases if all(word in str(case) for word in asked.words)]
    if asked.sample:
        cases = random.Random(asked.seed).sample(cases, min(asked.sample, len(cases)))
    whole = not (asked.words or asked.sample or asked.numbers) and draw is drawn
    path = asked.page or (DOCS / "planner_battery.md" if whole else None)
    for model in {case.model for case in cases}:
        profile_of(model)
    go_by_processor()
    all_found: list[Found] = []
    for case in cases:
        found = compared(case, asked.seconds, asked.climb)
        all_found.append(found)
        line = row(case, found)
        print(line, found.stopped, flush=True)
        if found.beaten > SAME and asked.beaten:
            with asked.beaten.open("a", encoding="utf-8") as file:
                lines = [line, command_line(case, asked.seconds), f"climb: {found.shape}"]
                file.write("\n".join([*lines, ""]) + "\n")
        if path:
            path.write_text(page(cases, all_found, asked.seconds, asked.climb), encoding="utf-8")
    print(results(all_found))


if __name__ == "__main__":
    main()
