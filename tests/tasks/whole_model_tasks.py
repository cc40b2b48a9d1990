"""Tasks that say more of their training: parameter groups and schedules."""

from __future__ import annotations

from typing import ClassVar

import torch
from mlp_task import MLPTask


class NotingSGD(torch.optim.SGD):
    """Notes the norm of the gradients, the numbers they have, and the groups, at every step."""

    notes: ClassVar[list] = []

    def step(self, closure=None):
        gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"]]
        whole = torch.cat(gradients)
        self.notes.append((whole.norm().item(), whole.numel(), len(self.param_groups)))
        return super().step(closure)


class Noting(MLPTask):
    """The small network with gradients noted."""

    def optimizer(self, parameters):
        return NotingSGD(parameters, lr=0.05)


class Grouped(MLPTask):
    """Groups by name: one of them is only on the stage that has l0, biases are everywhere."""

    def parameter_groups(self, named_parameters):
        named = dict(named_parameters)
        biases = [name for name in named if name.endswith("bias")]
        first = [name for name in named if name == "l0.weight"]
        others = [name for name in named if name not in biases + first]
        return [
            {"params": [named[name] for name in biases], "lr": 0.2, "weight_decay": 0.0},
            {"params": [named[name] for name in first], "momentum": 0.0},
            {"params": [named[name] for name in others]},
        ]

    def optimizer(self, parameters):
        return NotingSGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.3)


class GroupSchedule(Grouped):
    """A schedule for each group."""

    scheduler_step = "update"

    def scheduler(self, optimizer):
        each = [lambda k: 1.0, lambda k: 1 / (1 + k), lambda k: 1 / (2 + k)]
        return torch.optim.lr_scheduler.LambdaLR(optimizer, each)


class GroupCycle(Grouped):
    """Rates for each group, as many as there are."""

    def scheduler(self, optimizer, steps):
        rates = [0.1, 0.2, 0.3, 0.4][: len(optimizer.param_groups)]
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps)


class GroupByDepth(GroupCycle):
    """A group for each layer, counted from the first of those that it is given."""

    def parameter_groups(self, named_parameters):
        layers = {}
        for name, p in named_parameters:
            layers.setdefault(name.partition(".")[0], []).append(p)
        return [{"params": found, "lr": 0.1 * 0.5**k} for k, found in enumerate(layers.values())]


class GroupsOfItsOwn(MLPTask):
    """Its optimizer makes groups of what it is given, another number on another stage."""

    scheduler_step = "update"

    def optimizer(self, parameters):
        return torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1)

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3)


class FullGroupsAlone(Grouped):
    """Its optimizer takes no groups without parameters."""

    def optimizer(self, parameters):
        if not all(group["params"] for group in parameters):
            raise ValueError("an empty group")
        return super().optimizer(parameters)


class Missing(Grouped):
    """Leaves a parameter out."""

    def parameter_groups(self, named_parameters):
        return super().parameter_groups(named_parameters)[1:]


class Twice(Grouped):
    """Has a parameter in two groups."""

    def parameter_groups(self, named_parameters):
        groups = super().parameter_groups(named_parameters)
        return [*groups, groups[0]]


class Strange(Grouped):
    """Has a tensor of its own in a group."""

    def parameter_groups(self, named_parameters):
        return [{"params": [torch.zeros(1)]}]


class NoParams(Grouped):
    """Gives no groups."""

    def parameter_groups(self, named_parameters):
        return [list(named_parameters)]


class Stepped(MLPTask):
    """A schedule of its own."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


class NoScheduler(MLPTask):
    """Forgets to return it."""

    def scheduler(self, optimizer):
        torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


class Hooked(MLPTask):
    """A parameter's gradient is clamped as it comes; its sizes then are noted."""

    noted: ClassVar[list[float]] = []

    def model(self):
        model = super().model()

        def clamp(gradient):
            self.noted.append(float(gradient.abs().max()))
            return gradient.clamp(-0.01, 0.01)

        model.l3.weight.register_hook(clamp)
        return model


class HookedByOptimizer(MLPTask):
    """The optimizer's maker has gradients halved."""

    def optimizer(self, parameters):
        for p in parameters:
            p.register_hook(lambda gradient: 0.5 * gradient)
        return torch.optim.SGD(parameters, lr=0.05)
