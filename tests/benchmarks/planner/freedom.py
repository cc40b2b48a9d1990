"""Questions asked twice, with more freedom and with less: `make bench-freedom`.

    python -m timeprest.tests.benchmarks.planner.freedom [--count 40] [--seconds 20] [KIND ...]

Of each pair one question allows all that the other one does, and something more: replicas, any
number of stages, a device that may be left out, more memory. So its plan may be no slower, and no
bound of its may be above what the other one found. Cases are those of the `battery`, and times are
of this process's share of a processor, too.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from timeprest.planner.cluster.headroom import Headroom
from timeprest.planner.search.defaults import best_plan
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import InfeasibleError, PlanError
from timeprest.tests.benchmarks.planner.battery import (
    SAME,
    TIED,
    Case,
    cluster_of,
    drawn,
    go_by_processor,
    processor_s,
    profile_of,
)

MOST_DEVICES = 16
COUNT = 40
WORSE = 0.005
"""A period that is longer by more counts as worse."""


@dataclass(frozen=True)
class Asked:
    """A question.

    Attributes:
        case: model, system and devices; the rest of it doesn't count.
        options: as `best_plan` takes them; what isn't there is left open.
        share: of the seconds for a search.
    """

    case: Case
    options: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0

    def having(self, **options: Any) -> Asked:
        """With these options, too."""
        return replace(self, options={**self.options, **options})

    def on(self, **changes: Any) -> Asked:
        """On other devices."""
        return replace(self, case=replace(self.case, **changes))


class Pair(NamedTuple):
    """The first question allows all that the second one does."""

    kind: str
    freer: Asked
    narrower: Asked


class Answer(NamedTuple):
    """Infinite period: nothing was found to fit, or can be asked for; then `words` say why.

    Attributes:
        words: else what ended the search, where it isn't proven.
        shape: the plan, for people.
    """

    period_s: float
    bound_s: float
    seconds: float
    words: str
    shape: str = ""


Making = Callable[[Asked, random.Random], tuple[Asked, Asked] | None]
"""A pair from a question with everything left open; None: the system has no such choice."""


def _replicas(asked: Asked, _: random.Random) -> tuple[Asked, Asked]:
    return asked, asked.having(replicas=False)


def _stages(asked: Asked, _: random.Random) -> tuple[Asked, Asked]:
    return asked, asked.having(replicas=False, stages=asked.case.devices)


def _count(asked: Asked, _: random.Random) -> tuple[Asked, Asked]:
    alone = asked.having(replicas=False)
    return alone, alone.having(stages=max(asked.case.devices // 2, 1))


def _micro_batches(asked: Asked, rng: random.Random) -> tuple[Asked, Asked] | None:
    if VARIANTS[asked.case.system].whole_mini_batches:
        return None
    return asked, asked.having(micro_batches=rng.choice((4, 8, 16, 32)))


def _recompute(asked: Asked, rng: random.Random) -> tuple[Asked, Asked] | None:
    if VARIANTS[asked.case.system].recompute_refusal:
        return None
    return asked.having(recompute="auto"), asked.having(recompute=rng.choice(("off", "on")))


def _tied(asked: Asked, rng: random.Random) -> tuple[Asked, Asked] | None:
    system = VARIANTS[asked.case.system]
    models = sorted(TIED - {"hf-t5"})
    tied = rng.choice(("together", "split") if system.flushes else ("together",))
    asked = asked.on(model=rng.choice(models), memory=None)
    return asked, asked.having(tied=tied)


def _sequence(asked: Asked, rng: random.Random) -> tuple[Asked, Asked]:
    second = rng.choice((0.5, 0.7, 2.0)), rng.choice((0.5, 1.0, 2.0))
    asked = asked.on(second=second, devices=min(asked.case.devices, 8))
    return asked, asked.having(sequence="listed")


def _per_device(asked: Asked, _: random.Random) -> tuple[Asked, Asked] | None:
    if VARIANTS[asked.case.system].placement != "any":
        return None
    asked = asked.on(devices=min(asked.case.devices, 4)).having(replicas=False)
    return asked.having(stages_per_device=None), asked.having(stages_per_device=1)


def _run_ahead(asked: Asked, _: random.Random) -> tuple[Asked, Asked] | None:
    if VARIANTS[asked.case.system].flushes:
        return None
    return asked.having(run_ahead="auto"), asked


def _devices(asked: Asked, _: random.Random) -> tuple[Asked, Asked]:
    return asked.on(devices=asked.case.devices + 1), asked


def _memory(asked: Asked, rng: random.Random) -> tuple[Asked, Asked] | None:
    memory = asked.case.memory
    if memory is None:
        memory = 16.0
    assert not isinstance(memory, str)
    asked = asked.on(memory=memory).having(replicas=rng.random() < 0.5)
    return asked.on(memory=memory * 1.25), asked


def _links(asked: Asked, rng: random.Random) -> tuple[Asked, Asked]:
    asked = asked.having(replicas=rng.random() < 0.5)
    return asked.on(bandwidth_bytes_per_s=2 * asked.case.bandwidth_bytes_per_s), asked


def _pins(asked: Asked, rng: random.Random) -> tuple[Asked, Asked]:
    layers = [layer.name for layer in profile_of(asked.case.model).layers]
    stage = rng.randrange(asked.case.devices)
    layer = layers[int((stage + 0.5) / asked.case.devices * len(layers))]
    asked = asked.having(replicas=rng.random() < 0.5)
    return asked, asked.having(pins=((layer, stage),))


def _time(asked: Asked, _: random.Random) -> tuple[Asked, Asked]:
    return asked, replace(asked, share=1 / 4)


KINDS: dict[str, Making] = {
    "replicas": _replicas,
    "stages": _stages,
    "count": _count,
    "micro-batches": _micro_batches,
    "recompute": _recompute,
    "tied": _tied,
    "sequence": _sequence,
    "per-device": _per_device,
    "run-ahead": _run_ahead,
    "devices": _devices,
    "memory": _memory,
    "links": _links,
    "pins": _pins,
    "time": _time,
}


def pair(number: int, kinds: Sequence[str]) -> Pair | None:
    """The pair with this number; None where its question hasn't its choice."""
    rng, kind = random.Random(f"freedom {number}"), kinds[number % len(kinds)]
    case = drawn(rng.randrange(10**6))
    if case.devices == 1 or case.devices > MOST_DEVICES:
        case = replace(case, devices=rng.choice((2, 3, 4, 6, 8)))
    if VARIANTS[case.system].placement != "any":
        case = replace(case, system=rng.choice(("timeprest", "pipedream", "pipedream-flush")))
    case = replace(case, per_device=1, placement="auto", second=None, micro_batches=None)
    if case.model == "hf-t5":
        case = replace(case, model="hf-vit")
    nbytes = cluster_of(case).devices[0].memory_bytes
    # Of the devices, whatever may be asked of them.
    case = replace(case, memory=None if nbytes is None else nbytes / 2**30)
    made = KINDS[kind](Asked(case).having(replicas=True), rng)
    return None if made is None else Pair(kind, *made)


def answer(asked: Asked, seconds: float) -> Answer:
    """Plan it."""
    case, began = asked.case, processor_s()
    options = {"tolerance": 0.0, "headroom": Headroom(), "sequence": "best", **asked.options}
    seconds *= asked.share
    try:
        plan = best_plan(
            profile_of(case.model), cluster_of(case), case.system, time_limit_s=seconds, **options
        )
    except InfeasibleError:
        return Answer(math.inf, 0.0, processor_s() - began, "none fits")
    except PlanError as error:
        return Answer(math.inf, 0.0, processor_s() - began, f"can't be: {error}")
    report = plan.solver
    shape = " ".join(
        f"{len(stage.nodes)}×{len(stage.devices)}{'r' * bool(stage.recompute)}"
        for stage in plan.stages
    )
    shape = f"N {plan.micro_batches}: {shape}, {' '.join(str(s.in_flight) for s in plan.stages)}"
    stopped = "" if report.optimal else report.stopped or ""
    spent = processor_s() - began
    return Answer(report.objective_s, report.bound_s, spent, stopped, shape)


def verdict(freer: Answer, narrower: Answer) -> str:
    """What is wrong with a pair's answers; empty: nothing."""
    if math.isinf(narrower.period_s) or freer.words.startswith("can't be"):
        return ""
    if math.isinf(freer.period_s):
        return "NONE FITS"
    if freer.bound_s > narrower.period_s * (1 + SAME):
        return f"BOUND {freer.bound_s / narrower.period_s - 1:.2%} above"
    if freer.period_s > narrower.period_s * (1 + WORSE):
        return f"SLOWER by {freer.period_s / narrower.period_s - 1:.2%}"
    return ""


def main() -> None:
    """Ask all pairs."""
    parser = argparse.ArgumentParser(description="Hold questions against freer ones.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--count", type=int, default=COUNT, help="pairs")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seconds", type=float, default=20.0, help="for a search")
    asked = parser.parse_args()
    kinds = asked.kinds or list(KINDS)
    numbers = range(asked.first, asked.first + asked.count)
    pairs = [(number, found) for number in numbers if (found := pair(number, kinds)) is not None]
    ask = cache(lambda key: answer(known[key], asked.seconds))
    known = {repr(each): each for _, found in pairs for each in found[1:]}
    go_by_processor()
    wrong = 0
    for number, (kind, freer, narrower) in pairs:
        wide, narrow = ask(repr(freer)), ask(repr(narrower))
        said = verdict(wide, narrow)
        wrong += bool(said)
        print(f"{number} {kind}: {narrower.case} {dict(narrower.options)}")
        for each in (wide, narrow):
            print(
                f"    {1e3 * each.period_s:.6g} ms, bound {1e3 * each.bound_s:.6g}, "
                f"{each.seconds:.1f} s, {each.words or 'proven'}; {each.shape}"
            )
        print(f"    {said or 'fine'}", flush=True)
    print(f"{len(pairs)} pairs, {wrong} wrong")


if __name__ == "__main__":
    main()
