"""Tasks whose models need another front end than symbolic tracing; in float64."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset


class Named(Dataset):
    """Samples whose inputs go by the arguments' names."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
        self.scale = torch.rand(40, 8, generator=generator, dtype=torch.float64)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        return {"scale": self.scale[k], "x": self.x[k]}, self.x[k].sum()


class Alone(Named):
    """The same with one input, by position."""

    def __getitem__(self, k):
        return self.x[k], self.x[k].sum()


class Shapes(nn.Module):
    """Looks at shapes: torch.export alone takes it."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 1)

    def forward(self, x, unused=None, scale=None):
        y = torch.tanh(self.a(x))
        if scale is not None and x.shape[1] == 4 and x.shape[0] > 0:
            y = y * scale
        return {"sum": self.c(torch.relu(self.b(y)) + y).squeeze(-1)}


class Fixed(nn.Module):
    """Fixes the batch size: a graph for each."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(8, 1)

    def forward(self, x):
        samples = int(x.shape[0])
        y = torch.tanh(self.a(x)).view(samples, 2, 4)
        return {"sum": self.c(self.b(y).view(samples, 8)).squeeze(-1)}


class Hidden(nn.Module):
    """Control flow on the value of a weight: nothing traces it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return torch.tanh(y) if float(self.linear.weight.abs().sum()) > 0 else y


class _Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round and halved."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


class OwnBackward(nn.Module):
    """A forward whose backward isn't what its operations say: no graph of them has it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = checkpoint(
            lambda x: torch.tanh(self.linear(x)), _Reversed.apply(x), use_reentrant=False
        )
        if y.requires_grad:
            y.register_hook(lambda grad: 0.1 * grad)
        return y


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x):
        return {"sum": self.linear(x).squeeze(-1)}


class ByExport:
    data_class = Named

    def model(self):
        return Shapes().double()

    def data(self, split):
        return self.data_class(1 if split == "train" else 2)

    def loss(self, output, target):
        return (output["sum"] - target).square().mean()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


class ByStaticExport(ByExport):
    data_class = Alone

    def model(self):
        return Fixed().double()


class ByChildren(ByExport):
    data_class = Alone

    def model(self):
        blocks = [nn.Linear(4, 8), nn.Sequential(Hidden(), nn.ReLU()), Hidden(), Last()]
        return nn.Sequential(*blocks).double()


class KeptWhole(ByExport):
    """To be profiled with the module "own" as one layer."""

    data_class = Alone

    def model(self):
        parts = {
            "first": nn.Linear(4, 8),
            "own": OwnBackward(),
            "more": nn.Linear(8, 8),
            "last": Last(),
        }
        return nn.Sequential(OrderedDict(parts)).double()


# What models do at their first forward alone ----------------------------------------------------


class Scaled(nn.Module):
    """As an attention: three weights, and more than one way to compute with them."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return torch.sigmoid(self.query(x) * self.key(x)) * self.value(x)


class Fast(Scaled):
    """Another way, taken over with the weights."""

    def __init__(self, slow):
        nn.Module.__init__(self)
        self.query, self.key, self.value = slow.query, slow.key, slow.value

    def forward(self, x):
        return self.value(x) * torch.sigmoid(self.key(x) * self.query(x))


class FirstForward(nn.Module):
    """Does what `kind` says when it is called the first time."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.ready, self.handles, self.calls = kind, False, [], 0
        self.a, self.attention, self.b = nn.Linear(4, 8), Scaled(8), nn.Linear(8, 1)
        self.kept, self.state = [], None

    def set_up(self):
        self.ready = True
        if self.kind in ("hooks", "carries"):
            for module in (self.a, self.attention.value):
                self.handles.append(module.register_forward_hook(self._keep))
        elif self.kind == "exchanges":
            self.attention = Fast(self.attention)
        elif self.kind == "another class":
            self.attention.__class__ = Fast
        elif self.kind == "freezes":
            self.attention.requires_grad_(False)
        elif self.kind == "makes weights":
            self.attention = Scaled(8).double()

    def _keep(self, module, given, result):
        self.kept.append(result)

    def forward(self, x):
        if not (self.handles if self.kind in ("hooks", "carries") else self.ready):
            self.set_up()
        self.kept.clear()
        h = self.attention(torch.tanh(self.a(x)))
        if self.kind == "carries":
            h = h if self.state is None else h + self.state
            self.state = h.detach().mean()
        kept = tuple(self.kept)
        self.kept.clear()
        return {"sum": self.b(h).squeeze(-1), "kept": kept}


class FirstForwardTask(ByExport):
    data_class = Alone
    kind = "hooks"

    def model(self):
        return FirstForward(self.kind).double()

    def loss(self, output, target):
        kept = sum(h.square().mean() for h in output["kept"])
        return ((output["sum"] - target) ** 2).mean() + 0.1 * kept


class ExchangesTask(FirstForwardTask):
    kind = "exchanges"


class OtherClassTask(FirstForwardTask):
    kind = "another class"


class FreezesTask(FirstForwardTask):
    kind = "freezes"
