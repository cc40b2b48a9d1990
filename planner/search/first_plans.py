"""The first plans of a large model: guesses that cut between blocks of layers alone.

A plan early gives every later step something to beat, and the user one to keep.
"""

from __future__ import annotations

import time
from itertools import product
from math import inf
from typing import NamedTuple

from ..partition.dp.blocks import Blocks, blocks
from ..partition.dp.identical_devices import identical_minimax
from ..partition.dp.identical_devices_by_target import identical_by_targets
from ..partition.dp.lattice import Lattice
from ..partition.dp.minimax import minimax_with_bound
from ..partition.flushed_period import period_of
from ..partition.one_by_one.any_replicas import least_kept_period
from ..partition.one_by_one.equal_replicas import least_period
from ..partition.problem import Cut, StageProblem
from ..partition.solve import DpSource
from .choices import Branch, InFlight, choice_of
from .keep_more import keep_more, likely_to_keep_more
from .limits import try_some
from .relaxed.places import Assumptions, fixed_in_flight
from .state import CLOSE, SOON_S, SearchState, is_late

MOST_BLOCKS = 200
"""The first guesses cut between so many blocks of layers."""

_FINER = 4
"""Where none of those fits, between up to so many times as many."""

_FINER_EQUAL = 4
"""With as many replicas for every stage, between so many times as many."""

_BLOCKS_SHARE = 0.25
"""Of the time, for the first guesses."""

_ROOM = 0.995
"""Of the memory, what first guesses use if they can: what awaits its sending is only known from
a schedule."""

_ROOM_OTHERWISE = 0.994
"""The same where stages with different replicas may run further ahead than they need."""

_ALIKE = 0.02
"""Of the best first guesses, those that differ by no more are tried in the sequence in which they
were made: more micro-batches first, then as many replicas for every stage."""

_EQUAL, _EQUAL_FLUSHED = 3, 5
"""Numbers of replicas, the same for every stage, that first guesses are made with. Where a pipeline
runs empty after each mini-batch, fewer replicas, with less to compute again, may be better."""

_UNEQUAL = 1.15
"""A guess's expected period counts as so many times longer where stages of a pipeline that runs
empty have different numbers of replicas: they wait for one another."""

_UNEQUAL_FULL = 1.5
"""The same where the pipeline stays full and the schedule says what is in flight: neighbours with
other numbers run all that they may ahead, and then take turns."""

_FEWER, _MORE = 6.0, 1.5
"""Where replicas may differ: of those of the fewest stages, so many times fewer, and more."""

_REPAIRS, _REPAIR = 3, 1.002
"""Times that a guess is made again with less memory, and how much less than it was over."""


def try_blocks(search: SearchState) -> None:
    """Where there is much to look at: a plan early, from guesses with fewer places to cut."""
    if not search.large or not search.branches or not isinstance(search.source, DpSource):
        return
    if min(_least_devices(search, branch) for branch in search.branches) > len(
        search.question.cluster.devices
    ):
        # The weights alone are too large: bounds soon prove it.
        return
    left = search.budget.seconds_left
    until = None if left is None else time.monotonic() + left * _BLOCKS_SHARE
    most = MOST_BLOCKS
    while most <= MOST_BLOCKS * _FINER and search.best is None and not search.budget.noted(until):
        _try_between(search, most, until)
        if most >= len(search.question.profile.layers):
            break
        most *= 2
    if not _known_waits(search):
        # Those have been tried with what memory has room for.
        keep_more(search)


class _Guess(NamedTuple):
    """A guess that cuts between blocks.

    Attributes:
        most: blocks.
        replicas: for every stage; None: any.
        until: first guesses end then, by `time.monotonic`; None: no limit.
    """

    branch: Branch
    most: int
    in_flight: InFlight | None
    replicas: int | None
    until: float | None


def _try_between(search: SearchState, most: int, until: float | None) -> None:
    """Guesses at cuts between so many blocks, the best ones first."""
    for share in (None, 1.0):
        found = _guesses(search, most, until, share)
        if found:
            break
    least = min((item.expected_s for item in found), default=0.0)
    found.sort(key=lambda item: item.expected_s > least * (1 + _ALIKE) and item.expected_s)
    for item in found:
        # Guesses that are no better than what there is aren't worth a simulation.
        late = search.best and search.budget.noted(until)
        if item.expected_s * CLOSE < search.period_s and not late:
            _try_in_blocks(search, item)


class _Guessed(NamedTuple):
    """A guess's best cut.

    Attributes:
        share: of the devices' memory, that it may use.
        answer: what was solved, and the cut.
        expected_s: the period that it may lead to.
    """

    guess: _Guess
    share: float
    answer: tuple[StageProblem, Cut]
    expected_s: float


def _guesses(
    search: SearchState, most: int, until: float | None, share: float | None
) -> list[_Guessed]:
    """Those at cuts between so many blocks that may be the best ones.

    Args:
        share: of the devices' memory, that they may use; None: what leaves some room.
    """
    found: list[_Guessed] = []
    # More micro-batches leave devices idle for less: those branches first.
    for done, branch in enumerate(sorted(search.branches, key=lambda b: -b.micro_batches)):
        what = f"first plans: {branch.micro_batches} micro-batches"
        search.say(what, done, len(search.branches))
        expected_s = min((item.expected_s for item in found), default=inf)
        if _least_expected_s(search, branch) >= expected_s:
            continue
        for in_flight, replicas in product(
            search.in_flight_guesses(None), _equal_replicas(search, branch)
        ):
            guess = _Guess(branch, most, in_flight, replicas, until)
            room = share or _room(search, guess)
            answer = _in_blocks(search, guess, room, enough_s=expected_s)
            if answer is not None:
                found.append(_Guessed(guess, room, answer, _expected_s(search, guess, answer)))
                expected_s = min(expected_s, found[-1].expected_s)
            if search.budget.noted(until):
                break
        if is_late(until) and (found or search.budget.is_late):
            break
    return found


def _room(search: SearchState, guess: _Guess) -> float:
    """Of the memory, what a guess uses if it can."""
    return _ROOM_OTHERWISE if guess.replicas is None and _known_waits(search) else _ROOM


def _equal_replicas(search: SearchState, branch: Branch) -> list[int | None]:
    """Replicas that all stages might have, first; None: any for each.

    With as many everywhere stages wait least for one another. Those where the fewest stages
    that can hold the model take most of the devices.
    """
    if not search.relaxation.freedom.replicas:
        return [None]
    variant, most = search.relaxation.variant, _usual_replicas(search, branch)
    if _known_waits(search) and not variant.flushes:
        # Different ones needn't wait for one another.
        return [None]
    counts = search.relaxation.replica_counts(branch.micro_batches)
    within = [r for r in counts if 1 < r <= most]
    few = [1] if search.most_stages <= MOST_BLOCKS or not within else []
    most_first = within[-_EQUAL_FLUSHED if variant.flushes else -_EQUAL :][::-1]
    # Fewer stages are sooner simulated.
    return [*few, *most_first, None]


def _usual_replicas(search: SearchState, branch: Branch) -> float:
    """Of the fewest stages that can hold the model on all devices."""
    devices = len(search.question.cluster.devices)
    variant = search.relaxation.variant
    if fixed_in_flight(variant) and not variant.flushes:
        devices = min(devices, branch.micro_batches)
    return devices / max(_least_devices(search, branch), 1.0)


def _least_expected_s(search: SearchState, branch: Branch) -> float:
    """What no guess for a branch is likely to be below: one micro-batch's way and back, and where
    the pipeline runs empty all the work, shared out evenly, too."""
    relaxation, n = search.relaxation, branch.micro_batches
    way_s = relaxation.seconds.way_and_back_s(n)
    if not relaxation.variant.flushes:
        return way_s
    # A stage's own part of the way is part of its work.
    stages = max(_least_devices(search, branch), 1.0)
    devices = len(search.question.cluster.devices)
    return way_s * (1 - 1 / stages) + relaxation.seconds.work_s(n) * n / devices


def _expected_s(search: SearchState, guess: _Guess, answer: tuple[StageProblem, Cut]) -> float:
    """The period that a guess may lead to."""
    problem, cut = answer
    if _known_waits(search):
        return cut.objective_s
    if not _waits(search, problem):
        replicas = {problem.options[stage.option].replicas for stage in cut.stages}
        fixed = fixed_in_flight(search.relaxation.variant) and len(replicas) > 1
        return cut.objective_s * (_UNEQUAL_FULL if fixed else 1.0)
    n = guess.branch.micro_batches
    forward_s = search.relaxation.seconds.forward_s(n)
    if guess.replicas is None:
        return period_of(problem, forward_s, cut) * _UNEQUAL
    return period_of(problem, forward_s, cut, _ahead(search, guess))


def _ahead(search: SearchState, guess: _Guess) -> int:
    """`each` of `period_of`: micro-batches of a replica in 1F1B that flushes, else 1."""
    one_by_one = search.relaxation.variant.schedule == "1f1b-flush"
    return guess.branch.micro_batches // (guess.replicas or 1) if one_by_one else 1


def _waits(search: SearchState, problem: StageProblem) -> bool:
    """Whether `period_of` corrects the largest load: the pipeline flushes, and stages may recompute
    while others wait, or run different numbers of forwards ahead (1F1B)."""
    variant = search.relaxation.variant
    several = len({mode.name for mode in problem.modes}) > 1
    return variant.flushes and (several or variant.schedule == "1f1b-flush")


def _least_devices(search: SearchState, branch: Branch) -> float:
    """What all weights take, over the memory of the largest device; a guess."""
    largest = max(device.usable_bytes or inf for device in search.question.cluster.devices)
    assumed = Assumptions(guess=True, unreplicated=True, identical=search.identical)
    copies = search.relaxation.problem(branch, assumed).place(0, 1).copies
    return copies * float(search.relaxation.graph.parameter_bytes.sum()) / largest


def _in_blocks(
    search: SearchState, guess: _Guess, share: float = 1.0, *, enough_s: float = inf
) -> tuple[StageProblem, Cut] | None:
    """A guess's best cut between blocks.

    Args:
        share: of the devices' memory, that it may use.
        enough_s: a period that there is; a cut that can't be below needn't be the best.
    """
    problem = search.relaxation.problem(
        guess.branch,
        Assumptions(
            guess.in_flight,
            guess=True,
            replicas=_likely_replicas(search, guess),
            identical=search.identical,
            memory_share=share,
        ),
    )
    if not problem.options:
        return None
    # One size of stage must do everywhere, so cuts must be finer; and it is soon seen.
    most = guess.most
    if (guess.replicas is not None and guess.replicas > 1) or _known_waits(search):
        most *= _FINER_EQUAL
    of = _blocks_of(search, problem, most)
    coarse, lattice = of.coarse(problem)
    left, deadline = search.budget.seconds_left, None
    if guess.until is not None and left is not None:
        # The first plan matters more than what else there may be time for.
        seconds = SOON_S if search.best else left * _BLOCKS_SHARE
        deadline = max(guess.until, time.monotonic() + seconds)
    if _known_waits(search):
        below_s = min(enough_s, search.period_s)
        known = _by_waits(search, guess, of, coarse, lattice, below_s=below_s, deadline=deadline)
        return None if known is None else (problem, of.fine(known))
    answer = (
        identical_minimax(coarse, lattice, deadline=deadline, few=0)
        or identical_by_targets(
            coarse, lattice, below=search.period_s, within=CLOSE, deadline=deadline
        )
        or minimax_with_bound(coarse, lattice, below=search.period_s, deadline=deadline)
    )
    return None if answer.cut is None else (problem, of.fine(answer.cut))


def _known_waits(search: SearchState) -> bool:
    """Whether the schedule alone says what stages wait for."""
    return search.identical and fixed_in_flight(search.relaxation.variant)


def _likely_replicas(search: SearchState, guess: _Guess) -> tuple[int, ...]:
    """Replicas that a guess's stages may have; empty: any."""
    if guess.replicas is not None:
        return (guess.replicas,)
    if not _known_waits(search):
        return ()
    usual = _usual_replicas(search, guess.branch)
    counts = search.relaxation.replica_counts(guess.branch.micro_batches)
    return tuple(r for r in counts if usual / _FEWER <= r <= max(usual * _MORE, 1.0))


def _by_waits(
    search: SearchState,
    guess: _Guess,
    of: Blocks,
    coarse: StageProblem,
    lattice: Lattice,
    *,
    below_s: float,
    deadline: float | None,
) -> Cut | None:
    """The cut between blocks whose period is the least, by what its stages wait for."""
    n, flushes = guess.branch.micro_batches, search.relaxation.variant.flushes
    if guess.replicas is None:
        return least_kept_period(
            coarse, lattice, micro_batches=n, flushes=flushes, below_s=below_s, deadline=deadline
        )
    return least_period(
        coarse,
        lattice,
        of.summed(search.relaxation.seconds.forward_s(n)),
        of.summed(search.relaxation.seconds.way_s(n)),
        each=n // guess.replicas,
        below_s=below_s,
        deadline=deadline,
    )


def _try_in_blocks(search: SearchState, guessed: _Guessed) -> None:
    """A guess's best cut; where it takes too much memory after all, with less to use."""
    guess, share, answer = guessed.guess, guessed.share, guessed.answer
    for _ in range(_REPAIRS):
        choice = choice_of(*answer)
        if _known_waits(search) and search.relaxation.freedom.recompute != "on":
            choice = likely_to_keep_more(search, *answer, choice, guess.branch.micro_batches)
        try_some(search, choice, guess.branch.micro_batches, answer[1].objective_s)
        over = search.least_over.get(choice, 1.0)
        # With less memory to use, it would hardly be shorter.
        if over <= 1.0 or search.shortest_s[choice] >= search.period_s:
            return
        share /= over * _REPAIR
        smaller = _in_blocks(search, guess, share)
        if smaller is None:
            return
        answer = smaller


def _blocks_of(search: SearchState, problem: StageProblem, most: int) -> Blocks:
    if most not in search.blocks:
        assert isinstance(search.source, DpSource)
        search.blocks[most] = blocks(problem, search.source.lattice, most)
    return search.blocks[most]
