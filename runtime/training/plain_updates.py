"""What a plain training loop updates by: the task's optimizer and scheduler, and a mean loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from ...profiles.tasks.hooks import RunLength, totals_asked
from ...profiles.tasks.optimizers import for_use, own_options
from ...profiles.tasks.task import Task
from ..settings import RunSettings
from ..stage.optimizer import make_optimizer, make_scheduler


def plain_optimizer(
    task: Task, settings: RunSettings, model: nn.Module, matrices: Collection[str] = ()
) -> Any:
    """The task's own over the model's parameters, in training mode; None: there are none to train.

    One that options name is torch's, made as for a stage that has them all.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if settings.optimizer is not None or settings.decay_only != "all":
        return make_optimizer(task, settings, named, matrices=matrices)
    groups = getattr(task, "parameter_groups", None)
    given = [p for _, p in named] if groups is None else groups(named)
    made: Any = task.optimizer(given) if named else None
    own_options(made)
    if all(callable(getattr(made, mode, None)) for mode in ("train", "eval")):
        made.train()
    return made


def state_for_use(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """A model's state_dict on the CPU, with the weights that its optimizer has for use."""
    with for_use(optimizer):
        return {name: t.to("cpu", copy=True) for name, t in model.state_dict().items()}


def plain_scheduler(task: Task, settings: RunSettings, optimizer: Any, length: RunLength) -> Any:
    """What is stepped after updates: the task's own, or that of options; None: nothing."""
    if settings.lr_schedule is not None:
        made = make_scheduler(task, settings, optimizer, length)
        return None if made is None else made.rule
    hook = getattr(task, "scheduler", None)
    if hook is None or optimizer is None:
        return None
    return hook(optimizer, **{name: getattr(length, name) for name in totals_asked(hook)})


def steps_by_epoch(task: Task, settings: RunSettings) -> bool:
    """Whether the scheduler is stepped at the end of each epoch, instead of after each update."""
    return settings.lr_schedule is None and getattr(task, "scheduler_step", None) == "epoch"


def mean_of(pairs: Sequence[tuple[Any, Any]]) -> Any:
    """The loss of a mini-batch whose parts have (sum, weight)."""
    totals, weights = zip(*pairs, strict=True)
    weight = sum(weights)
    # Where nothing counts there is no gradient.
    return sum(totals) / weight if weight else 0.0 * sum(totals)
