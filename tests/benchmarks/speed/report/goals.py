"""What the runtime is meant to reach, held against what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..contestants import BASE, contestant_named
from .ratios import of_stages, over_runs, runs_of, speed_ratio
from .records import Held, Results, Round, held_of
from .tables import idle_of_bottleneck, names_in


class Goal(NamedTuple):
    """One of them, held against what was measured.

    Attributes:
        key: stays the same whatever is measured: reasons are looked up by it.
        what, wanted, found: for people.
    """

    key: str
    what: str
    wanted: str
    found: str
    reached: bool


SAME_COUNT = (
    ("gpipe@4", "tdp-gpipe@4"),
    ("pipedream-flush@4", "tdp-1f1b@4"),
    ("zb-v=tdp-zbv", "tdp-zbv"),
)
"""With as many micro-batches, the last with the same cuts too."""
OVER_ONE_THREAD = {"gpt": 1.85, "vgg11": 1.80}
OVER_1F1B = {"gpt": 1.25}
OVER_BEST = {"gpt": 1.0, "vgg11": 1.5}
SYSTEMS = ("timeprest", "pipedream", "timeprest+2", "pipedream+2")
"""Those at the end have two stages on each device, as torch's V schedules have."""
IDLE, PERIOD, BYTES = 0.05, 0.10, 0.05
FEWER_BYTES, FASTER = 0.90, 3.0
FIRST, LOSS = 5, 1e-3
"""Mini-batches whose losses are compared, and how far apart they may be: rounding grows from one
to the next, tenfold where a net has no normalisation."""
NORMALISED = ("resnet50",)
"""With BatchNorm, by micro-batch: other numbers of them are other trainings."""


def goals(results: Results) -> Iterator[Goal]:
    """All of them that were measured."""
    yield from _losses(results.rounds)
    if results.stages == 2:
        yield from _speeds(results.rounds)
    yield from _same_count(results.rounds)
    yield from _predictions(results.rounds)
    yield from _held(results.held)
    yield from _links(results)


def _losses(rounds: Sequence[Round]) -> Iterator[Goal]:
    """Synchronous contestants train as one thread does, but for rounding."""
    for model in dict.fromkeys(each.model for each in rounds):
        if model in NORMALISED:
            continue
        apart = {
            name: max(abs(one / other - 1) for one, other in pairs)
            for each in rounds
            if each.model == model and BASE in each.runs
            for name, run in each.runs.items()
            if name != BASE
            and contestant_named(name).synchronous
            and (
                pairs := list(zip(run.losses[:FIRST], each.runs[BASE].losses[:FIRST], strict=True))
            )
        }
        if apart:
            worst = max(apart, key=apart.__getitem__)
            what = f"{model}: first losses of {len(apart)} synchronous contestants are one thread's"
            found = f"within {apart[worst]:.1g} (`{worst}`)"
            key = f"{model}/losses"
            yield Goal(key, what, f"within {LOSS:g}", found, apart[worst] <= LOSS)


def _speeds(rounds: Sequence[Round]) -> Iterator[Goal]:
    for model, name in [(m, n) for m in OVER_ONE_THREAD for n in SYSTEMS]:
        wanted = [("one-thread", "one-thread", "one thread", OVER_ONE_THREAD[model])]
        one_by_one = _best(rounds, model, "tdp-1f1b")
        if one_by_one and model in OVER_1F1B:
            wanted.append(("1f1b", one_by_one, "torch's 1F1B", OVER_1F1B[model]))
        best = _best(rounds, model)
        if best:
            title = f"{best}, the best of torch's raced"
            wanted.append(("best-of-torch", best, title, OVER_BEST[model]))
        for key, over, title, least in wanted:
            found = speed_ratio(rounds, model, name, over)
            if found:
                what = f"{model}: `{name}` over {title}"
                reached = found.value >= least
                yield Goal(f"{model}/{name}/{key}", what, f"≥ {least}", str(found), reached)
        if name in names_in(rounds, model):
            idle = idle_of_bottleneck(rounds, model, name)
            what = f"{model}: `{name}`, idle share of the busiest stage"
            found_text = f"{idle:.1%}"
            yield Goal(f"{model}/{name}/idle", what, f"< {IDLE:.0%}", found_text, idle < IDLE)


def _best(rounds: Sequence[Round], model: str, start: str = "tdp-") -> str | None:
    """The fastest of those whose names begin so, with whatever micro-batches."""
    names = [name for name in names_in(rounds, model) if name.startswith(start)]
    ratios = {name: speed_ratio(rounds, model, name) for name in names}
    known = {name: ratio.value for name, ratio in ratios.items() if ratio}
    return max(known, key=known.__getitem__) if known else None


def _same_count(rounds: Sequence[Round]) -> Iterator[Goal]:
    for model in dict.fromkeys(each.model for each in rounds):
        for ours, theirs in SAME_COUNT:
            found = speed_ratio(rounds, model, ours, theirs)
            if found:
                what = f"{model}: `{ours}` over {theirs}"
                text = f"{found.value:.3f} ({found.least:.3f}–{found.most:.3f})"
                yield Goal(f"{model}/{ours}", what, "≥ 1", text, found.value >= 1)


def _predictions(rounds: Sequence[Round]) -> Iterator[Goal]:
    for model in dict.fromkeys(each.model for each in rounds):
        periods, speeds, peaks = {}, {}, {}
        for name in names_in(rounds, model):
            if contestant_named(name).kind != "ours":
                continue
            runs = runs_of(rounds, model, name)
            period = over_runs(runs, lambda run: run.period_s)
            periods[name] = (runs[-1].predicted_period_s or 0.0) / period - 1
            speed = speed_ratio(rounds, model, name)
            if speed and runs[-1].predicted_speedup:
                speeds[name] = runs[-1].predicted_speedup / speed.value - 1
            found = of_stages(runs, lambda stage: stage.peak_bytes)
            wanted = of_stages(runs[-1:], lambda stage: stage.predicted_bytes)
            if found and wanted:
                apart = [one / other - 1 for one, other in zip(wanted, found, strict=True)]
                peaks[name] = max(apart, key=abs)
        kinds = (
            ("period", PERIOD, periods),
            # Both of a round: whatever the machine did since the profile was made.
            ("speed over one thread", PERIOD, speeds),
            ("peak", BYTES, peaks),
        )
        for what, most, apart_by in kinds:
            if apart_by:
                worst = max(apart_by, key=lambda name: abs(apart_by[name]))
                within = sum(abs(value) <= most for value in apart_by.values())
                text = f"{within} of {len(apart_by)}; worst `{worst}` {apart_by[worst]:+.1%}"
                title = f"{model}: predicted {what} within {most:.0%} of measured, systems raced"
                reached = within == len(apart_by)
                yield Goal(f"{model}/predicted-{what.split()[0]}", title, "all", text, reached)


def _held(held: Sequence[Held]) -> Iterator[Goal]:
    """At equal limits; with those that the planner chose, beside it."""
    for model in dict.fromkeys(each.model for each in held):
        of = held_of(held, model, equal_limits=True)
        free = of | held_of(held, model, equal_limits=False)
        chain = ("v-timeprest", "timeprest", "timeprest-stashed")
        if not all(name in of for name in (*chain, "pipedream")):
            continue
        weights, chosen = (
            [sum(each[name].accounted_weight_bytes) for name in chain] for each in (of, free)
        )
        what = f"{model}: weight bytes {' ≤ '.join(chain)}, at equal limits"
        found = f"{_mebibytes(weights)}; at limits of the planner's choice {_mebibytes(chosen)}"
        found += "" if chosen == sorted(chosen) else ", in another order"
        reached = weights == sorted(weights)
        yield Goal(f"{model}/weight-bytes", what, "in this order", found, reached)
        share, chosen_share = (
            sum(each["timeprest"].accounted_bytes) / sum(each["pipedream"].accounted_bytes)
            for each in (of, free)
        )
        what = f"{model}: peak bytes of `timeprest` over `pipedream`'s, at equal limits"
        found = f"{share:.2f}; at limits of the planner's choice {chosen_share:.2f}"
        yield Goal(f"{model}/peak-bytes", what, "< 1", found, share < 1)


def _mebibytes(values: Sequence[int]) -> str:
    return ", ".join(f"{nbytes / 2**20:.0f}" for nbytes in values) + " MiB"


def _links(results: Results) -> Iterator[Goal]:
    slow = {run.contestant: run for run in results.links if run.rate == "100mbit"}
    if {"timeprest", "ddp"} <= slow.keys():
        ours, theirs = slow["timeprest"], slow["ddp"]
        fewer = 1 - ours.wire_bytes / theirs.wire_bytes
        faster = theirs.period_s / ours.period_s
        what, wanted = "100 Mbit/s: bytes fewer than data parallel's", f"≥ {FEWER_BYTES:.0%}"
        yield Goal("100mbit/bytes", what, wanted, f"{fewer:.1%}", fewer >= FEWER_BYTES)
        what = "100 Mbit/s: speed over data parallel's"
        yield Goal("100mbit/speed", what, f"≥ {FASTER}", f"{faster:.2f}", faster >= FASTER)
