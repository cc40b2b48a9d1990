"""Schedules: which operations each stage runs, in which sequence. Decided before the run.

A schedule is a pure function of the pipeline; timing jitter never changes it, so runs repeat.

In-flight limits count mini-batches whose forward has begun and whose backward isn't done at a
stage. What they mean differs from rule to rule, with D stages behind a stage:

- nf1b: a forward of a new mini-batch waits for room. The papers have D + 1 = S - s at most; up to
  1 + 2·D make sense, as room for messages under way.
- 1f1b: the mini-batches whose forward runs before the first backward. From 1 to D + 1: nothing
  comes back earlier than after the D stages behind.
- 1f1b-micro: D + 1 micro-batches run forward before the first backward, N ≥ S of them make a
  mini-batch; so at most two mini-batches are in flight, one on the last stage.
- 1f1b-deep: D + 1 micro-batches run forward before the first backward, however many make a
  mini-batch; fewer where the limit L leaves room for (L − 1)·N of them. From 1 to D + 1.
- gpipe, 1f1b-flush, 1f1b-split: the pipeline drains before the next mini-batch begins: exactly one.

Where 1F1B goes by micro-batches and stages have replicas, each replica runs as many forwards before
its first backward as there are devices from its stage on for each of its stage's, rounded up: the
number that PipeDream keeps active (1806.03377, section 3.2), D + 1 where all stages have one.

Where devices have several stages, systems without a flush go by the list schedule of `nf1b`, those
whose backward takes a micro-batch by that of `list_schedule`, under the same limits; but those that
say what devices do (`interleaved`, `v_shaped`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..simulator.pipeline import Pipeline
from ..systems.operations import B, F, Pattern, Row, Rows, Schedule, U, W, numbered_schedule
from ..systems.variants import ScheduleRule, Variant
from .interleaved import rows_of
from .list_schedule import MicroBatchScheduler
from .nf1b import ListScheduler
from .v_shaped import v_shaped
from .zero_bubble import postponed

Ranges = tuple[tuple[int, int], ...]
"""Per stage, the least and the most."""

RUN_AHEAD = ("paper", "auto")
"""Stages run as far ahead as the papers have it, or as far as it pays."""


@dataclass(frozen=True)
class StalenessBounds:
    """How far stages may run ahead, and with it how old weights become.

    Attributes:
        run_ahead: one of RUN_AHEAD. "paper": a stage has no more mini-batches in flight than stages
            from it on, S - s, PipeDream's number and that of TiMePReSt's figures. "auto": as many
            as make sense.
        max_in_flight: no stage's limit is above it; None: only `run_ahead` bounds them.
        max_delay: nor are its gradients later, whether weights are stashed or not.
        max_difference: nor its version difference; None: there is no bound. An L of k·(it) + 1
            keeps to it, k mini-batches having an update: no more backwards than L - 1 come between
            a mini-batch's forward and its own. More may, but where every stage fills up to L.
    """

    run_ahead: str = "paper"
    max_in_flight: int | None = None
    max_difference: int | None = None
    max_delay: int | None = None

    def late(self, variant: Variant) -> int | None:
        """What a system's stages may be late at the most, in updates, by either; None: anything."""
        stashed = variant.backward_weights == "forward"
        bounds = (None if stashed else self.max_difference, self.max_delay)
        return min((most for most in bounds if most is not None), default=None)


PAPER_STALENESS, ANY_STALENESS = StalenessBounds(), StalenessBounds("auto")
"""What the papers have, and whatever makes sense to a schedule."""


def limit_ranges(
    variant: Variant,
    stages: int,
    *,
    several: bool = False,
    within: StalenessBounds = ANY_STALENESS,
    update_every: int = 1,
) -> Ranges:
    """The in-flight limits that make sense at each stage; equal where there is no choice.

    Within them limits must not rise along the pipeline.

    Where devices have several stages, no paper has a schedule without a flush. Stages stay what
    they are there, so the papers' limit is S - s of all stages. No such pipeline waits for ever:
    what has been in flight for longest may always go on. But it idles for longer, up to a fifth of
    the period of equal stages, as mini-batches wait at each stage for the device's others, too.

    Args:
        several: devices have several stages.
        within: no larger ones than that allows; but the least that a system has.
        update_every: mini-batches per update.
    """
    if variant.order is not None:
        return tuple((limit, limit) for limit in variant.order.limits)
    behind = range(stages - 1, -1, -1)
    if variant.schedule == "1f1b-micro":
        return tuple((2, 2) if d else (1, 1) for d in behind)
    if variant.schedule not in ("nf1b", "1f1b", "1f1b-deep"):
        return ((1, 1),) * stages
    waits = variant.schedule == "nf1b" or (several and variant.schedule == "1f1b")
    each = 2 if waits and within.run_ahead == "auto" else 1
    most = within.max_in_flight or 1 + each * stages
    late = within.late(variant)
    if variant.schedule == "1f1b" and not several and late is not None:
        most = min(most, update_every * late + 1)
    return tuple((1, min(1 + each * d, most)) for d in behind)


def make_schedule(pipeline: Pipeline, mini_batches: int) -> Schedule:
    """The schedule of all stages for a run of `mini_batches`, from first forward to last update.

    What belongs to these in a run without an end: as it drains, a stage that had time for more
    forwards would hold more than in the steady state, which plans predict.
    """
    variant = pipeline.variant
    kinds: Sequence[Iterable[int]]
    turns: Sequence[Iterable[int]] = ()
    if is_patterned(pipeline):
        patterns = schedule_patterns(pipeline)
        kinds = kinds_by_stage(pipeline, patterns, mini_batches)
        if pipeline.placement:
            turns = [pattern.turns(mini_batches) for pattern in patterns]
    else:
        # No stage gets further ahead until all have updated so often.
        scheduler = list_scheduler(pipeline, mini_batches + 2 * max(pipeline.limits))
        scheduler.run(mini_batches)
        kinds, turns = scheduler.kinds, scheduler.turns
    return numbered_schedule(
        kinds,
        turns,
        pipeline.micro_batches,
        micro=variant.backward_unit == "micro",
        mini_batches=mini_batches,
        update_every=pipeline.update_every,
        reverse=variant.order is not None and variant.order.reverse,
    )


# Schedules that don't repeat with every mini-batch ----------------------------------------------


def list_scheduler(pipeline: Pipeline, mini_batches: int) -> ListScheduler | MicroBatchScheduler:
    """What makes the schedule, for pipelines that aren't patterned."""
    if pipeline.variant.backward_unit == "mini":
        return ListScheduler(pipeline, mini_batches)
    return MicroBatchScheduler(pipeline, mini_batches, _ahead(pipeline, 1))


def _ahead(pipeline: Pipeline, more: int = 0) -> list[int]:
    """Per stage, the micro-batches that 1F1B runs ahead of the first backward, and so many more of
    each replica."""
    found = []
    devices = 0
    for s in range(pipeline.stages - 1, -1, -1):
        r = pipeline.replicas(s)
        devices += r
        # Falls from stage to stage, so that none waits for what comes after its own message there.
        found.append((-(-devices // r) - 1 + more) * r)
    return found[::-1]


# Schedules that do ------------------------------------------------------------------------------


def is_patterned(pipeline: Pipeline) -> bool:
    """Whether the schedule repeats with every mini-batch."""
    return has_pattern(pipeline.variant, several=bool(pipeline.placement))


def has_pattern(variant: Variant, *, several: bool = False) -> bool:
    """Whether a system's schedules repeat with every mini-batch; else a list schedule makes them.

    Args:
        several: devices have several stages.
    """
    if variant.order is not None or (several and variant.flushes):
        return True
    return not several and (variant.schedule in PATTERNS or variant.schedule in ROWS)


def has_row(variant: Variant) -> bool:
    """Whether devices with several stages run the same whatever operations take."""
    return variant.schedule in ROWS and not variant.split_backward


def schedule_patterns(pipeline: Pipeline) -> tuple[Pattern, ...]:
    """Per device its pattern. Of pipelines that are patterned."""
    variant, n = pipeline.variant, pipeline.micro_batches
    if variant.order is not None:
        return variant.order.patterns
    if pipeline.placement or variant.schedule in ROWS:
        rows = ROWS.get(variant.schedule, _flushed)(pipeline)
        return tuple(Pattern((_with_updates(*row),) * 2) for row in rows)
    make = PATTERNS[variant.schedule]
    found = [
        make(n, ahead, limit)
        for ahead, limit in zip(_ahead(pipeline), pipeline.limits, strict=True)
    ]
    if variant.split_backward:
        unsplit = [further.replace(W, b"").replace(U, b"") for _, further in found]
        found = [(kinds + U, kinds + U) for kinds in postponed(pipeline, unsplit)]
    return tuple(
        Pattern(tuple((kinds, (s,) * len(kinds)) for kinds in both)) for s, both in enumerate(found)
    )


def kinds_by_stage(
    pipeline: Pipeline, patterns: Sequence[Pattern], updates: int
) -> tuple[bytes, ...]:
    """Per stage, kinds of its operations up to so many updates."""
    if not pipeline.placement:
        return tuple(pattern.kinds(updates) for pattern in patterns)
    found = [bytearray() for _ in range(pipeline.stages)]
    for pattern in patterns:
        for kind, s in zip(pattern.kinds(updates), pattern.turns(updates), strict=True):
            found[s].append(kind)
    return tuple(map(bytes, found))


def _with_updates(kinds: bytes, turns: tuple[int, ...]) -> Row:
    """With those of all the device's stages at the end."""
    stages = tuple(sorted(set(turns)))
    return kinds + U * len(stages), turns + stages


def _flushed(pipeline: Pipeline) -> Rows:
    """A mini-batch of systems that flush, by the list schedule."""
    variant, n = pipeline.variant, pipeline.micro_batches
    keep = [n] * pipeline.stages if variant.forwards_first else _ahead(pipeline, 1)
    if variant.split_backward:
        # As much as its fullest stage keeps in 1F1B, as with a stage for each device.
        keep = [max(keep)] * pipeline.stages
    scheduler = MicroBatchScheduler(pipeline, 1, keep)
    scheduler.run(1)
    return scheduler.rows()


def _gpipe(n: int, ahead: int, limit: int) -> tuple[bytes, bytes]:
    """All forwards of a mini-batch, then all its backwards."""
    mini_batch = F * n + B * n + U
    return mini_batch, mini_batch


def _flushed_one_by_one(n: int, ahead: int, limit: int) -> tuple[bytes, bytes]:
    """1F1B within a mini-batch (PipeDream-Flush)."""
    ahead = min(ahead, n - 1)
    mini_batch = F * ahead + (F + B) * (n - ahead) + B * ahead + U
    return mini_batch, mini_batch


def _mini_one_by_one(n: int, ahead: int, limit: int) -> tuple[bytes, bytes]:
    """Each stage fills up to its in-flight limit, then takes turns (PipeDream, section 3.2)."""
    return F * limit + B + U, F + B + U


def _micro_one_by_one(n: int, ahead: int, limit: int) -> tuple[bytes, bytes]:
    """As deep as the pipeline behind the stage, in micro-batches (PipeDream-2BW)."""
    ahead = min(ahead, n - 1)
    further = (F + B) * n + U
    return F * ahead + further, further


def _deep_one_by_one(n: int, ahead: int, limit: int) -> tuple[bytes, bytes]:
    """The same across as many mini-batches as it takes, and as the limit allows (PipeMare)."""
    further = (F + B) * n + U
    return F * min(ahead, (limit - 1) * n) + further, further


def _split_one_by_one(n: int, ahead: int, limit: int) -> tuple[bytes, bytes]:
    """1F1B within a mini-batch, backwards in two parts; `zero_bubble` moves the second ones."""
    ahead = min(ahead, n - 1)
    mini_batch = F * ahead + (F + B + W) * (n - ahead) + (B + W) * ahead + U
    return mini_batch, mini_batch


PATTERNS: dict[ScheduleRule, Callable[[int, int, int], tuple[bytes, bytes]]] = {
    "gpipe": _gpipe,
    "1f1b": _mini_one_by_one,
    "1f1b-flush": _flushed_one_by_one,
    "1f1b-split": _split_one_by_one,
    "1f1b-micro": _micro_one_by_one,
    "1f1b-deep": _deep_one_by_one,
}
"""Where each stage has a device of its own, kinds up to the first update and of each further
mini-batch: from N, the micro-batches that 1F1B has ahead of the first backward, and the stage's
limit."""

ROWS: dict[ScheduleRule, Callable[[Pipeline], Rows]] = {
    "interleaved": lambda pipeline: rows_of(pipeline.stages_of, pipeline.micro_batches),
    "v-shaped": v_shaped,
}
"""Of systems that say what a device with several stages does: per device, a mini-batch's row."""
