"""Periods of many nF1B pipelines, each by its own list schedule, simulated at once.

What `nf1b.ListScheduler` does for one pipeline whose stages have a device each, round by round for
all: in each round every stage runs its next operation, of those that nothing can come before any
more. What isn't offered yet waits for an operation that starts no sooner than the soonest of all;
and a message that isn't sent yet, for one of the stage that sends it. Limits may differ.

Index letters: K pipelines; S stages; N micro-batches; M links; q operations of a kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..simulator.pipeline import Pipeline
from ..systems.operations import BACKWARDS, FORWARDS
from .nf1b import SAME

Seconds = NDArray[np.float64]

SETTLING = 4
"""Mini-batches after those that fill the pipeline, twice over."""

_NEVER = -np.inf
"""Arrival where there is no link: nothing is waited for."""

Messages = dict[tuple[int, int, int, Hashable], tuple[Seconds, Seconds]]
"""By kind, stages that send and receive, and wire: time on it, [K], and latency, [K]."""


def messages_of(pipelines: Sequence[Pipeline]) -> Messages:
    """Of pipelines without replicas; where one has no such link, the latency is minus infinity."""
    found: Messages = {}
    for k, pipeline in enumerate(pipelines):
        # Gradients of what one backward works through go together.
        held = 1 if pipeline.variant.backward_unit == "micro" else pipeline.micro_batches
        for link in pipeline.links:
            (route,) = link.all_routes
            s, t = link.source, link.target
            sent = [((FORWARDS, s, t, route.wire), route.forward_s)]
            if link.has_gradient:
                sent.append(((BACKWARDS, t, s, route.wire_back), route.backward_s * held))
            for key, each_s in sent:
                if key not in found:
                    found[key] = np.zeros(len(pipelines)), np.full(len(pipelines), _NEVER)
                wire_s, latency_s = found[key]
                wire_s[k], latency_s[k] = each_s, route.latency_s
    return found


class _Links:
    """Where messages of one kind go.

    Attributes:
        source, target: of each link, [M], ascending by targets.
        wire_s, latency_s: [M, K]; the latency is minus infinity where a pipeline has no such link.
    """

    def __init__(self, messages: Messages, kind: int, width: int, slots: int) -> None:
        """
        Args:
            messages: of all kinds, of K = `width` pipelines.
            slots: messages of each link.
        """
        rows = {(t, s): times for (of, s, t, _), times in messages.items() if of == kind}
        ends = sorted(rows)
        self.count = len(ends)
        self.target = np.array([end[0] for end in ends], dtype=np.intp)
        self.source = np.array([end[1] for end in ends], dtype=np.intp)
        self.wire_s = np.array([rows[end][0] for end in ends]).reshape(len(ends), width)
        self.latency_s = np.array([rows[end][1] for end in ends]).reshape(len(ends), width)
        self._begins = np.flatnonzero(np.diff(self.target, prepend=-1))
        self._wire_free = np.zeros_like(self.wire_s)
        there = np.where(self.latency_s == _NEVER, _NEVER, np.inf)
        self._takes = np.where(self.latency_s == _NEVER, np.inf, self.wire_s + self.latency_s)
        # One more: what comes after the last one isn't sent.
        self._arrival = np.repeat(there[:, None], slots + 1, axis=1)
        self._row, self._column = np.arange(len(ends))[:, None], np.arange(width)[None]

    def ready_s(self, wanted: NDArray[np.intp], out: Seconds) -> None:
        """When all messages of the operations are there that stages want next, [S, K]."""
        if self.count:
            arrived = self._arrival[self._row, wanted[self.target], self._column]
            out[self.target[self._begins]] = np.maximum.reduceat(arrived, self._begins, axis=0)

    def quickest_s(self, shorter_s: Seconds) -> Seconds:
        """From the begin of an operation, which takes so long at the least, [S, K], until a message
        of it may be there, [K]."""
        found: Seconds = (shorter_s[self.source] + self._takes).min(axis=0, initial=np.inf)
        return found

    def unsent_s(self, made_s: Seconds, out: Seconds) -> None:
        """Lower to when messages may come that others may make from then on, [S, K]."""
        if self.count:
            sent_s = made_s[self.source] + self._takes
            first_s = np.minimum.reduceat(sent_s, self._begins, axis=0)
            targets = self.target[self._begins]
            out[targets] = np.minimum(out[targets], first_s)

    def send(self, ran: NDArray[np.bool_], slot: NDArray[np.intp], end_s: Seconds) -> None:
        """Send what operations made that ran, [S, K]."""
        link, k = np.nonzero(ran[self.source])
        s = self.source[link]
        gone_s = np.maximum(end_s[s, k], self._wire_free[link, k]) + self.wire_s[link, k]
        self._wire_free[link, k] = gone_s
        self._arrival[link, slot[s, k], k] = gone_s + self.latency_s[link, k]


def nf1b_periods_s(pipelines: Sequence[Pipeline]) -> Seconds:
    """Period of each, about, [K]: the mean over as many mini-batches as may be in flight, after the
    pipeline has filled up twice over.

    Args:
        pipelines: of nF1B, with the same stages, micro-batches and update interval, no replicas,
            and a device for each stage.
    """
    first = pipelines[0]
    stages, n, every = first.stages, first.micro_batches, first.update_every
    deep = max(max(pipeline.limits) for pipeline in pipelines)
    span = every * max(-(-deep // every), 2)
    count = 2 * deep + span + SETTLING * every
    total = count + deep
    forward_s = np.array([p.forward_s for p in pipelines]).T
    backward_s = np.array([[p.backward_op_s(s) for s in range(stages)] for p in pipelines]).T
    update_s = np.array([[p.update_op_s(s) for s in range(stages)] for p in pipelines]).T
    limits = np.array([p.limits for p in pipelines]).T
    messages, width = messages_of(pipelines), len(pipelines)
    there = _Links(messages, FORWARDS, width, total * n)
    back = _Links(messages, BACKWARDS, width, total)
    forwards, backwards = np.zeros((2, stages, width), dtype=np.intp)
    free_s = np.zeros(forwards.shape)
    ready_s, returned_s = np.full((2, *free_s.shape), _NEVER)
    updated_s = np.zeros((total + 1, *free_s.shape))
    shorter_s = np.minimum(forward_s, backward_s)
    quickest_s = np.minimum(there.quickest_s(shorter_s), back.quickest_s(shorter_s))
    while backwards.min() < count:
        there.ready_s(forwards, ready_s)
        back.ready_s(backwards, returned_s)
        room = np.minimum((backwards + limits) * n, total * n)
        start_s = np.where(forwards < room, np.maximum(ready_s, free_s), np.inf)
        back_s = np.maximum(returned_s, free_s)
        is_back = (forwards >= (backwards + 1) * n) & (back_s <= start_s * SAME)
        start_s = np.where(is_back, back_s, start_s)
        soonest_s = start_s.min(axis=0)
        made_s = np.minimum(start_s, soonest_s + quickest_s) + shorter_s
        unsent_s = np.full_like(start_s, np.inf)
        there.unsent_s(made_s, unsent_s)
        back.unsent_s(made_s, unsent_s)
        # What takes no time at all goes one by one.
        runs = (start_s < unsent_s) | (start_s == soonest_s)
        runs &= start_s < np.inf
        if not runs.any():
            return np.full(width, np.inf)
        is_back &= runs
        is_forward = runs & ~is_back
        end_s = start_s + np.where(is_back, backward_s, forward_s)
        there.send(is_forward, forwards, end_s)
        back.send(is_back, backwards, end_s)
        s, k = np.nonzero(is_back)
        updated_s[backwards[s, k], s, k] = end_s[s, k]
        due = is_back & ((backwards + 1) % every == 0)
        free_s = np.where(runs, end_s + np.where(due, update_s, 0.0), free_s)
        forwards += is_forward
        backwards += is_back
    last_s = updated_s[count - 1] - updated_s[count - 1 - span]
    found: Seconds = last_s.max(axis=0) / span
    return found
