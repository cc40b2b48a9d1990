"""A stage's optimizer and its learning rate: the task's own, or those named on the command line.

Gradient clipping and what a system makes of the optimizer are here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from ...profiles.autograd.optimizer_step import fuse, made_without_compiler
from ...profiles.errors import RunError, TargetError, UserError
from ...profiles.tasks.hooks import (
    RunLength,
    call_hook,
    scheduler_step,
    task_scheduler,
    totals_asked,
)
from ...profiles.tasks.objects import misspelt_hooks
from ...profiles.tasks.optimizers import (
    Named,
    ParameterGroups,
    of_empty_groups,
    steps_otherwise,
    task_groups,
    task_optimizer,
)
from ...profiles.tasks.task import Task
from ..prepare.devices import device_kind
from ..prepare.prepared import Prepared
from ..settings import OptimizerChoice, RunSettings
from ..weights.delays import delay_of, raise_momentum
from ..weights.muon import MuonWithAdamW
from ..weights.outside import context_at, outside_update

Parameters = Iterable[Any]
"""Parameters, or groups of them."""


OPTIMIZERS = ("sgd", "adam", "adamw", "muon")


def _chosen(
    choice: OptimizerChoice, parameters: Parameters, matrices: Iterable[nn.Parameter]
) -> Optimizer:
    """`matrices`: those of the parameters that are matrices of hidden layers."""
    options: dict[str, Any] = {"lr": choice.lr, "weight_decay": choice.weight_decay}
    if choice.name == "sgd":
        return SGD(parameters, momentum=choice.momentum, nesterov=choice.nesterov, **options)
    of_adam = options if choice.betas is None else {**options, "betas": choice.betas}
    if choice.name == "muon":
        found = list(parameters)
        groups = found if found and isinstance(found[0], dict) else [{"params": found}]
        of_muon = {**options, "momentum": choice.momentum} if choice.momentum else options
        return MuonWithAdamW(groups, matrices, muon=of_muon, adamw=of_adam)
    return (Adam if choice.name == "adam" else AdamW)(parameters, **of_adam)


def check_choice(choice: OptimizerChoice) -> OptimizerChoice:
    """Raises UserError for an unknown name, or options that another optimizer has."""
    if choice.name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UserError(f"--optimizer: unknown {choice.name!r}; known are {known}")
    if choice.momentum and choice.name not in ("sgd", "muon"):
        raise UserError(f"--momentum: {choice.name} has its own; leave it out, or use sgd")
    if choice.nesterov and not choice.momentum:
        raise UserError("--nesterov: goes with --optimizer sgd and a --momentum above 0")
    if choice.betas is not None and choice.name == "sgd":
        raise UserError("--betas: sgd has none; use adam or adamw")
    return choice


def make_optimizer(
    task: Task,
    settings: RunSettings,
    named: Iterable[tuple[str, nn.Parameter]],
    owner: str = "the model",
    matrices: Collection[str] = (),
    model: Named | None = None,
) -> torch.optim.Optimizer | None:
    """The optimizer of one stage; None for a stage without parameters to train.

    Args:
        named: the stage's parameters under the model's own names.
        owner: the stage, for messages.
        matrices: names of those of the model that are matrices of hidden layers.
        model: all of the model's to train, with the stage's among them; by default, they are its.

    Raises TargetError when the task's own can't be made, isn't over just these parameters, or
        its groups aren't right.
    """
    every = list(named)
    trained = [(name, p) for name, p in every if p.requires_grad]
    if not trained:
        return None
    own = [p for _, p in trained]
    groups = task_groups(task, model or trained, own)
    if settings.decay_only == "matrices":
        groups = [part for group in groups or [{"params": own}] for part in _by_dimensions(group)]
    parameters: Parameters = own if groups is None else groups
    choice = settings.optimizer
    if choice is not None:
        hidden = [p for name, p in trained if name in matrices]
        return _chosen(choice, parameters, hidden)
    return task_optimizer(task.optimizer, parameters, every, owner)


class StageUpdates:
    """A stage's optimizer step and its learning-rate schedule, as the system prescribes them.

    Attributes:
        optimizer: None: there is nothing to train.
        scheduler: None: the learning rate stays.
        lr: that of the last update's first parameter group; None: there is none.
    """

    def __init__(self, prepared: Prepared, s: int) -> None:
        """Raises as `optimizer_of`, `system_optimizer` and `make_scheduler`."""
        made = optimizer_of(prepared, s)
        self.optimizer = None if made is None else system_optimizer(prepared, s, made)
        self.scheduler = make_scheduler(
            prepared.task, prepared.settings, self.optimizer, prepared.length
        )
        self.lr: float | None = None
        self._fused = False

    def step(self, factor: float, *, steps: bool) -> None:
        """Make an update.

        Args:
            factor: on the groups' learning rates; what a scheduler goes by stays.
            steps: False: it is left out.
        """
        optimizer = self.optimizer
        if optimizer is None:
            return
        with _scaled(optimizer, factor):
            lr = optimizer.param_groups[0].get("lr")
            self.lr = None if lr is None else float(lr)
            if steps:
                self._fused = self._fused or fuse(optimizer)
                step_optimizer(optimizer)
            else:
                # Or torch warns of a scheduler that steps ahead of the optimizer.
                vars(optimizer)["_opt_called"] = True


@contextmanager
def _scaled(optimizer: Optimizer, factor: float) -> Iterator[None]:
    if factor == 1.0:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Take an optimizer step. Raises RunError naming the hook."""
    try:
        call_hook("optimizer", optimizer.step, doing="step()", kind=RunError)
    except RunError as error:
        hint = of_empty_groups(optimizer.param_groups, "this stage")
        raise RunError(f"{error}{hint}") from error


def _by_dimensions(group: Mapping[str, Any]) -> ParameterGroups:
    """The group's matrices, and its biases and norms without weight decay."""
    matrices = [p for p in group["params"] if p.dim() >= 2]
    others = [p for p in group["params"] if p.dim() < 2]
    return [{**group, "params": matrices}, {**group, "params": others, "weight_decay": 0.0}]


# Clipping by the gradients' norm, over a model whose parameters are on several stages -----------

_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


def total_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients there are."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def squared_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The squared 2-norm of all gradients; a GPU's is waited for."""
    return float(total_norm(parameters)) ** 2


def clip(parameters: Iterable[nn.Parameter], norm: float | torch.Tensor, most: float) -> None:
    """Scale gradients in place to a norm of at most `most`; by NaN where the norm is NaN.

    As torch.nn.utils.clip_grad_norm_ does it; its other half, clip_grads_with_norm_, goes by a
    reciprocal: in float64 an ulp from this. A tensor's number isn't looked at: nobody waits for it.
    """
    scale = most / (norm + _EPSILON)
    if isinstance(scale, torch.Tensor):
        scale = scale.clamp(max=1.0)
    elif scale >= 1:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    if isinstance(scale, torch.Tensor) and all(g.layout == torch.strided for g in grads):
        torch._foreach_mul_(grads, scale)
        return
    for grad in grads:
        grad.mul_(scale)


def trained(parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers are trained; tied parameters count once."""
    return sum({id(p): p.numel() for p in parameters if p.requires_grad}.values())


def own_part(most: float, own: int, every: int) -> float:
    """The share of --clip-norm that a stage clips its own gradients to, where stages don't wait for
    each other: X·√(own / every), of numbers that are trained on it and on all. When all stages
    keep to their parts, the whole model has X at most."""
    return most * math.sqrt(own / every) if every else most


# The learning rate over a run: the task's own scheduler, or one named on the command line -------

_AFTER_WARMUP: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}


@dataclass(frozen=True)
class Scheduler:
    """A stage's learning-rate scheduler, stepped after updates or after epochs.

    Attributes:
        rule: one of torch.optim.lr_scheduler's, or what steps like one.
        per_epoch: it is stepped after a stage's last update of each epoch; else after every one.
        length: of the run.
        begun: the options of the optimizer's groups before it had a scheduler.
        remake: where it follows from the run's length: the same over another optimizer, for a run
            of another length.
    """

    rule: Any
    per_epoch: bool = False
    length: RunLength | None = None
    begun: Sequence[Mapping[str, Any]] = ()
    remake: Callable[[Optimizer, RunLength], Any] | None = None

    def after_update(self, *, ends_epoch: bool) -> None:
        """Step, where it is time. Raises RunError naming the hook."""
        if ends_epoch or not self.per_epoch:
            call_hook("scheduler", self.rule.step, doing="step()", kind=RunError)


def learning_rate_factor(shape: str, warmup: int, updates: int, update: int) -> float:
    """The factor of a learning-rate schedule (--warmup, --lr-schedule) at an update.

    Rises evenly over the first `warmup` updates, the last of which uses all of it; then stays or
    falls, so that it would be 0 at the update after the last.

    Args:
        shape: "constant", "linear" or "cosine".
        updates, update: in the whole run, and which of them, counted from 0.
    """
    if update < warmup:
        return (update + 1) / warmup
    done = (update - warmup) / max(updates - warmup, 1)
    return _AFTER_WARMUP[shape](min(done, 1.0))


_SPLIT = " ({by} makes several groups of each that the task has)"


def make_scheduler(
    task: Task, settings: RunSettings, optimizer: torch.optim.Optimizer | None, length: RunLength
) -> Scheduler | None:
    """The scheduler of one stage; None where the learning rate stays, or there is nothing to train.

    Args:
        length: of the whole run.

    Raises TargetError when the task's own can't be made.
    """
    if optimizer is None:
        return None
    if settings.lr_schedule is not None:
        rule = partial(learning_rate_factor, settings.lr_schedule, settings.warmup, length.steps)
        return Scheduler(LambdaLR(optimizer, rule), length=length)
    begun = options_of(optimizer.param_groups)
    try:
        found = task_scheduler(task, optimizer, length)
    except TargetError as error:
        muon = settings.optimizer is not None and settings.optimizer.name == "muon"
        by = "--optimizer muon" if muon else "--decay-only matrices"
        splits = muon or settings.decay_only == "matrices"
        raise TargetError(f"{error}{_SPLIT.format(by=by) if splits else ''}") from error
    if found is None:
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise TargetError(
                "the task's optimizer has a learning-rate scheduler that nothing here knows of, so "
                "that a run which goes on would begin it anew: return it from the task's "
                "scheduler(optimizer), and leave its steps to the run"
            )
        return None
    if settings.stagewise_momentum and getattr(found, "cycle_momentum", False):
        raise TargetError(
            f"--stagewise-momentum: the task's scheduler, a {type(found).__name__}, sets the "
            "momentum itself; give it cycle_momentum=False, or leave the option out"
        )
    per_epoch = scheduler_step(task) == "epoch"
    if isinstance(found, OneCycleLR) and not per_epoch:
        check_one_cycle(found.total_steps, length)
    asks = totals_asked(task.scheduler)  # type: ignore[attr-defined]
    return Scheduler(
        found, per_epoch, length, begun, partial(task_scheduler, task) if asks else None
    )


def options_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of an optimizer's options, group by group, without parameters."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in groups
    ]


def check_one_cycle(most: int, length: RunLength) -> None:
    """Raise TargetError where a OneCycleLR is for fewer updates than a run has: torch's ends it."""
    if most < length.steps:
        raise TargetError(
            f"scheduler: the task's OneCycleLR is for {most} updates, and the run has "
            f"{length.steps}: have the method ask for `steps` (docs/training.md); where "
            "the run has begun, another one takes its weights with --from"
        )


def scheduler_warning(task: Task, scheduler: Scheduler, length: RunLength) -> str | None:
    """A warning where a task's scheduler may be meant to be stepped once an epoch, and isn't.

    So torch's documentation steps all of its own but two. A task that says `scheduler_step`, or
    asks for the run's totals, which are of updates, has said how it is meant.
    """
    kind = type(scheduler.rule)
    if (
        scheduler_step(task) is not None
        or totals_asked(task.scheduler)  # type: ignore[attr-defined]
        or kind.__module__ != LRScheduler.__module__
        or issubclass(kind, (OneCycleLR, CyclicLR))
    ):
        return None
    return (
        f"the task's scheduler, a {kind.__name__}, is stepped after each update, "
        f"{length.steps_per_epoch} in an epoch; torch's documentation steps it once an epoch: say "
        'which is meant by scheduler_step = "update" or "epoch" in the task (docs/training.md)'
    )


# The optimizer that a system updates with (`Variant.update_rule`) -------------------------------


def system_optimizer(prepared: Prepared, s: int, optimizer: Optimizer) -> Optimizer:
    """The optimizer that the system updates with: the stage's own, or its Nesterov form. Raises
    TargetError for one that the system's rule, or stage-wise momentum, can't be had with;
    PluginError where a system from outside makes none."""
    if prepared.settings.stagewise_momentum:
        raise_momentum(optimizer, delay_of(prepared.plan, s), len(prepared.plan.stages))
    variant = prepared.pipeline.variant
    if variant.outside is not None and variant.outside.update is not None:
        optimizer = outside_update(variant, context_at(prepared, s), optimizer)
    return _nesterov(optimizer) if variant.update_rule == "nesterov" else optimizer


def _nesterov(optimizer: Optimizer) -> Optimizer:
    """Nesterov momentum with the gradient discounted by 1 − γ (2505.01099; our reading).

    The look-ahead then outweighs the late gradient. For SGD with momentum γ that is
    v ← γ·v + g, W ← W − η·(1 − γ)·(g + γ·v). Adam's first moment discounts its gradient
    already: there it is NAdam. A scheduler may set rates and momenta as ever.
    """
    if isinstance(optimizer, SGD):
        for group in optimizer.param_groups:
            momentum = group["momentum"]
            if group["dampening"]:
                raise TargetError(
                    "the task's optimizer has dampening, and Nesterov momentum has none"
                )
            group["nesterov"] = momentum > 0
        optimizer.register_step_pre_hook(_discount)
        optimizer.register_step_post_hook(_undo_discount)
        return optimizer
    if type(optimizer) in (Adam, AdamW):
        if any(group["amsgrad"] for group in optimizer.param_groups):
            raise TargetError("the task's optimizer has amsgrad=True, and NAdam hasn't")
        names = ["params", "lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"]
        names += ["maximize"]
        groups = [{name: group[name] for name in names} for group in optimizer.param_groups]
        return NAdam(groups)
    raise TargetError(
        f"the task's optimizer is {type(optimizer).__name__}: delay-corrected Nesterov momentum "
        "is there for SGD, Adam and AdamW"
    )


_RATE = "rate_without_discount"


def _discount(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group[_RATE] = group["lr"]
        group["lr"] = group["lr"] * (1 - group["momentum"])


def _undo_discount(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group.pop(_RATE)


# Checks before a run ----------------------------------------------------------------------------


def check_updates(prepared: Prepared) -> None:
    """Make every stage's optimizer and scheduler once, so that a wrong one is refused before the
    run has a directory; not for GPUs, where they may want their parameters: the workers find out.

    Raises TargetError naming the stage and the hook, PluginError naming the system's maker.
    """
    if device_kind(prepared.plan, prepared.settings) != "cpu":
        return
    with looked_at(prepared):
        for s in range(len(prepared.model.pieces)):
            StageUpdates(prepared, s)


def optimizer_of(prepared: Prepared, s: int) -> Optimizer | None:
    """A stage's optimizer over the weights of `prepared`. Raises as `make_optimizer`."""
    model, named = prepared.model, prepared.model.owned_by(s)
    every = [(n, p) for n, p in {**model.parameters, **dict(named)}.items() if p.requires_grad]
    owner = f"stage {s}"
    return make_optimizer(prepared.task, prepared.settings, named, owner, model.matrices, every)


def hook_warnings(prepared: Prepared) -> list[str]:
    """Warnings for the task's scheduler, groups and gradient hooks that mean something else in a
    pipeline."""
    lines = misspelt_hooks(prepared.task)
    settings, length = prepared.settings, prepared.length
    with looked_at(prepared):
        # Optimizers for GPUs alone can't be made here: then nothing is said.
        with suppress(UserError):
            made = [optimizer_of(prepared, s) for s in range(len(prepared.model.pieces))]
            optimizer = next((found for found in made if found is not None), None)
            if settings.lr_schedule is None:
                scheduler = make_scheduler(prepared.task, settings, optimizer, length)
                line = scheduler and scheduler_warning(prepared.task, scheduler, length)
                lines += [line] if line else []
                counts = sorted({len(found.param_groups) for found in made if found is not None})
                if scheduler and len(counts) > 1:
                    lines.append(_OTHER_GROUPS.format(least=counts[0], most=counts[-1]))
            by_rule = prepared.pipeline.variant.prediction or settings.stagewise_momentum
            if optimizer is not None and (kind := steps_otherwise(optimizer)) and by_rule:
                lines.append(_OTHER_STEP.format(own=type(optimizer).__name__, kind=kind))
        line = _gradient_hooks(prepared)
    return lines if line is None else [*lines, line]


_OTHER_GROUPS = (
    "the task's optimizer has {least} parameter groups on one stage and {most} on another: a "
    "schedule that goes by their places has other ones' rates; make them in parameter_groups, "
    "where they keep their places on every stage (docs/training.md)"
)


_OTHER_STEP = (
    "weights are predicted, or momentum set, by the rule of {kind}, and the task's optimizer, a "
    "{own}, has a step() of its own: where that makes other steps they are wrong; take {kind}, or "
    "a system that predicts nothing"
)


@contextmanager
def looked_at(prepared: Prepared) -> Iterator[None]:
    """The context of a look at optimizers: hooks that making them leaves on parameters are removed
    after it."""
    every = {p: None for piece in prepared.model.pieces for p in piece.module.parameters()}
    before = [[dict(hooks) for hooks in _hooks_of(p)] for p in every]
    try:
        with made_without_compiler():
            yield
    finally:
        for p, kept in zip(every, before, strict=True):
            for hooks, had in zip(_hooks_of(p), kept, strict=True):
                for key in hooks.keys() - had.keys():
                    del hooks[key]


def _hooks_of(p: nn.Parameter) -> tuple[dict[int, Any], dict[int, Any]]:
    """Of its gradient: those before it is added, and those after."""
    return p._backward_hooks or {}, p._post_accumulate_grad_hooks or {}


def _gradient_hooks(prepared: Prepared) -> str | None:
    """A warning where hooks on parameters see parts of a mini-batch's gradients, one by one."""
    plan, variant = prepared.plan, prepared.pipeline.variant
    # One pass over all micro-batches on the same weights gives them the whole at once.
    passes = variant.backward_unit == "micro" or variant.backward_weights != "latest"
    replicated = any(len(stage.devices) > 1 for stage in plan.stages)
    if not replicated and not (passes and plan.micro_batches > 1):
        return None
    names = [
        name
        for s in range(len(prepared.model.pieces))
        for name, p in prepared.model.updated_by(s)
        if any(_hooks_of(p))
    ]
    if not names:
        return None
    of = "each replica" if plan.micro_batches == 1 else "each micro-batch"
    return (
        f"hooks on the gradient of {shorten(', '.join(names), 120, placeholder=' …')} run for "
        f"{of}, on its share of the mini-batch's gradient: one that isn't linear (a clamp) or that "
        "takes a step does something else than in training without a pipeline (docs/tasks.md)"
    )
