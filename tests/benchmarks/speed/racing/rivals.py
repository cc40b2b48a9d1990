"""Running a rival, and the search for its best settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from timeprest.profiles.errors import UserError

from ..contestants import Contestant
from ..cuts import balanced, further, neighbours
from ..report.records import Figures, StageFigures
from ..tasks import ALL_RACES
from .processes import DEEPSPEED, StuckError, deepspeed_folder, run_ranks
from .rank import RankSpec

LONGEST_S = 120.0
"""For one run; after that it is ended."""
MOST_MICRO_BATCHES = 16
WORSE = 2
"""Numbers of micro-batches in a row, each slower than the best, after which more aren't tried."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A rival's best settings for a model."""

    micro_batches: int
    cuts: tuple[int, ...]
    keep_memory: bool = True
    """Freed memory stays with its processes, as with ours; or as it comes."""
    fused: bool = False
    """Optimizers step with torch's fused kernel, as ours do; or by torch's own choice."""
    tried: dict[str, float] = {}
    """Seconds of a mini-batch, by settings."""


def choice_path(folder: Path, model: str, rival: str) -> Path:
    """Where a rival's settings are kept."""
    return folder / model / f"{rival}.choice.json"


def chosen(folder: Path, model: str, rival: str) -> Choice:
    """A rival's settings. Raises UserError where they weren't looked for yet."""
    path = choice_path(folder, model, rival)
    if not path.exists():
        raise UserError(f"{path}: isn't there; race {rival} too")
    return msgspec.json.decode(path.read_bytes(), type=Choice)


@dataclass(frozen=True)
class Length:
    """How long a run is, in mini-batches."""

    warm: int = 3
    timed: int = 10


def why_not(contestant: Contestant) -> str | None:
    """Why it can't run here; None: it can."""
    if contestant.kind == DEEPSPEED and not (deepspeed_folder() / "deepspeed").is_dir():
        return "DeepSpeed isn't installed (make bench installs it, where that is possible)"
    return None


def spec_of(contestant: Contestant, model: str, choice: Choice, length: Length) -> RankSpec:
    """What its ranks are to do."""
    return RankSpec(
        model=model,
        kind=contestant.kind,
        processes=contestant.processes,
        threads=contestant.threads,
        schedule=contestant.schedule,
        micro_batches=choice.micro_batches,
        cuts=choice.cuts,
        keep_memory=choice.keep_memory,
        fused=choice.fused,
        warm=length.warm,
        timed=length.timed,
        longest_s=LONGEST_S,
        computes_on=contestant.device,
    )


def race_rival(contestant: Contestant, model: str, choice: Choice, length: Length) -> Figures:
    """Run it once. Raises UserError when it fails."""
    found = run_ranks(spec_of(contestant, model, choice, length))
    # Processes that have nothing to do with each other make a mini-batch each in that time.
    made = contestant.processes if contestant.kind == "plain" else 1
    period = max(rank.period_s for rank in found) / made
    # Data parallelism: each rank knows its half's loss.
    told = [rank.losses for rank in found if rank.losses]
    losses = [sum(each) / len(each) for each in zip(*told, strict=True)]
    return Figures(
        period_s=period,
        samples_per_s=ALL_RACES[model].mini_batch / period,
        micro_batches=choice.micro_batches,
        cuts=tuple(map(str, choice.cuts)),
        stages=tuple(
            StageFigures(
                compute_s=rank.processor_s / made,
                idle_s=max(contestant.threads * rank.period_s - rank.processor_s, 0.0) / made,
                rss_bytes=rank.rss_bytes,
            )
            for rank in found
        ),
        losses=tuple(losses),
        sent_bytes=found[0].sent_bytes if contestant.processes > 1 else 0.0,
        foreign_share=0.0,
    )


class Search:
    """The trials of one rival on one model, of which the fastest wins."""

    def __init__(
        self, contestant: Contestant, model: str, tell: Callable[[str], None], length: Length
    ) -> None:
        self.contestant, self.model = contestant, model
        self.tell, self.length = tell, length
        self.found: list[tuple[float, Choice]] = []
        self.why = ""
        self.trials = 0
        self.begin = time.monotonic()

    def attempt(self, choice: Choice) -> float | None:
        """Run it once, for its seconds; what fails is told and forgotten.

        Raises StuckError where it came to no end: others would take as long.
        """
        text = _text(choice)
        self.trials += 1
        try:
            seconds = race_rival(self.contestant, self.model, choice, self.length).period_s
        except UserError as error:
            self.why = str(error)
            self.tell(f"  {self.contestant.name}, {text}: {error}")
            if isinstance(error, StuckError):
                raise
            return None
        self.found.append((seconds, choice))
        self.tell(f"  {self.contestant.name}, {text}: {seconds:.3f} s")
        return seconds

    def best(self) -> Choice:
        """The fastest so far. Raises UserError where all failed."""
        if not self.found:
            raise UserError(self.why)
        tried = {_text(choice): seconds for seconds, choice in self.found}
        _, choice = min(self.found, key=lambda pair: pair[0])
        return msgspec.structs.replace(choice, tried=tried)


def _text(choice: Choice) -> str:
    more = ", fused steps" if choice.fused else ""
    more += "" if choice.keep_memory else ", memory given back"
    return f"{choice.micro_batches} micro-batches, cuts {choice.cuts}{more}"


@cache
def _costs(model: str, count: int, device: str) -> list[float]:
    """Seconds of a mini-batch in every child of the model, in so many micro-batches."""
    (times,) = run_ranks(
        RankSpec(model=model, kind="times", micro_batches=count, computes_on=device)
    )
    pairs = zip(times.children_s, times.steps_s, strict=True)
    return [count * child + step for child, step in pairs]


def guess(
    contestant: Contestant, model: str, tell: Callable[[str], None], length: Length
) -> Choice:
    """The best balance of the fewest micro-batches; no race is run for it."""
    if contestant.stages == 1:
        return Choice(micro_batches=1, cuts=())
    count = counts(contestant, ALL_RACES[model].mini_batch)[0]
    cuts = balanced(
        _costs(model, count, contestant.device), contestant.stages, contestant.processes
    )
    return Choice(micro_batches=count, cuts=cuts)


def choose(
    contestant: Contestant, model: str, tell: Callable[[str], None], length: Length
) -> Choice:
    """Its best number of micro-batches with the best balance, then the cuts beside it and on from
    there, then the ways with freed memory and optimizer steps.

    Raises UserError where nothing runs.
    """
    search = Search(contestant, model, tell, length)
    try:
        _try_all(search)
    except StuckError as error:
        search.why = str(error)
        tell(f"  {contestant.name}: no more is tried")
    seconds = time.monotonic() - search.begin
    tell(f"{model} {contestant.name}: {search.trials} settings tried in {seconds:.0f} s")
    return search.best()


def _try_all(search: Search) -> None:
    contestant, model = search.contestant, search.model
    if contestant.stages == 1:
        search.attempt(Choice(micro_batches=1, cuts=()))
    else:
        children = worse = 0
        for count in counts(contestant, ALL_RACES[model].mini_batch):
            costs = _costs(model, count, contestant.device)
            children = len(costs)
            cuts = balanced(costs, contestant.stages, contestant.processes)
            seconds = search.attempt(Choice(micro_batches=count, cuts=cuts))
            if seconds is None:
                continue
            least = min(found for found, _ in search.found)
            worse = worse + 1 if seconds > least else 0
            if worse == WORSE:
                break
        first = search.best()
        for moved in neighbours(first.cuts, children):
            search.attempt(Choice(micro_batches=first.micro_batches, cuts=moved))
        # Downhill for as long as it goes down.
        cuts, best = first.cuts, search.best().cuts
        while (again := further(cuts, best, children)) is not None:
            search.attempt(Choice(micro_batches=first.micro_batches, cuts=again))
            cuts, best = best, search.best().cuts
    search.attempt(msgspec.structs.replace(search.best(), keep_memory=False))
    search.attempt(msgspec.structs.replace(search.best(), fused=True))


def counts(contestant: Contestant, mini_batch: int) -> list[int]:
    """Numbers of micro-batches to try: divisors of the mini-batch."""
    if contestant.micro_batches is not None:
        return [contestant.micro_batches]
    least = contestant.least_micro_batches()
    most = min(mini_batch, MOST_MICRO_BATCHES)
    return [n for n in range(least, most + 1) if not mini_batch % n]
