"""The first plans of a large model: guesses that cut between blocks of layers alone.

A plan early gives every later step something to beat, and the user one to keep.
"""

from __future__ import annotations

import time
from itertools import product
from math import inf
from typing import TYPE_CHECKING

from ..partition.dp.blocks import Blocks, blocks
from ..partition.dp.identical_devices import rising_minimax
from ..partition.dp.identical_devices_by_target import rising_by_targets
from ..partition.dp.minimax import minimax_with_bound
from ..partition.problem import Cut, StageProblem
from ..partition.solve import DpSource
from .budget import SOON_S, is_late
from .choices import Held, choice_of

if TYPE_CHECKING:
    from .exploration import Case, Exploration

CLOSE = 1.001
"""Of a large model, cuts and bounds of the relaxed problem are found up to this factor."""

MOST_BLOCKS = 200
"""The first guesses cut between so many blocks of layers."""

_FINER = 4
"""Where none of those fits, between up to so many times as many."""

_BLOCKS_SHARE = 0.25
"""Of the time, for the first guesses."""

_ROOM = 0.995
"""Of the memory, what first guesses use if they can: what awaits its sending is only known from
an order."""

_ALIKE = 0.02
"""Of the best first guesses, those that differ by no more are tried in the sequence in which they
were made: more micro-batches first, then as many replicas for every stage."""

_EQUAL = 3
"""Numbers of replicas, the same for every stage, that first guesses are made with."""

_REPAIRS, _REPAIR = 3, 1.002
"""Times that a guess is made again with less memory, and how much less than it was over."""


def try_blocks(search: Exploration) -> None:
    """Where there is much to look at: a plan early, from guesses with fewer places to cut."""
    if not search.large or not isinstance(search.source, DpSource):
        return
    if min(_least_devices(search, case) for case in search.cases) > len(
        search.question.cluster.devices
    ):
        # The weights alone are too large: bounds soon prove it.
        return
    left = search.budget.seconds_left
    until = None if left is None else time.monotonic() + left * _BLOCKS_SHARE
    most = MOST_BLOCKS
    while most <= MOST_BLOCKS * _FINER and search.best is None and not is_late(until):
        _try_between(search, most, until)
        if most >= len(search.question.profile.layers):
            break
        most *= 2


def _try_between(search: Exploration, most: int, until: float | None) -> None:
    """Guesses at cuts between so many blocks, the best ones first."""
    found: list[tuple[float, int, Case, Held | None, int | None]] = []
    # More micro-batches leave devices idle for less: those cases first.
    for done, case in enumerate(sorted(search.cases, key=lambda c: -c.micro_batches)):
        search.say(f"first plans: {case.micro_batches} micro-batches", done, len(search.cases))
        for held, each in product(search.guesses(None), _equal_replicas(search, case)):
            answer = _in_blocks(search, most, case, held, until, each=each)
            if answer is not None:
                found.append((answer[1].objective_s, len(found), case, held, each))
            if is_late(until):
                break
        if is_late(until) and found:
            break
    least = min((item[0] for item in found), default=0.0)
    found.sort(key=lambda item: (item[0] > least * (1 + _ALIKE) and item[0], item[1]))
    for objective_s, _, case, held, each in found:
        # Guesses that are no better than what there is aren't worth a simulation.
        if objective_s * CLOSE < search.period_s and not (search.best and is_late(until)):
            _try_in_blocks(search, most, case, held, until, each=each)


def _equal_replicas(search: Exploration, case: Case) -> list[int | None]:
    """Replicas that all stages might have, first; None: any for each.

    With as many everywhere stages wait least for one another. Those where the fewest stages
    that can hold the model take most of the devices.
    """
    if not search.freedom.replicas:
        return [None]
    devices = len(search.question.cluster.devices)
    if search.relaxation.counted and not search.relaxation.variant.flushes:
        devices = min(devices, case.micro_batches)
    most = devices / max(_least_devices(search, case), 1.0)
    counts = search.relaxation.replica_counts(case.micro_batches)
    within = [r for r in counts if 1 < r <= most]
    few = [1] if search.most_stages <= MOST_BLOCKS else []
    return [*few, *within[-_EQUAL:], None]


def _least_devices(search: Exploration, case: Case) -> float:
    """What all weights take, over the memory of the largest device; a guess."""
    largest = max(device.memory_bytes or inf for device in search.question.cluster.devices)
    copies = search.problem_for(case, guess=True, lone=True, alike=search.alike).place(0, 1).copies
    return copies * float(search.relaxation.graph.parameter_bytes.sum()) / largest


def _in_blocks(
    search: Exploration,
    most: int,
    case: Case,
    held: Held | None,
    until: float | None,
    *,
    each: int | None,
    share: float = 1.0,
) -> tuple[StageProblem, Cut] | None:
    """A guess's best cut between blocks.

    Args:
        most: blocks.
        each: of replicas, for every stage; None: any.
        share: of the devices' memory, that it may use.
    """
    problem = search.problem_for(
        case, held, guess=True, each=each, alike=search.alike, memory_share=share
    )
    if not problem.options:
        return None
    if each is not None and each > 1:
        # One size of stage must do everywhere, so cuts must be finer; and it is soon seen.
        most *= 2
    coarse, lattice = _blocks_of(search, problem, most).coarse(problem)
    left, deadline = search.budget.seconds_left, None
    if until is not None and left is not None:
        # The first plan matters more than what else there may be time for.
        seconds = SOON_S if search.best else left * _BLOCKS_SHARE
        deadline = max(until, time.monotonic() + seconds)
    answer = (
        rising_minimax(coarse, lattice, deadline=deadline, few=0)
        or rising_by_targets(
            coarse, lattice, below=search.period_s, within=CLOSE, deadline=deadline
        )
        or minimax_with_bound(coarse, lattice, below=search.period_s, deadline=deadline)
    )
    if answer.cut is None:
        return None
    return problem, _blocks_of(search, problem, most).fine(answer.cut)


def _try_in_blocks(
    search: Exploration,
    most: int,
    case: Case,
    held: Held | None,
    until: float | None,
    *,
    each: int | None,
) -> None:
    """A guess's best cut; where it takes too much memory after all, with less to use."""
    share = _ROOM
    for _ in range(_REPAIRS):
        answer = _in_blocks(search, most, case, held, until, each=each, share=share)
        if answer is None and share == _ROOM:
            share = 1.0
            answer = _in_blocks(search, most, case, held, until, each=each, share=share)
        if answer is None:
            return
        search.try_cut(*answer, case.micro_batches)
        over = search.over.get(choice_of(*answer), 1.0)
        if over <= 1.0:
            return
        share /= over * _REPAIR


def _blocks_of(search: Exploration, problem: StageProblem, most: int) -> Blocks:
    if most not in search.blocks:
        assert isinstance(search.source, DpSource)
        search.blocks[most] = blocks(problem, search.source.lattice, most)
    return search.blocks[most]
