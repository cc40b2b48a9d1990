"""docs/accuracy.md: tables of what was predicted and measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import numpy as np
from timeprest.planner.engine_costs import EngineCosts
from timeprest.profiles.errors import FileError

from ..shared import around, markdown
from .calibrate import Calibration
from .others import Foretold, ccl_bench, titan
from .races import Raced, raced
from .rivals import naive_s, sailors_s
from .sailor import NOTHING, Run

DOCS = Path(__file__).resolve().parents[3] / "docs"

OURS = EngineCosts("tp-run")
"""A run of ours: nothing is as in other engines."""


class Step(NamedTuple):
    """A way to predict.

    Attributes:
        name: of its column.
        wants: what it has to know, for the table of what to measure.
    """

    name: str
    wants: str


STEPS = (
    Step("naive", "layers' times"),
    Step("Sailor's", "and a curve of each link's bandwidth: Sailor's own simulator"),
    Step("order", "the same: our simulator, as `tp-run` would run the plan"),
    Step("DeepSpeed's", "the same: the order in which DeepSpeed sends (`--engine deepspeed`)"),
    Step("receive", "and what a receive costs, by other runs of the cluster (`--receive`)"),
    Step("sums", "and how long sums of gradients take, by other runs (`[[all_reduce]]`)"),
)


class Judged(NamedTuple):
    """A run, and errors as shares of what was measured.

    Attributes:
        periods: by the names of STEPS, and "smaller", "elsewhere" for the last one with figures of
            smaller runs or of other clusters.
        memory: with figures of other runs; None: it wasn't measured.
        tensors: the same of tensors alone.
        known: whether other runs of its cluster say what messages, sums or memory cost there.
    """

    run: Run
    doubts: Mapping[str, str]
    periods: Mapping[str, float]
    memory: float | None
    tensors: float | None
    known: bool


def judged(calibration: Calibration) -> Iterator[Judged]:
    """Every run, by figures that it had no part in."""
    tables = calibration.tables
    for run in calibration.runs:
        reckoned = calibration.reckoned(run)
        figures = calibration.figures(run)
        seconds = {
            "naive": naive_s(tables, run),
            "order": reckoned.period_s(engine=OURS),
            "DeepSpeed's": reckoned.period_s(),
            "receive": reckoned.period_s(replace(figures, sync=1.0, sync_s=0.0)),
            "sums": reckoned.period_s(figures),
        }
        with suppress(FileError):  # of a link that only it asks for
            seconds["Sailor's"] = sailors_s(tables, run)
        for which in ("smaller", "elsewhere"):
            if any(len(other.stages) > 1 for other in calibration.known_by(run, which)):
                seconds[which] = reckoned.period_s(calibration.figures(run, which))
        memory = tensors = None
        if run.memory_bytes:
            memory = reckoned.memory_bytes(figures) / run.memory_bytes - 1
            tensors = reckoned.memory_bytes(NOTHING) / run.memory_bytes - 1
        errors = {name: found / run.period_s - 1 for name, found in seconds.items()}
        known = bool(calibration.known_by(run))
        yield Judged(run, calibration.doubts[run], errors, memory, tensors, known)


class Halves(NamedTuple):
    """Errors of runs that were judged by figures of half of all runs, in which they weren't."""

    draws: int
    periods: list[float]
    memory: list[float]


def halves(calibration: Calibration, draws: int = 20) -> Halves:
    """Half of the runs, drawn so many times, by the other half alone."""
    drawn, found = Random(0), Halves(draws, [], [])
    runs = sorted(calibration.runs, key=lambda run: run.name)
    for _ in range(draws if len(runs) > 7 else 0):
        drawn.shuffle(runs)
        judge, known = runs[: len(runs) // 2], runs[len(runs) // 2 :]
        half = Calibration(calibration.tables, judge, known)
        for run in judge:
            figures, reckoned = half.figures(run), half.reckoned(run)
            if "period" not in calibration.doubts[run]:
                found.periods.append(reckoned.period_s(figures) / run.period_s - 1)
            if run.memory_bytes and "memory" not in calibration.doubts[run]:
                found.memory.append(reckoned.memory_bytes(figures) / run.memory_bytes - 1)
    return found


class Spread(NamedTuple):
    """Of errors, without their signs."""

    runs: int
    median: float
    ninth: float
    worst: float

    @property
    def cells(self) -> tuple[str, ...]:
        """For a table."""
        return tuple(f"{share:.1%}" if self.runs else "–" for share in self[1:])


def spread(errors: Iterable[float]) -> Spread:
    """Median, 90th percentile and worst."""
    sizes = [abs(error) for error in errors]
    if not sizes:
        return Spread(0, 0.0, 0.0, 0.0)
    return Spread(len(sizes), median(sizes), float(np.percentile(sizes, 90)), max(sizes))


def page(found: list[Judged], drawn: Halves) -> str:
    """The whole text, from accuracy.head.md."""
    known = {name: spread for name, _, *spread in reversed(summary_rows(found, drawn))}
    wants = {"naive": "naive", "links": "DeepSpeed's", "sums": "sums"}
    wants["elsewhere"] = "other clusters"
    head = (DOCS / "accuracy.head.md").read_text(encoding="utf-8")
    head = head.format(
        shown="\n".join(by_run(found).splitlines()[:4]),
        tensors=known["tensors"][0],
        **{word: ", ".join(known[name][:2]) for word, name in wants.items()},
    )
    parts = [
        "## By what is known",
        summary(found, drawn),
        "Run by run, errors in percent (predicted over measured); ranks of a tensor-parallel group "
        "are one replica:",
        by_run(found),
        doubted(found),
        "## Two more sets",
        "Measurements without layers' times: what one run says of another, in "
        "`tests/benchmarks/accuracy/others.py` with sources. Neither names all that it ran with: "
        "torchtitan's report doesn't say how many micro-batches there were (its default is taken), "
        "CCL-Bench's scripts have changed since (the workload cards' batches are taken).",
        foretold([titan(), *ccl_bench()]),
        "## Runs of ours",
        "Of [benchmarks.md](benchmarks.md), two stages on two cores: medians over rounds of each "
        "system's newest plan, peaks of each stage and round. *shared*: devices with several "
        "stages, or two workers on a core. On a GPU plans' memory was 0 to 7 % too high "
        "([gpu.md](gpu.md)); there periods were of workers that shared a card, which plans don't "
        "reckon with.",
        own(list(raced())),
        "**Rounds of one plan differ by more than most of these errors**: `timeprest` on another "
        "machine, where peaks were 0 to 1.9 % too high:",
        markdown(["model", "planned (ms)", "two rounds (ms)"], ROUNDS),
        "**Where a mini-batch takes a few milliseconds**, as [the demo](first_steps.md#the-demo)'s "
        "does, what wakes workers up isn't in the plan. By their processor time, on a busy "
        "machine, one profile's plan had 11.4 ms, its two runs 11.3 and 12.1, another's 11.7, and "
        "12.0 and 11.6: what Python takes is in the plan, and the rest of the error is waiting.",
    ]
    return "\n\n".join(around(head, [part for part in parts if part])) + "\n"


ROUNDS = (
    ("vgg11", "158", "158, 177"),
    ("lstm", "233", "238, 260"),
    ("gpt", "197", "206, 200"),
    ("resnet50", "275", "281, 271"),
)
"""Of `timeprest`, on a machine of which there are no results."""


def summary(found: list[Judged], drawn: Halves) -> str:
    """What has to be known for what."""
    heads = ["", "what is known", "median", "90th", "worst"]
    return markdown(heads, summary_rows(found, drawn))


def summary_rows(found: list[Judged], drawn: Halves) -> list[list[str]]:
    """A way to predict, what it has to know, and its errors."""
    half = f"by figures of half of all runs alone, drawn {drawn.draws} times"
    rows = []
    for step in STEPS:
        rows.append([step.name, step.wants, *_spread_of(found, step.name).cells])
    for which, name in (("smaller", "smaller runs"), ("elsewhere", "other clusters")):
        known = _spread_of(found, which)
        rows.append([name, f"by figures of {name} alone, {known.runs} runs", *known.cells])
    rows.append(["halves", half, *spread(drawn.periods).cells])
    for name, wants, value in (
        ("tensors", "memory: tensors alone", "tensors"),
        ("memory", "and a process's own, and the allocator's share, by other runs", "memory"),
    ):
        errors = [
            error
            for j in found
            if "memory" not in j.doubts and (error := getattr(j, value)) is not None
        ]
        rows.append([name, wants, *spread(errors).cells])
    rows.append(["halves", f"memory: {half}", *spread(drawn.memory).cells])
    return rows


def _spread_of(found: list[Judged], way: str) -> Spread:
    """Of the periods that can be trusted."""
    return spread(j.periods[way] for j in found if way in j.periods and "period" not in j.doubts)


def by_run(found: list[Judged]) -> str:
    """A row for each run."""
    rows = []
    for j in found:
        run = j.run
        mark = "†" if "period" in j.doubts else ""
        memory = "" if j.memory is None else f"{j.memory:+.0%}"
        rows.append(
            [
                f"{run.name}{mark}",
                f"{len(run.stages)}×{run.replicas}×{run.groups[0][0].ranks}",
                f"{run.micro_batch}×{run.each}",
                f"{run.period_s:.3g} s",
                *(_percent(j.periods.get(step.name)) for step in STEPS),
                memory + ("†" if "memory" in j.doubts else ""),
            ]
        )
    return markdown(
        [
            *("run", "stages × replicas × ranks", "micro-batch × their count", "measured"),
            *(step.name for step in STEPS),
            "memory",
        ],
        rows,
    )


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{100 * error:+.1f}"


def doubted(found: list[Judged]) -> str:
    """What isn't counted, and why."""
    said = [
        f"{j.run.name}: {what} ({why})"
        for j in found
        for what, why in j.doubts.items()
        if what != "sync"
    ]
    text = f"†: not counted above. {'; '.join(said)}." if said else ""
    alone = ", ".join(j.run.name for j in found if not j.known)
    if alone:
        text += f" By their tables alone, as no other run is of their cluster: {alone}."
    return text.strip()


def foretold(found: list[Foretold]) -> str:
    """What one run says of another."""
    rows = [
        [
            each.what,
            each.by,
            f"{each.predicted:.3g}",
            ", ".join(f"{seen:.3g}" for seen in each.measured),
            f"{each.error:+.1%}",
        ]
        for each in found
    ]
    return markdown(["what", "known by", "predicted", "measured", "error"], rows)


def own(found: list[Raced]) -> str:
    """Our races, model by model."""
    rows = []
    for model in dict.fromkeys(each.model for each in found):
        for shared in (False, True):
            mine = [x for x in found if x.model == model and x.shared == shared]
            if mine:
                name = f"{model}, shared" if shared else model
                memory = spread(error for x in mine for error in x.memory)
                periods = spread(x.error for x in mine)
                rows.append([name, str(len(mine)), *periods.cells, *memory.cells])
    plain = [x for x in found if not x.shared]
    memory = spread(error for x in plain for error in x.memory)
    rows.append(
        ["all but shared", str(len(plain)), *spread(x.error for x in plain).cells, *memory.cells]
    )
    heads = ["model", "systems", "period: median", "90th", "worst"]
    return markdown([*heads, "peaks: median", "90th", "worst"], rows)
