"""The loop over the operations of a segment, in the sequence of its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...planner.schedules.schedules import make_schedule
from ...planner.simulator.timeline import updates_last, whole_sequence
from ...planner.systems.operations import FORWARD, UPDATE, Op, Schedule
from ...profiles.autograd.random_numbers import SameNumbers, same_numbers
from ..communication.posts import Post, Sequenced, posts
from ..prepare.data import Segment, real_samples
from ..prepare.devices import random_state, set_random_state
from ..records.metrics import EpochSums
from ..stage.runner import StageRunner
from .runners import announce


class OperationLoop:
    """Leads the runners of this process through operations, which a worker does in its own sequence
    and all workers in one process in a simulated one.

    Attributes:
        random: states of the runners' random streams, of which each has its own, inline as in
            processes; a runner by itself draws from torch's, and its is there.
        numbers: gives samples random numbers of their own; None: they draw from the streams.
    """

    def __init__(self, runners: Sequence[StageRunner]) -> None:
        self.runners = runners
        self.prepared = prepared = runners[0].prepared
        self._orders: dict[int, Schedule] = {}
        self._posts: dict[tuple[int, int], Sequence[Post]] = {}
        self.numbers = same_numbers(prepared.random, prepared.settings.seed)
        self.random: list[torch.Tensor] = []
        for runner in runners:
            stream = runner.number + runner.replica.index * len(prepared.plan.stages)
            torch.manual_seed(prepared.settings.seed * 1_000_003 + stream)
            self.random.append(random_state(runner.device))

    def train(self, segment: Segment, sums: Sequence[EpochSums]) -> None:
        """Do all operations of a segment. `sums`: of its epoch so far, for each runner."""
        if segment.mini_batches not in self._orders:
            self._orders[segment.mini_batches] = make_schedule(
                self.prepared.pipeline, segment.mini_batches
            )
        order = self._orders[segment.mini_batches]
        for runner, own in zip(self.runners, sums, strict=True):
            runner.begin(segment, order)
            own.begin(runner.notes.metrics)
        series = [runner.messages.series(segment.mini_batches) for runner in self.runners]

        def posted(rank: int) -> Sequence[Post]:
            key = rank, segment.mini_batches
            if key not in self._posts:
                sequence = whole_sequence(self.prepared.pipeline, order)
                dealt, replicas = self.prepared.distribution, self.prepared.replicas
                self._posts[key] = posts(rank, sequence, replicas, dealt.shares, dealt.routes)
            return self._posts[key]

        announce(self.runners, series, posted)
        if len(self.runners) == 1:
            runner = self.runners[0]
            with self._stream(0):
                for op in order[runner.number]:
                    for _ in _steps(runner, op, self.numbers):
                        pass
        else:
            self._take_turns(order)
        for runner in self.runners:
            runner.notes.finish()

    def _sequence(self, order: Schedule) -> Sequenced:
        """The operations of this process with their stages: of its worker, or in simulated
        sequence of all workers."""
        pipeline, first = self.prepared.pipeline, self.runners[0].replica
        if any(runner.replica.rank != first.rank for runner in self.runners):
            return whole_sequence(pipeline, order)
        device = pipeline.placement[first.stage] if pipeline.placement else first.stage
        return updates_last(pipeline, order.on_devices()[device])

    def _take_turns(self, order: Schedule) -> None:
        updates: list[tuple[int, Iterator[None]]] = []
        for s, op in self._sequence(order):
            if op.kind != UPDATE:
                self._advance(updates)
                updates = []
            for position, runner in enumerate(self.runners):
                if runner.number == s:
                    updates.append((position, _steps(runner, op, self.numbers)))
            if op.kind != UPDATE:
                self._advance(updates)
                updates = []
        self._advance(updates)

    def _advance(self, running: Sequence[tuple[int, Iterator[None]]]) -> None:
        """Lead operations to their ends, from pause to pause in turn."""
        while running:
            paused = []
            for position, steps in running:
                with self._stream(position):
                    for _ in steps:
                        paused.append((position, steps))
                        break
            running = paused

    @contextmanager
    def _stream(self, position: int) -> Iterator[None]:
        if len(self.runners) == 1:
            yield
            return
        device = self.runners[position].device
        set_random_state(self.random[position], device)
        yield
        self.random[position] = random_state(device)


def _steps(runner: StageRunner, op: Op, numbers: SameNumbers | None) -> Iterator[None]:
    """An operation of a runner, with the same random numbers as everywhere where that is asked
    for."""
    segment = runner.segment
    if numbers is not None and segment is not None and op.micro_batch is not None:
        dealt = runner.stage.share.dealt
        samples = real_samples(segment, op.mini_batch, op.micro_batch, dealt)
        if op.kind == FORWARD:
            numbers.begin(runner.number, (segment.first + op.mini_batch,), samples)
    yield from runner.steps(op)
