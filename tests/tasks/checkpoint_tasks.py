"""Tasks with what a checkpoint must remember besides weights and momenta."""

from __future__ import annotations

import torch
from mlp_task import ShortEpochs
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import TensorDataset
from whole_model_tasks import Grouped


class Shaken(nn.Module):
    """Dropout on two stages, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.l1 = nn.Linear(6, 4)
        self.act = nn.Tanh()
        self.drop2 = nn.Dropout(0.3)
        self.l2 = nn.Linear(4, 3)

    def forward(self, x):
        x = self.drop(self.norm(self.l0(x)))
        return self.l2(self.drop2(self.act(self.l1(x))))


class ShakenTask(ShortEpochs):
    def model(self):
        return Shaken().double()


class Fading(Shaken):
    """Uses a buffer that isn't persistent and fades, and numbers that the trace makes constants."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(6), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen.mul_(0.9)
        counts = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        return super().forward(x * self.seen[:5].clone()) * counts


class FadingTask(ShortEpochs):
    def model(self):
        return Fading().double()


class Cycled(ShortEpochs):
    """A schedule that also moves the momentum."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=40)


class Stepped(Grouped):
    """Groups by name, and a schedule that counts."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 10], gamma=0.5)


class Odd(ShortEpochs):
    """An optimizer that keeps what no file can hold."""

    def optimizer(self, parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        for group in optimizer.param_groups:
            group["rule"] = self
        return optimizer


class Idle(nn.Module):
    """Has a layer that its forward doesn't use."""

    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(5, 6)
        self.unused = nn.Linear(2, 2)
        self.l1 = nn.Linear(6, 3)

    def forward(self, x):
        return self.l1(torch.tanh(self.l0(x)))


class IdleTask(ShortEpochs):
    def model(self):
        return Idle().double()


class Center(nn.Module):
    """Has a buffer, and a plain attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.calls = 0

    def forward(self, output):
        self.calls += 1
        self.mean += 0.1 * (output.detach().mean(0) - self.mean)
        return (output - self.mean).square().mean()


class RememberingTask:
    """Its loss anneals by the number of its calls."""

    def __init__(self):
        self.seen, self.history, self.still = 0, [], 3
        self.center = Center()

    def model(self):
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))

    def data(self, split):
        generator = torch.Generator().manual_seed(len(split))
        return TensorDataset(torch.randn(16, 4, generator=generator), torch.arange(16) % 3)

    def loss(self, output, target):
        self.seen += 1
        self.history.append(1.0)
        near = self.center(output)
        return nn.functional.cross_entropy(output, target) + near / self.seen

    def optimizer(self, parameters):
        return Counting(parameters, lr=0.01)


class Counting(torch.optim.SGD):
    """Counts its steps in a plain attribute."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = 0

    def step(self, closure=None):
        """As SGD."""
        self.steps += 1
        return super().step(closure)


# Names and tensors of the model's state ----------------------------------------------------------


class Shifted(nn.Linear):
    """With a buffer beside the bias."""

    def __init__(self, inside, outside):
        super().__init__(inside, outside)
        self.register_buffer("shift", torch.full([outside], 0.1))

    def forward(self, x):
        return super().forward(x) + self.shift


class Wrapped(ShortEpochs):
    """Layers in torch's own wrapper, which calls them otherwise than state_dict does."""

    def model(self):
        inside = nn.Sequential(Shifted(5, 6), nn.Tanh())
        layers = [checkpoint_wrapper(inside), nn.Tanh(), checkpoint_wrapper(nn.Linear(6, 4))]
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(4, 3)).double()


class WrappedTied(Wrapped):
    """The same, some with one weight."""

    def model(self):
        layers = [nn.Linear(5, 5) for _ in range(3)]
        layers[2].weight = layers[0].weight
        one, two, three = map(checkpoint_wrapper, layers)
        return nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), three, nn.Linear(5, 3)).double()


class Plain(ShortEpochs):
    """A model that others do something to."""

    def model(self):
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


class LeavesOut(Plain):
    """Its state_dict leaves a weight out."""

    def model(self):
        model = super().model()

        def leave_out(module, state, prefix, metadata):
            del state["0.weight"]

        model.register_state_dict_post_hook(leave_out)
        return model


class Adds(Plain):
    """Its state_dict has a tensor that is nowhere else."""

    def model(self):
        model = super().model()

        def add(module, state, prefix, metadata):
            state["version"] = torch.ones(1)

        model.register_state_dict_post_hook(add)
        return model


class Halves(Plain):
    """Its state_dict has a weight in less precision."""

    def model(self):
        model = super().model()

        def halve(module, state, prefix, metadata):
            state["2.weight"] = state["2.weight"].float()

        model.register_state_dict_post_hook(halve)
        return model


class Stamped(nn.Linear):
    """Has a tensor in its state that is made each time."""

    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        pass


class ExtraTensor(Plain):
    def model(self):
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Stamped(4, 3)).double()


class Scaled(nn.Sequential):
    """Scales its result by two buffers that are one number each, expanded."""

    def __init__(self):
        super().__init__(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self.register_buffer("scale", torch.full([1], 0.5).expand(3))
        self.register_buffer("shift", torch.ones(1, 1).expand(1, 3), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.scale + self.shift


class Expanded(ShortEpochs):
    def model(self):
        return Scaled()

    def data(self, split):
        return TensorDataset(*(part.float() for part in super().data(split).tensors))


class LoadsNothing(Plain):
    """Refuses its own state."""

    def model(self):
        model = super().model()

        def refuse(*_):
            raise ValueError("no loading here")

        model.register_load_state_dict_pre_hook(refuse)
        return model
