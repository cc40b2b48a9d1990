"""The loop over operations: a segment's in the sequence of its schedule, or an evaluation's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from ...planner.schedules.schedules import make_schedule
from ...planner.simulator.timeline import updates_last, whole_sequence
from ...planner.systems.operations import FORWARD, UPDATE, Op, Schedule
from ...profiles.autograd.random_numbers import SameNumbers, same_numbers
from ...profiles.tasks.optimizers import for_use
from ..checkpoint.checkpoint import Agree
from ..communication.posts import Post, Posts, Sequenced, posts
from ..prepare.data import Segment, real_samples
from ..prepare.devices import random_kept, random_state, set_random_state
from ..prepare.messages import MessageSeries
from ..records.metrics import EpochSums, EvaluationMetrics
from ..stage.runner import StageRunner
from .same_data import compare_evaluation

EVALUATION_AHEAD = 8
"""Messages that a worker of one stage may have under way to each peer while it evaluates."""


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
        replicas, shares = prepared.replicas, prepared.distribution.shares
        self._posted = partial(posts, replicas=replicas, shares=shares)
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
                routes = self.prepared.distribution.routes
                self._posts[key] = self._posted(rank, sequence, routes=routes)
            return self._posts[key]

        self._announce(series, posted)
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

    def _announce(self, series: Sequence[Sequence[MessageSeries]], posted: Posts) -> None:
        """Tell each worker's channels of all messages to come. `series`: of each runner."""
        by_rank: dict[int, list[MessageSeries]] = {}
        for runner, mine in zip(self.runners, series, strict=True):
            by_rank.setdefault(runner.replica.rank, []).extend(mine)
        for runner in self.runners:
            coming = by_rank.pop(runner.replica.rank, None)
            if coming is not None:
                runner.channels.open(coming, posted)

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

    def evaluate(self, replicas_agree: Agree) -> dict[str, float]:
        """The figures of the test data, where a runner of this process has their targets. A stage's
        replica 0 evaluates; the others wait for it.

        Where workers have several stages, each stage is a micro-batch behind the one before it, so
        that all of them compute at once. What evaluating draws at random leaves training as it is.
        """
        with random_kept(self.runners[0].device), ExitStack() as stack:
            for runner in self.runners:
                if runner.replica.leads:
                    stack.enter_context(for_use(runner.stage.updates.optimizer))
                    stack.enter_context(runner.stage.piece.evaluating())
            return self._evaluate_all(replicas_agree)

    def _evaluate_all(self, replicas_agree: Agree) -> dict[str, float]:
        metrics = EvaluationMetrics()
        evaluating = [runner for runner in self.runners if runner.replica.leads]
        routes = self.prepared.distribution.evaluation_routes
        series = []
        for runner in self.runners:
            with runner.notes.doing(f"{runner.number} evaluation"):
                series.append(runner.messages.evaluation_series(runner.data.evaluations))
        count, ahead = self.runners[0].data.evaluations, EVALUATION_AHEAD
        steps = self._evaluations(count)
        sequence = [at for step in steps for at in step]
        self._announce(series, lambda rank: self._posted(rank, sequence, routes=routes))
        compare_evaluation(self.runners)
        if self.prepared.pipeline.placement:
            # Nobody waits for room for what is taken so many steps later.
            ahead = max(ahead, sum(1 + c.target.stage - c.source.stage for c in routes))
        for k, step in enumerate(steps):
            for s, op in step:
                for runner in evaluating:
                    if runner.number == s:
                        runner.evaluate(op.mini_batch, metrics, ahead)
            if not k % EVALUATION_AHEAD:
                # So that nobody's wait is as long as the whole evaluation.
                replicas_agree(True)
        for runner in self.runners:
            runner.notes.finish()
        return metrics.figures(self.prepared.task) if metrics.samples else {}

    def _evaluations(self, count: int) -> list[list[tuple[int, Op]]]:
        """Step by step, which micro-batch each stage evaluates."""
        stages = range(len(self.prepared.plan.stages))
        behind = stages if self.prepared.pipeline.placement else [0 for _ in stages]
        return [
            [(s, Op(FORWARD, k - behind[s], 0)) for s in stages if 0 <= k - behind[s] < count]
            for k in range(count + behind[-1])
        ]

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
