"""Evaluation on the test data: forwards alone, through all stages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from ...planner.systems.operations import FORWARD, Op
from ...profiles.tasks.optimizers import for_use
from ..checkpoint.checkpoint import Agree
from ..communication.posts import posts
from ..prepare.data import NO_EVALUATION, real_part
from ..prepare.devices import forward_context, random_kept
from ..prepare.prepared import Prepared
from ..records.metrics import EvaluationMetrics
from ..stage.micro_batch import advise
from ..stage.runner import StageRunner
from .runners import announce
from .same_data import compare_evaluation

EVALUATION_AHEAD = 8
"""Messages that a worker of one stage may have under way to each peer while it evaluates."""


def evaluate(runners: Sequence[StageRunner], replicas_agree: Agree) -> dict[str, float]:
    """The figures of the test data, where a runner of this process has their targets. A stage's
    replica 0 evaluates; the others wait for it.

    Where workers have several stages, each stage is a micro-batch behind the one before it, so
    that all of them compute at once. What evaluating draws at random leaves training as it is.
    """
    with random_kept(runners[0].device), ExitStack() as stack:
        for runner in runners:
            if runner.replica.leads:
                stack.enter_context(for_use(runner.stage.updates.optimizer))
                stack.enter_context(runner.stage.piece.evaluating())
        return _evaluate_all(runners, replicas_agree)


def _evaluate_all(runners: Sequence[StageRunner], replicas_agree: Agree) -> dict[str, float]:
    prepared, metrics = runners[0].prepared, EvaluationMetrics()
    evaluating = [runner for runner in runners if runner.replica.leads]
    dealt, routes = prepared.distribution, prepared.distribution.evaluation_routes
    series = []
    for runner in runners:
        with runner.notes.doing(f"{runner.number} evaluation"):
            series.append(runner.messages.evaluation_series(runner.data.evaluations))
    count, ahead = runners[0].data.evaluations, EVALUATION_AHEAD
    steps = _evaluations(prepared, count)
    sequence = [at for step in steps for at in step]
    announce(
        runners,
        series,
        lambda rank: posts(rank, sequence, prepared.replicas, dealt.shares, routes),
    )
    compare_evaluation(runners)
    if prepared.pipeline.placement:
        # Nobody waits for room for what is taken so many steps later.
        ahead = max(ahead, sum(1 + c.target.stage - c.source.stage for c in routes))
    for k, step in enumerate(steps):
        for s, op in step:
            for runner in evaluating:
                if runner.number == s:
                    _evaluate(runner, op.mini_batch, metrics, ahead)
        if not k % EVALUATION_AHEAD:
            # So that nobody's wait is as long as the whole evaluation.
            replicas_agree(True)
    for runner in runners:
        runner.notes.finish()
    return metrics.figures(prepared.task) if metrics.samples else {}


def _evaluations(prepared: Prepared, count: int) -> list[list[tuple[int, Op]]]:
    """Step by step, which micro-batch each stage evaluates."""
    stages = range(len(prepared.plan.stages))
    behind = stages if prepared.pipeline.placement else [0 for _ in stages]
    return [
        [(s, Op(FORWARD, k - behind[s], 0)) for s in stages if 0 <= k - behind[s] < count]
        for k in range(count + behind[-1])
    ]


def _evaluate(runner: StageRunner, k: int, metrics: EvaluationMetrics, ahead: int) -> None:
    """Forward of the k-th test micro-batch; the last stage adds its metrics.

    Args:
        ahead: messages that may be under way to each peer.
    """
    with runner.notes.doing(f"{runner.number} evaluation {k}"):
        values, target, real = runner.data.of_evaluation(k)
        values |= runner.messages.evaluation_inputs()
        runner.channels.throttle(ahead)
        try:
            outputs, result = runner.stage.piece.evaluate(values)
        except Exception as error:
            advise(runner.prepared, values, error)
            raise
        runner.messages.send_evaluated(outputs)
        if runner.data.targets:
            size = runner.prepared.distribution.evaluation_samples
            if real < size:
                result = real_part(result, real, size, NO_EVALUATION)
            with forward_context(runner.prepared.model.autocast, runner.device.type):
                metrics.add(runner.prepared.task, result, target, real)
        runner.channels.advance()
