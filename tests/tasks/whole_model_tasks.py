"""Tasks that say more of their training: parameter groups and schedules."""

from __future__ import annotations

from typing import ClassVar

import torch
from mlp_task import MLPTask, ShortEpochs


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


class SharedRate(Stepped):
    """Its rate is a tensor, the same for all optimizers, into which schedules write."""

    scheduler_step = "update"
    rate = torch.tensor(0.05, dtype=torch.float64)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9)


class MadeTogether(Stepped):
    """Its optimizer and its schedule are made at once."""

    scheduler_step = "update"

    def optimizer(self, parameters):
        optimizer = super().optimizer(parameters)
        self.made = super().scheduler(optimizer)
        return optimizer

    def scheduler(self, optimizer):
        return self.made


class Concealed(MLPTask):
    """Its optimizer steps a schedule that nobody else has."""

    def optimizer(self, parameters):
        optimizer = super().optimizer(parameters)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer


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


# Optimizers that are more than their `state`: modes, others inside, memory of their own -----------


class ScheduleFree(torch.optim.Optimizer):
    """Steps a point between the one that is kept and a sequence of its own (2405.15682)."""

    def __init__(self, params, lr=0.5, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "training": False, "k": 0})

    @torch.no_grad()
    def _move(self, training, by):
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        # Memory of its own: what was known of the old one doesn't help.
                        p.data = p.data.lerp(self.state[p]["z"], by(group["beta"]))
                group["training"] = training

    def eval(self):
        self._move(False, lambda beta: 1 - 1 / beta)

    def train(self):
        self._move(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            c = 1 / group["k"]
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("z", p.clone())
                rate = group["lr"] * (group["beta"] * (1 - c) - 1)
                p.lerp_(state["z"], c).add_(p.grad, alpha=rate)
                state["z"].sub_(p.grad, alpha=group["lr"])


class Modes(ShortEpochs):
    """Trained by it, on 42 samples."""

    def optimizer(self, parameters):
        return ScheduleFree(parameters, lr=0.1)


class Both(torch.optim.Optimizer):
    """One optimizer for matrices and one for the rest."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        every = [p for group in self.param_groups for p in group["params"]]
        self.inner = [
            torch.optim.SGD([p for p in every if p.dim() > 1], lr=0.1, momentum=0.9),
            torch.optim.Adam([p for p in every if p.dim() < 2], lr=0.01),
        ]

    def step(self, closure=None):
        for optimizer in self.inner:
            optimizer.step()


class BothKept(Both):
    """The same, with both in its state_dict."""

    def state_dict(self):
        return {**super().state_dict(), "inner": [each.state_dict() for each in self.inner]}

    def load_state_dict(self, given):
        given = dict(given)
        for optimizer, state in zip(self.inner, given.pop("inner"), strict=True):
            optimizer.load_state_dict(state)
        super().load_state_dict(given)


class BothRefused(BothKept):
    """The same, which doesn't take it back."""

    def load_state_dict(self, given):
        raise KeyError("outer")


class Lookahead(torch.optim.Optimizer):
    """Around another one, made without torch's own initialization; slow weights beside."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults
        self.count = 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.optimizer.step()
        self.count += 1
        if self.count % 2 == 0:
            every = [p for group in self.param_groups for p in group["params"]]
            for p, slow in zip(every, self.slow, strict=True):
                slow.lerp_(p.detach(), 0.5)
                p.data.copy_(slow)

    def state_dict(self):
        return {"fast": self.optimizer.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, given):
        self.optimizer.load_state_dict(given["fast"])
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.slow, self.count = given["slow"], given["count"]


class Global(torch.optim.SGD):
    """Keeps something that is no parameter's."""

    def step(self, closure=None):
        self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
        self.param_groups[0]["lr"] = 0.05 / self.state["all"]["count"]
        return super().step(closure)


class Unwritable(torch.optim.SGD):
    """Keeps what no file has."""

    def step(self, closure=None):
        self.state["all"]["what"] = object()
        return super().step(closure)


class NewMemory(torch.optim.SGD):
    """Gives parameters new memory at each step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


class OldMemory(torch.optim.SGD):
    """The same steps in place."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)


def task_of(kind, **options):
    """A task in a class of its own, whose optimizer is of this kind."""

    def optimizer(self, parameters):
        return kind(parameters, **options)

    return type(f"{kind.__name__}Task", (ShortEpochs,), {"optimizer": optimizer})


BothTask, BothKeptTask, BothRefusedTask = task_of(Both), task_of(BothKept), task_of(BothRefused)
GlobalTask, UnwritableTask = task_of(Global, lr=0.05), task_of(Unwritable, lr=0.05)
NewMemoryTask, OldMemoryTask = task_of(NewMemory, lr=0.1), task_of(OldMemory, lr=0.1)


class LookaheadTask(ShortEpochs):
    """Momentum inside."""

    def optimizer(self, parameters):
        return Lookahead(torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
