"""Tasks whose hooks are wrong in one way each."""

from __future__ import annotations

import torch
from mlp_task import MLPTask


class OtherParameters(MLPTask):
    """The optimizer is over another model's parameters."""

    def optimizer(self, parameters):
        return torch.optim.SGD(self.model().parameters(), lr=0.05)


class WholeModel(MLPTask):
    """The optimizer is over the whole model at every stage."""

    def model(self):
        self.net = super().model()
        return self.net

    def optimizer(self, parameters):
        return torch.optim.SGD(self.net.parameters(), lr=0.05)


class MatricesAlone(MLPTask):
    """The optimizer leaves biases out."""

    def optimizer(self, parameters):
        return torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.05)


class OwnWeight(MLPTask):
    """The loss has a parameter of its own."""

    def __init__(self):
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def optimizer(self, parameters):
        return torch.optim.SGD([*parameters, self.scale], lr=0.05)


class NoOptimizer(MLPTask):
    """Forgets to return it."""

    def optimizer(self, parameters):
        torch.optim.SGD(parameters, lr=0.05)
