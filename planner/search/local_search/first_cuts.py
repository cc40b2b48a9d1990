"""Cuts to begin with: even ones, those that 1F1B runs fastest, and those with cheap messages.

Along one topological order of n groups of layers. Where stages take turns, stage s has the next
forward when the backward of one L(s) before has come back; between it and stage t there are
L(s) - L(t) more in flight at s. So for every row of stages s … t a period T has

    (L(s) - L(t) + 1) T >= work of s … t + messages between them, there and back

(the critical cycles of 1F1B: its period where wires and memory have room). Whether a cut keeps to a
T is known from how much its last stages' rows are above it at the most, e(t) = work(t) + max(-T,
e(t - 1) + messages - (L(t - 1) - L(t)) T), which must not be above 0: the less of it before a
border, the better for all that follows. So a dynamic program over borders finds the least T.

And where a pipeline runs empty, the way there and back counts once: for several bounds on the
busiest stage's work the cut under it whose messages take the least time in all.

Where memory is tight, the cut whose busiest stage has the least to do of those whose stages have
room for what they hold (`even_within`).

Index letters: S stages; n groups of layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

_BOUNDS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0)
"""Over the least that the busiest stage can have to do."""

_TURNS = (1.0, 1.02, 1.05, 1.1)
"""Over the least period of 1F1B."""

_HALVINGS = 40
"""Of the interval that the least is in."""

_FINELY, _FINER = 80, 1.025
"""Bounds on what the busiest replica has to do, and times the one before that each is."""

_AT_ONCE = 5
"""Halvings whose 31 possible middles are tried together, which takes about as long as one does."""

_FEW_BOUNDS, _MOST = (1.05, 1.35, 2.0), 16_000_000
"""Of larger programs (S n² for each bound) none is run; and from an eighth of that on, those with
these bounds alone."""


def first_cuts(
    work_s: Sequence[float],
    messages_s: Sequence[Sequence[float]],
    speeds: Sequence[float],
    drops: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """Ends of stages, as numbers of groups before them, S each; every cut once.

    Args:
        work_s: of each group, [n].
        messages_s: what is sent where a stage ends before the first, second, … group, over the
            link to the next one, [S - 1, n].
        speeds: of each stage's devices, [S].
        drops: how many fewer are in flight at the next stage, [S - 1].
    """
    groups, stages = len(work_s), len(speeds)
    if stages > groups:
        return
    seen = set[tuple[int, ...]]()
    for cut in _all_cuts(work_s, messages_s, speeds, drops):
        if cut not in seen:
            seen.add(cut)
            yield cut


def _all_cuts(
    work_s: Sequence[float],
    messages_s: Sequence[Sequence[float]],
    speeds: Sequence[float],
    drops: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    yield even(work_s, speeds)
    yield even([1.0] * len(work_s), speeds)
    if len(speeds) == 1:
        return
    done = np.array([0.0, *accumulate(work_s)])
    sent_s = np.pad(np.array(messages_s), ((0, 0), (0, 1)))
    low, high = float(done[-1]) / sum(speeds), float(done[-1]) / min(speeds) + float(sent_s.sum())
    least_s = _least_period_s(done, sent_s, speeds, drops, low, high)
    yield from _turning(done, sent_s, speeds, drops, [least_s * factor for factor in _TURNS])
    size = len(speeds) * len(work_s) ** 2
    if size > _MOST:
        return
    load_s = _least_load_s(done, speeds)
    for factor in _BOUNDS if 8 * size <= _MOST else _FEW_BOUNDS:
        cut = _cheapest(done, sent_s, speeds, load_s * factor)
        if cut is not None:
            yield cut


def even(weights: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...]:
    """As much weight for each stage as its devices have speed for."""
    done, shares, ends = [0.0, *accumulate(weights)], [*accumulate(speeds)], [0]
    for s in range(1, len(speeds)):
        wanted = done[-1] * shares[s - 1] / shares[-1]
        within = range(ends[-1] + 1, len(weights) - (len(speeds) - s) + 1)
        ends.append(min(within, key=lambda g: (abs(done[g] - wanted), g)))
    return (*ends[1:], len(weights))


def even_within(
    work_s: Sequence[float],
    speeds: Sequence[float],
    held_bytes: NDArray[np.float64],
    rooms_bytes: Sequence[float],
) -> tuple[int, ...] | None:
    """Ends of the stages whose busiest has the least to do, none holding more than its room; None
    where there are none. By bisection; each stage takes as much as it may, from the first on.

    Args:
        work_s: of each group, [n].
        speeds: of each stage's devices, [S].
        held_bytes: what each stage would hold of each group, [S, n].
        rooms_bytes: what it may hold, [S].
    """
    groups, done = len(work_s), [0.0, *accumulate(work_s)]
    held = np.pad(np.cumsum(held_bytes, axis=1), ((0, 0), (1, 0))).tolist()

    def under(most_s: float) -> tuple[int, ...] | None:
        at, ends = 0, list[int]()
        for s, (speed, room) in enumerate(zip(speeds, rooms_bytes, strict=True)):
            by_time = bisect_right(done, (done[at] + most_s * speed) * (1 + 1e-9))
            by_room = bisect_right(held[s], held[s][at] + room)
            end = min(by_time - 1, by_room - 1, groups - (len(speeds) - 1 - s))
            if end <= at:
                return None
            ends.append(at := end)
        return tuple(ends) if at == groups else None

    low, high = done[-1] / sum(speeds), done[-1] / min(speeds)
    found = under(high)
    for _ in range(_HALVINGS if found else 0):
        cut = under(middle := (low + high) / 2)
        low, high, found = (middle, high, found) if cut is None else (low, middle, cut)
    return found


def even_replicas(
    work_s: Sequence[float],
    speeds: Sequence[float],
    homes: Sequence[str | None],
    counts: Sequence[int],
    most: int,
    summed: Sequence[float],
    sum_of: Callable[[range], tuple[float, float]],
) -> list[tuple[float, tuple[tuple[int, ...], ...]]]:
    """For each number of stages up to `most`, what the busiest replica has to do, about, summing
    gradients among it, and the positions of stages' devices that leave it least; of a row of
    devices, of which some may be left out. How far so many stages on the first devices get under a
    bound is known from how far one stage less does, and a bound is the least under which all groups
    are reached. Numbers of stages are left out where fewer come as far on fewer devices.

    Args:
        work_s: of each group, [n].
        speeds: of the devices, [D].
        homes: their machines, [D]: replicas are in one.
        counts: replicas that stages may have, ascending.
        summed: bytes of each group whose gradients are summed, [n].
        sum_of: what that takes over a row of devices: in any case, and for each byte.
    """
    groups = len(work_s)
    done, held = (np.array([0.0, *accumulate(each)]) for each in (work_s, summed))
    devices, least_s = len(speeds), float(done[-1]) / sum(speeds)
    bounds_s = least_s * _FINER ** np.arange(_FINELY)[:, None]
    reach = np.zeros((_FINELY, devices + 1), dtype=np.intp)
    took, found = list[NDArray[np.intp]](), list[tuple[float, tuple[tuple[int, ...], ...]]]()
    alike = dict[tuple[int, float, float], list[int]]()
    for row in (range(p - r, p) for r in counts for p in range(r, devices + 1)):
        if len({homes[d] for d in row}) == 1:
            capacity = len(row) * min(speeds[d] for d in row)
            alike.setdefault((len(row), capacity, sum_of(row)[1]), []).append(row.stop)
    for _ in range(most):
        further, replicas = np.full_like(reach, -1), np.zeros_like(reach)
        for (r, capacity, per_byte_s), at in alike.items():
            load_s, begins = done / capacity + held * per_byte_s, reach[:, np.array(at) - r]
            until_s = (load_s[begins] + bounds_s) * (1 + 1e-9)
            ends = np.searchsorted(load_s, until_s, side="right") - 1
            ends[(begins < 0) | (ends <= begins)] = -1
            better = ends > further[:, at]
            further[:, at] = np.where(better, ends, further[:, at])
            replicas[:, at] = np.where(better, r, replicas[:, at])
        for p in range(1, devices + 1):
            left_out = further[:, p - 1] >= further[:, p]
            further[left_out, p], replicas[left_out, p] = further[left_out, p - 1], 0
        took.append(replicas)
        under = np.flatnonzero(further[:, -1] == groups)
        if len(under):
            k = int(under[0])
            found.append((float(bounds_s[k, 0]), _places([each[k].tolist() for each in took])))
        reach = further
    return found


def _places(took: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Per stage, the positions of its devices.

    Args:
        took: replicas of each stage where it ends before each device; 0: the last one is left out.
    """
    p, found = len(took[0]) - 1, list[tuple[int, ...]]()
    for replicas in reversed(took):
        while not replicas[p]:
            p -= 1
        found.append(tuple(range(p - replicas[p], p)))
        p -= replicas[p]
    return tuple(reversed(found))


def _least_load_s(done: NDArray[np.float64], speeds: Sequence[float]) -> float:
    """Of the busiest stage, at the least; each takes as much as it may, from the first on."""
    low, high = float(done[-1]) / sum(speeds), float(done[-1]) / min(speeds)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        at = 0
        for speed in speeds:
            at = int(np.searchsorted(done, done[at] + middle * speed, side="right")) - 1
        low, high = (low, middle) if at >= len(done) - 1 else (middle, high)
    return high


def _least_period_s(
    done: NDArray[np.float64],
    sent_s: NDArray[np.float64],
    speeds: Sequence[float],
    drops: Sequence[int],
    low: float,
    high: float,
) -> float:
    """The least period of 1F1B over all cuts, by bisection of [low, high]."""
    for _ in range(_HALVINGS // _AT_ONCE):
        # The middle of 2 k + 1 is that of the lower half of k's interval, of 2 k + 2 of the upper.
        ends = [(low, high)]
        for k in range(2 ** (_AT_ONCE - 1) - 1):
            below, above = ends[k]
            middle = (below + above) / 2
            ends += [(below, middle), (middle, above)]
        middles = [(below + above) / 2 for below, above in ends]
        found = _kept(done, sent_s, speeds, drops, middles).tolist()
        k = 0
        while k < len(ends):
            low, high = (low, middles[k]) if found[k] else (middles[k], high)
            k = 2 * k + (1 if found[k] else 2)
    return high


def _turning(
    done: NDArray[np.float64],
    sent_s: NDArray[np.float64],
    speeds: Sequence[float],
    drops: Sequence[int],
    periods_s: Sequence[float],
) -> Iterator[tuple[int, ...]]:
    """For each of some periods that has one, a cut that 1F1B runs in it."""
    begins = list[NDArray[np.intp]]()
    kept = _kept(done, sent_s, speeds, drops, periods_s, begins)
    for k in np.flatnonzero(kept).tolist():
        yield _ends([begin[k] for begin in begins])


def _kept(
    done: NDArray[np.float64],
    sent_s: NDArray[np.float64],
    speeds: Sequence[float],
    drops: Sequence[int],
    periods_s: Sequence[float],
    begins: list[NDArray[np.intp]] | None = None,
) -> NDArray[np.bool_]:
    """Which of some periods some cut keeps to, [P].

    Args:
        done: work before each place, [n + 1].
        sent_s: messages where a stage ends there, [S - 1, n + 1].
        begins: where those of each stage are noted that are best for its ends, [P, n + 1].
    """
    each_s = np.array(periods_s)[:, None]
    # How far rows that end there are above the period.
    above, places = np.empty((len(periods_s), len(done))), np.arange(len(done))
    for s, speed in enumerate(speeds):
        work_s = done / speed
        if s:
            before = np.maximum(-each_s, above + sent_s[s - 1] - drops[s - 1] * each_s)
            before[:, 0] = np.inf
        else:
            before = np.where(places == 0, -each_s, np.inf)
        before -= work_s
        least = np.minimum.accumulate(before, axis=1)
        if begins is not None:
            at = np.maximum.accumulate(np.where(before <= least, places, 0), axis=1)
            begins.append(np.insert(at[:, :-1], 0, 0, axis=1))
        above[:, 0] = np.inf
        np.add(least[:, :-1], work_s[1:], out=above[:, 1:])
        above[above > 1e-12 * each_s] = np.inf
    return np.isfinite(above[:, -1])


def _ends(begins: Sequence[NDArray[np.intp]]) -> tuple[int, ...]:
    """Of all stages, from the last one's end on: where each begins is where another ends."""
    ends = [len(begins[0]) - 1]
    for begin in reversed(begins[1:]):
        ends.append(int(begin[ends[-1]]))
    return tuple(reversed(ends))


def _cheapest(
    done: NDArray[np.float64],
    sent_s: NDArray[np.float64],
    speeds: Sequence[float],
    most_s: float,
) -> tuple[int, ...] | None:
    """The cut with the least messages, no stage with more to do than `most_s`; None: there is none.

    Args:
        done: work before each place, [n + 1].
    """
    size = len(done)
    # Of the best cut before each place: its messages, and where its last stage begins.
    cost, begins = np.full(size, np.inf), list[NDArray[np.intp]]()
    cost[0] = 0.0
    places = np.arange(size)
    later = places[:, None] > places[None, :]
    for s, speed in enumerate(speeds):
        within = later & (done[:, None] - done[None, :] <= most_s * speed * (1 + 1e-9))
        sent = cost if not s else cost + sent_s[s - 1]
        through = np.where(within, sent[None, :], np.inf)
        begins.append(through.argmin(axis=1))
        cost = through[places, begins[-1]]
    return _ends(begins) if np.isfinite(cost[-1]) else None
