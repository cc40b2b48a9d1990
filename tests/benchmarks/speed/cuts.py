"""Cuts for rivals, which have none of their own: the best balance of measured times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from timeprest.runtime.prepare.clock import clock_of
from timeprest.runtime.prepare.devices import CPU
from torch import Tensor, nn

from .tasks import Race

ROUNDS = 3
LEVEL = 0.03
"""Ranks' loads that differ by no more than this share count as alike."""


def child_times(
    race: Race, micro_batch: int, device: torch.device = CPU
) -> tuple[list[float], list[float]]:
    """Seconds of every child of the model.

    Returns:
        Forward and backward of a micro-batch, the loss with the last; and an optimizer step.
    """
    torch.manual_seed(0)
    model = race.model().to(device)
    x, y = (part.to(device) for part in race.data("train")[:micro_batch])
    clock = clock_of(device).now
    times: list[list[float]] = [[] for _ in model]
    steps: list[list[float]] = [[] for _ in model]
    optimizers = [_optimizer(race, child) for child in model]
    for _ in range(ROUNDS + 1):
        inputs, outputs, forwards = _forward(model, x, clock)
        begin = clock()
        loss = race.loss(outputs[-1], y)
        (gradient,) = torch.autograd.grad(loss, [outputs[-1]])
        of_loss = clock() - begin
        for k in reversed(range(len(model))):
            begin = clock()
            if outputs[k].requires_grad:
                outputs[k].backward(gradient)
            times[k].append(forwards[k] + clock() - begin)
            back = inputs[k].grad
            if back is not None:
                gradient = back
        times[-1][-1] += of_loss
        for k, optimizer in enumerate(optimizers):
            begin = clock()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            steps[k].append(clock() - begin)
    return [median(t[1:]) for t in times], [median(t[1:]) for t in steps]


def _optimizer(race: Race, child: nn.Module) -> torch.optim.Optimizer | None:
    parameters = list(child.parameters())
    return race.optimizer(parameters) if parameters else None


def _forward(
    model: nn.Sequential, x: Tensor, clock: Callable[[], float]
) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Every child's input and output, apart from each other, and its seconds."""
    inputs, outputs, seconds = [], [], []
    for child in model:
        x = x.detach()
        if x.is_floating_point():
            x.requires_grad_()
        begin = clock()
        inputs.append(x)
        x = child(x)
        outputs.append(x)
        seconds.append(clock() - begin)
    return inputs, outputs, seconds


def balanced(costs: Sequence[float], stages: int, processes: int) -> tuple[int, ...]:
    """Where to cut: the first child of every stage but the first.

    With two stages a rank they lie as a V: rank r has stages r and 2 · processes − 1 − r. Of the
    cuts that balance ranks as well as any, but for what measuring can't tell, those whose longest
    stage is shortest: schedules count on stages of one length.
    """

    def load(cuts: tuple[int, ...]) -> tuple[float, float]:
        pieces = [sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))]
        ranks = [0.0] * processes
        for stage, cost in enumerate(pieces):
            ranks[stage if stage < processes else 2 * processes - 1 - stage] += cost
        return max(ranks), max(pieces)

    every = list(itertools.combinations(range(1, len(costs)), stages - 1))
    least = min(load(cuts)[0] for cuts in every)
    level = [cuts for cuts in every if load(cuts)[0] <= least * (1 + LEVEL)]
    return min(level, key=lambda cuts: load(cuts)[::-1])


def neighbours(cuts: tuple[int, ...], children: int) -> Iterator[tuple[int, ...]]:
    """The same with one cut moved by one child."""
    for k, step in itertools.product(range(len(cuts)), (-1, 1)):
        moved = (*cuts[:k], cuts[k] + step, *cuts[k + 1 :])
        if all(a < b for a, b in itertools.pairwise((0, *moved, children))):
            yield moved


def further(cuts: tuple[int, ...], moved: tuple[int, ...], children: int) -> tuple[int, ...] | None:
    """The same move made once more; None: there is no room, or it wasn't a move."""
    again = tuple(2 * after - before for before, after in zip(cuts, moved, strict=True))
    inside = all(a < b for a, b in itertools.pairwise((0, *again, children)))
    return again if inside and again != moved else None
