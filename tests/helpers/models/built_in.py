"""Built-in tasks by their names, and what tests ask of them."""

from __future__ import annotations

from timeprest.profiles import plugins
from torch.utils.data import default_collate


def built_in(name, argument=None):
    """The task of ``name:argument``."""
    return plugins.load("tasks", name)(name, argument)


def count(model):
    """Elements of its parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def batch(task, samples=2):
    """Inputs as the model takes them, positional and by name, and the target."""
    data = task.data("train")
    inputs, target = default_collate([data[k] for k in range(samples)])
    if isinstance(inputs, dict):
        return (), inputs, target
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}, target
