"""Schedules: which operations each stage runs, in which sequence. Decided before the run.

A schedule is a pure function of the pipeline; timing jitter never changes it, so runs repeat.

In-flight limits count mini-batches whose forward has begun and whose backward isn't done at a
stage. What they mean differs from rule to rule, with D stages behind a stage:

- nf1b: a forward of a new mini-batch waits for room. From 1 to 1 + 2·D make sense: D + 1 keep
  every stage busy where messages take no time, the rest is room for messages under way.
- 1f1b: the mini-batches whose forward runs before the first backward. From 1 to D + 1: nothing
  comes back earlier than after the D stages behind.
- 1f1b-micro: D + 1 micro-batches run forward before the first backward, N ≥ S of them make a
  mini-batch; so at most two mini-batches are in flight, one on the last stage.
- gpipe, 1f1b-flush, 1f1b-split: the pipeline drains before the next mini-batch begins: exactly one.

Where 1F1B goes by micro-batches and stages have replicas, each replica runs as many forwards before
its first backward as there are devices from its stage on for each of its stage's, rounded up: the
number that PipeDream keeps active (1806.03377, section 3.2), D + 1 where all stages have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..simulator.pipeline import Pipeline
from ..systems.operations import B, F, Schedule, U, W, numbered
from ..systems.variants import ScheduleRule, Variant
from .nf1b import ListScheduler
from .zero_bubble import postponed

Ranges = tuple[tuple[int, int], ...]
"""Per stage, the least and the most."""


def limit_ranges(variant: Variant, stages: int) -> Ranges:
    """The in-flight limits that make sense at each stage; equal where there is no choice.

    Within them limits must not rise along the pipeline.
    """
    behind = range(stages - 1, -1, -1)
    if variant.schedule == "nf1b":
        return tuple((1, 1 + 2 * d) for d in behind)
    if variant.schedule == "1f1b":
        return tuple((1, 1 + d) for d in behind)
    if variant.schedule == "1f1b-micro":
        return tuple((2, 2) if d else (1, 1) for d in behind)
    return ((1, 1),) * stages


def make_schedule(pipeline: Pipeline, mini_batches: int) -> Schedule:
    """The schedule of all stages for a run of `mini_batches`, from first forward to last update."""
    variant, n = pipeline.variant, pipeline.micro_batches
    if variant.schedule not in PATTERNS:
        scheduler = ListScheduler(pipeline, mini_batches)
        scheduler.run(mini_batches)
        found: Iterable[Iterable[int]] = scheduler.kinds
    else:
        found = (pattern.kinds(mini_batches) for pattern in schedule_patterns(pipeline))
    return tuple(
        numbered(
            kinds,
            n,
            micro=variant.backward_unit == "micro",
            mini_batches=mini_batches,
            update_every=pipeline.update_every,
        )
        for kinds in found
    )


class Pattern(NamedTuple):
    """Kinds of one stage's operations in a schedule that repeats: those up to its first update, and
    those of each further mini-batch, up to its update."""

    first: bytes
    further: bytes

    def kinds(self, updates: int) -> bytes:
        """Up to so many updates, in a run without an end."""
        return self.first + self.further * (updates - 1) if updates else b""


def schedule_patterns(pipeline: Pipeline) -> tuple[Pattern, ...]:
    """Per stage its pattern, for the rules of `PATTERNS`."""
    make, n = PATTERNS[pipeline.variant.schedule], pipeline.micro_batches
    found: list[Pattern] = []
    devices = 0
    for s in range(pipeline.stages - 1, -1, -1):
        r = pipeline.replicas(s)
        devices += r
        # Falls from stage to stage, so that none waits for what comes after its own message there.
        ahead = (-(-devices // r) - 1) * r
        found.append(make(n, min(ahead, n - 1), pipeline.limits[s]))
    found.reverse()
    if pipeline.variant.split_backward:
        rows = [pattern.further.replace(W, b"").replace(U, b"") for pattern in found]
        found = [Pattern(kinds + U, kinds + U) for kinds in postponed(pipeline, rows)]
    return tuple(found)


def _gpipe(n: int, ahead: int, limit: int) -> Pattern:
    """All forwards of a mini-batch, then all its backwards."""
    mini_batch = F * n + B * n + U
    return Pattern(mini_batch, mini_batch)


def _flushed_one_by_one(n: int, ahead: int, limit: int) -> Pattern:
    """1F1B within a mini-batch (PipeDream-Flush)."""
    mini_batch = F * ahead + (F + B) * (n - ahead) + B * ahead + U
    return Pattern(mini_batch, mini_batch)


def _mini_one_by_one(n: int, ahead: int, limit: int) -> Pattern:
    """Each stage fills up to its in-flight limit, then takes turns (PipeDream, section 3.2)."""
    return Pattern(F * limit + B + U, F + B + U)


def _micro_one_by_one(n: int, ahead: int, limit: int) -> Pattern:
    """As deep as the pipeline behind the stage, in micro-batches (PipeDream-2BW)."""
    further = (F + B) * n + U
    return Pattern(F * ahead + further, further)


def _split_one_by_one(n: int, ahead: int, limit: int) -> Pattern:
    """The same with backwards in two parts; `zero_bubble` moves the second ones."""
    mini_batch = F * ahead + (F + B + W) * (n - ahead) + (B + W) * ahead + U
    return Pattern(mini_batch, mini_batch)


PATTERNS: dict[ScheduleRule, Callable[[int, int, int], Pattern]] = {
    "gpipe": _gpipe,
    "1f1b": _mini_one_by_one,
    "1f1b-flush": _flushed_one_by_one,
    "1f1b-split": _split_one_by_one,
    "1f1b-micro": _micro_one_by_one,
}
"""Rules whose schedules repeat with every mini-batch: from N, the micro-batches that 1F1B has ahead
of the first backward, and the stage's limit."""
