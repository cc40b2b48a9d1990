"""Our cuts beside those that other engines make by default.

    python tests/benchmarks/exports.py
    python tests/benchmarks/exports.py --run [--rounds 5] [--steps 6] [--only NAME]

The first prints the simulated periods of ten models in docs/exporting.md. It reckons with a data
sheet, so nothing is measured; where a time limit ends a search, a slower machine may end with
another plan. The second exports such plans of four models, for what was measured here, to torch's
pipelining, and runs them in turns in two processes: how long its mini-batches take, and what we
had predicted. It wants an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import timeprest
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.cluster.contention import with_contention
from timeprest.planner.evaluate import evaluate, make_plan
from timeprest.planner.exports.blocks import blocks_of, list_of
from timeprest.planner.plan import Plan, PlanStage, SolverReport
from timeprest.planner.question import Question
from timeprest.profiles.profile import Profile

VARIANT = "pipedream-flush"

DEVICE = "a100-80gb"
CUTS = (
    ("GPT-2", "gpt2:tied=0,length=1024", 2),
    ("GPT-2 medium", "gpt2:layers=24,width=1024,heads=16,tied=0,length=1024", 2),
    ("BERT-base", "bert-base:tied=0,length=512", 4),
    ("BERT-large", "bert-large:tied=0,length=512", 4),
    ("AlexNet", "alexnet", 32),
    ("VGG-16", "vgg16", 16),
    ("ResNet-50", "resnet50", 16),
    ("ResNet-152", "resnet152", 16),
    ("DenseNet-121", "densenet121", 16),
    ("GNMT", "gnmt:layers=8,width=1024,length=50", 32),
)
"""Name, target, samples in a micro-batch."""

RUNS = (
    ("GPT-2", "gpt2:tied=0,dropout=0,length=64", "h.*", 1),
    ("AlexNet", "alexnet:size=112", "layer", 8),
    ("VGG-16", "vgg16:size=64", "layer", 4),
    ("ResNet-50", "resnet50:size=96", "layer*.*", 4),
)
"""Name, target, granularity, samples in a micro-batch."""


# Cuts that go by counts --------------------------------------------------------------------------


def even(names: Sequence[str], stages: int) -> list[tuple[str, ...]]:
    """As many layers on each stage, as far as that goes."""
    borders = [round(k * len(names) / stages) for k in range(stages + 1)]
    return [tuple(names[a:b]) for a, b in itertools.pairwise(borders)]


def torchtitans(names: Sequence[str], stages: int) -> list[tuple[str, ...]]:
    """What torchtitan takes where nobody says: as many blocks of the model's lists on each stage,
    what comes before them and what comes behind counting as a block each; where that doesn't come
    out even, the first stages have one more."""
    blocks = blocks_of(names)
    listed = list(dict.fromkeys(block for block in blocks if list_of(block) is not None))
    each, more = divmod(len(listed) + 2, stages)
    counts = [each + (s < more) for s in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    if min(counts) < 0:
        return [()] * stages
    of_block: dict[str, int] = {}
    left = iter(listed)
    for s, count in enumerate(counts):
        of_block.update((block, s) for block in itertools.islice(left, count))
    found: list[list[str]] = [[] for _ in range(stages)]
    last = max(k for k, block in enumerate(blocks) if block in of_block)
    s = 0
    for k, (name, block) in enumerate(zip(names, blocks, strict=True)):
        s = of_block.get(block, s) if k <= last else stages - 1
        found[s].append(name)
    return [tuple(part) for part in found]


def plan_of(
    profile: Profile, cut: Sequence[Sequence[str]], micro_batches: int, mini_batch: int
) -> Plan:
    """The plan with this cut, a device for each stage."""
    cluster = with_contention(uniform_cluster(len(cut)), profile.together)
    factor = profile.optimizer.state_bytes_per_parameter_byte
    question = Question(profile, cluster, VARIANT, mini_batch, factor)
    stages = tuple(
        PlanStage(nodes=tuple(names), devices=(s,), in_flight=1) for s, names in enumerate(cut)
    )
    report = SolverReport(
        method="by hand", objective_s=0, bound_s=0, gap=0, optimal=False, plans_tried=1, seconds=0
    )
    return make_plan(question, evaluate(question, stages, micro_batches), report)


def plans_of(profile: Profile, stages: int, micro_batches: int) -> dict[str, Plan]:
    """Ours, and those of other engines."""
    names = [layer.name for layer in profile.layers]
    found = {
        "ours": timeprest.plan(
            profile,
            devices=stages,
            variant=VARIANT,
            stages=stages,
            micro_batches=micro_batches,
            replicas=False,
            time_limit_s=60,
        )
    }
    for name, cut in (("even", even), ("torchtitan", torchtitans)):
        parts = cut(names, stages)
        if all(parts):
            found[name] = plan_of(profile, parts, micro_batches, profile.batch_size)
    return found


def compare_cuts() -> None:
    """The table of simulated periods."""
    print("| model | layers | stages | ours | bound | even split | torchtitan's | longer by |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    gains: dict[tuple[str, int], list[float]] = {}
    for name, target, micro_batch in CUTS:
        for stages in (4, 8):
            micro_batches = 2 * stages
            profile = timeprest.profile(
                target,
                device="meta",
                spec=DEVICE,
                batch_size=micro_batches * micro_batch,
                micro_batch_sizes=(micro_batch,),
            )
            plans = plans_of(profile, stages, micro_batches)
            ours = plans["ours"]
            period = ours.predicted.period_s
            cells, longer = [], []
            for other in ("even", "torchtitan"):
                if other not in plans:
                    cells.append("too few blocks")
                    longer.append("")
                    continue
                its = plans[other].predicted.period_s
                gains.setdefault((other, stages), []).append(its / period - 1)
                cells.append(_ms(its))
                longer.append(f"{its / period - 1:.0%}")
            bound = "proven" if ours.solver.optimal else _ms(ours.solver.bound_s)
            print(
                f"| {name} | {len(profile.layers)} | {stages} | {_ms(period)} | {bound} | "
                f"{cells[0]} | {cells[1]} | {', '.join(filter(None, longer))} |",
                flush=True,
            )
    for (other, stages), values in sorted(gains.items()):
        shorter = [1 - 1 / (1 + gain) for gain in values]
        print(
            f"{other}, {stages} stages: ours is shorter by {statistics.median(shorter):.0%} in the "
            f"median of {len(values)}, {min(shorter):.0%} to {max(shorter):.0%}"
        )


# In torch -----------------------------------------------------------------------------------------

PROCESSES = 2
# Freed memory is kept in our own processes, and plans reckon with that; torch's are given the same.
KEEP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_TOP_PAD_": str(2**26),
}
MICRO_BATCHES = 4
LONGEST_S = 1800


@dataclass(frozen=True)
class Raced:
    """A plan, where it was exported to, and seconds per mini-batch in each round."""

    cuts: tuple[str, ...]
    plan: Plan
    folder: Path
    seconds: list[float]


def race_in_torch(only: str | None, rounds: int, steps: int) -> None:
    """The table of what torch's mini-batches take."""
    print("| model | cut | simulated | torch | torch / simulated | ours is shorter by |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, target, granularity, micro_batch in RUNS:
        if only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for line in _raced(name, target, granularity, micro_batch, Path(folder), rounds, steps):
                print(line, flush=True)


def _raced(
    name: str,
    target: str,
    granularity: str,
    micro_batch: int,
    folder: Path,
    rounds: int,
    steps: int,
) -> Iterator[str]:
    profile = timeprest.profile(
        target,
        batch_size=MICRO_BATCHES * micro_batch,
        micro_batch_sizes=(micro_batch,),
        granularity=granularity,
    )
    plans = plans_of(profile, PROCESSES, MICRO_BATCHES)
    # A cut that two rules make is run once.
    of_cut: dict[tuple[str, ...], list[str]] = {}
    for rule, plan in plans.items():
        of_cut.setdefault(plan.stages[0].nodes, []).append(rule)
    raced = []
    for rules in of_cut.values():
        plan, where = plans[rules[0]], folder / rules[0]
        timeprest.export(plan, "torch", where)
        raced.append(Raced(tuple(rules), plan, where, []))
    for _ in range(rounds):
        for one in raced:
            one.seconds.append(_period_in_torch(one.folder, steps))
    ours = statistics.median(raced[0].seconds)
    for one in raced:
        found, simulated = statistics.median(one.seconds), one.plan.predicted.period_s
        spread = f"{_ms(min(one.seconds))} to {_ms(max(one.seconds))}"
        shorter = "" if one is raced[0] else f"{1 - ours / found:.0%}"
        yield (
            f"| {name} | {', '.join(one.cuts)}: from `{one.plan.stages[1].nodes[0]}` | "
            f"{_ms(simulated)} | {_ms(found)} ({spread}) | {found / simulated:.2f} | {shorter} |"
        )


def _period_in_torch(folder: Path, steps: int) -> float:
    """Median seconds of a run's mini-batches, without the first."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    options = ["--steps", str(steps + 1), "--losses", str(folder / "losses.json")]
    command = [sys.executable, *words, str(folder / "train.py"), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **KEEP}, timeout=LONGEST_S
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    seconds: list[float] = json.loads((folder / "losses.json").read_text())["seconds"]
    return statistics.median(seconds[1:])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="race the cuts in torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="mini-batches in a round")
    parser.add_argument("--only", choices=[name for name, *_ in RUNS])
    asked = parser.parse_args()
    if asked.run:
        race_in_torch(asked.only, asked.rounds, asked.steps)
    else:
        compare_cuts()
