"""All cuts below a target, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..problem import ChosenStage, Cut, Deadline, Place, StageProblem, check_time
from .lattice import Lattice
from .program import Program, just_below
from .sweep import Sweep

REMEMBERED = 1 << 14
"""States whose stages are kept for when the search comes there again."""

Move = tuple[float, float, int, int, int, int]
"""Largest load from here on at the best, load of the stage, position of its upper downset, its
option, its k, and the devices left beyond it."""


def chains_below(
    problem: StageProblem,
    lattice: Lattice,
    target: Callable[[], float],
    *,
    deadline: Deadline = None,
) -> Iterator[Cut]:
    """Every cut on a lattice whose objective is below the target, each once, depth first.

    From each stage on, what can lead to the smaller largest load comes first. Where places are
    the same for all k, stages stand on the first devices; else each way to place them is a cut
    of its own. No chain is begun that can't be ended below the target.

    Args:
        target: in s; less is less by more than rounding. It is asked again before each stage: what
            it gives may fall.

    Raises OutOfTime.
    """

    def limit() -> float:
        return just_below(target())

    def place(option: int, k: int) -> Place:
        # With thousands of devices asking for all places takes half a minute.
        check_time(deadline)
        return problem.place(option, k)

    if limit() < 0:
        return
    asked = replace(problem, place=place)
    sweep = Sweep(Program(asked, lattice, every_place=True), limit(), deadline=deadline)
    masks, top = lattice.masks, sweep.program.top
    moves = lru_cache(REMEMBERED)(lambda level, below, k: _moves(sweep, level, below, k))
    ahead = [iter(moves(sweep.start, 0, problem.devices))]
    chain: list[Move] = []
    worst = [0.0]
    while ahead:
        check_time(deadline)
        move = next(ahead[-1], None)
        if move is None or max(move[0], worst[-1]) > limit():
            # The moves after this one lead to no smaller loads.
            ahead.pop()
            if chain:
                chain.pop()
                worst.pop()
            continue
        chain.append(move)
        worst.append(max(worst[-1], move[1]))
        if move[2] != top:
            ahead.append(iter(moves(max(sweep.start - len(chain), 0), move[2], move[5])))
            continue
        lower = [0, *(masks[stage[2]] for stage in chain)]
        yield Cut(
            tuple(
                ChosenStage(masks[above] & ~below, option, k)
                for (_, _, above, option, k, _), below in zip(chain, lower, strict=False)
            ),
            worst[-1],
        )
        chain.pop()
        worst.pop()


def _moves(sweep: Sweep, level: int, below: int, k: int) -> list[Move]:
    """The stages that may come next, the best first."""
    beyond = max(level - 1, 0)
    grid = sweep.stages(below, beyond, k if sweep.program.places.same else 1, k)
    if grid is None:
        return []
    reached = sweep.reached(grid, beyond)
    row, column = np.nonzero(reached <= sweep.target)
    load = np.broadcast_to(grid.load, reached.shape)
    found = zip(
        reached[row, column].tolist(),
        load[row, column].tolist(),
        grid.above[row].tolist(),
        grid.option[row].tolist(),
        grid.k[column].tolist(),
        (grid.k[column] - grid.replicas[row]).tolist(),
        strict=True,
    )
    return sorted(found)
