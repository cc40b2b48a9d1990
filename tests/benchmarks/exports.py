"""Our cuts beside those that other engines make by default: simulated periods of ten models.

    python tests/benchmarks/exports.py

prints the table of docs/exporting.md. It reckons with a data sheet, so nothing is measured; where a
time limit ends a search, a slower machine may end with another plan.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import timeprest
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.cluster.contention import with_contention
from timeprest.planner.evaluate import Question, evaluate, make_plan
from timeprest.planner.exports.blocks import blocks_of, list_of
from timeprest.planner.plan import Plan, PlanStage, SolverReport
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


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


if __name__ == "__main__":
    compare_cuts()
