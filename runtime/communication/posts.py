"""When both ends of a message post it to the device, in an order of the schedule that can't
deadlock.

On a GPU a posted receive, and a send whose receiver isn't there yet, are kernels that wait. Work
that waits for all that the device has (the first call of a library, a module that is loaded, an
allocation) stands still with them. What if every operation waited so, for all that its worker has
posted? Then a message must go between the same two operations at both of its ends: all operations
of all workers are put into one sequence in which causes come first, every message is given a moment
of it, and each end posts its side when it has handed in what it has up to that moment. Whatever is
waited for then lies before that moment, at every worker, so that nothing waits in a circle.

That moment is the one at which the message has been made. Where the receiver would have more
posted than its memory is planned for (`RECEIVES_AHEAD`), it is the one at which an earlier message
has been taken; the sender keeps the message until then, which it does anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ...planner.costs.stage_costs import RECEIVES_AHEAD
from ...planner.systems.operations import BACKWARD, FORWARD, Op
from ..prepare.messages import MessageRoute
from ..prepare.workers import Replica, Share

Sequenced = Sequence[tuple[int, Op]]
"""(Stage, operation) of all workers, in one sequence in which causes come first."""


class Post(NamedTuple):
    """One message, as one of its ends sees it.

    Attributes:
        after: so many operations of its own has that worker handed in when it posts its side of the
            message.
    """

    after: int
    route: MessageRoute
    kind: str


Posts = Callable[[int], Sequence[Post]]
"""From a worker's rank to its posts."""


def no_posts(rank: int) -> Sequence[Post]:
    """Of channels that wait for nothing on the device."""
    return ()


class _Message(NamedTuple):
    moment: int
    made: int
    number: int
    kind: str
    route: MessageRoute


def posts(
    rank: int,
    sequence: Sequenced,
    replicas: Iterable[Replica],
    shares: Sequence[Share],
    routes: Iterable[MessageRoute],
) -> list[Post]:
    """A worker's messages, to it and from it, in the sequence in which it posts them. Of two
    messages between the same replicas, in the same direction, both ends post the same one first.

    Args:
        replicas, routes: of all workers; shares by the replicas' numbers.
    """
    # A receiver's room goes by what all its senders send.
    every = _messages(sequence, [c for c in routes if not c.handed_over], shares)
    messages = sorted((m for m in every if rank in m.route.ends(m.kind)), key=lambda m: m[:4])
    own = {r.stage: shares[r.number] for r in replicas if r.rank == rank}
    handed_in = list(accumulate(int(s in own and own[s].has(op)) for s, op in sequence))
    return [Post(handed_in[m.moment], m.route, m.kind) for m in messages]


def _messages(
    sequence: Sequenced, routes: Sequence[MessageRoute], shares: Sequence[Share]
) -> Iterable[_Message]:
    """Those of the routes, each with its moment: a position in the sequence, behind which it
    goes."""
    makes: dict[tuple[int, str], list[MessageRoute]] = {}
    takes: dict[tuple[int, str], list[MessageRoute]] = {}
    for c in routes:
        for kind in (FORWARD, BACKWARD) if c.spec.needs_grad else (FORWARD,):
            maker, taker = c.between(kind)
            makes.setdefault((maker.stage, kind), []).append(c)
            takes.setdefault((taker.stage, kind), []).append(c)
    made: dict[tuple[int, str], list[int]] = {}
    # Of each tensor to each receiver, what its operations take, one after another.
    taken: dict[tuple[Replica, str, int, str], list[tuple[int, list[MessageRoute]]]] = {}
    for k, (s, op) in enumerate(sequence):
        for c in makes.get((s, op.kind), ()):
            if _concerns(c, op, shares[c.between(op.kind)[0].number]):
                made.setdefault((c.number, op.kind), []).append(k)
        for c in takes.get((s, op.kind), ()):
            maker, taker = c.between(op.kind)
            if _concerns(c, op, shares[taker.number]):
                steps = taken.setdefault((taker, c.spec.name, maker.stage, op.kind), [])
                if not steps or steps[-1][0] != k:
                    steps.append((k, []))
                steps[-1][1].append(c)
    upcoming = {key: iter(positions) for key, positions in made.items()}
    for (*_, kind), steps in taken.items():
        for step, (_, together) in enumerate(steps):
            before = step - RECEIVES_AHEAD[kind]
            room = steps[before][0] if before >= 0 else 0
            for c in together:
                done = next(upcoming[c.number, kind])
                yield _Message(max(done, room), done, c.number, kind, c)


def _concerns(route: MessageRoute, op: Op, share: Share) -> bool:
    """Whether an operation of one end makes, or takes, a message of this route."""
    return not set(share.of(op)).isdisjoint(route.micro_batches)
