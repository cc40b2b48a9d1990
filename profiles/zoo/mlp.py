"""A multilayer perceptron with ReLU."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from .arguments import parse
from .layers import linear
from .synthetic import SyntheticTask, class_accuracy, class_loss, sgd, vectors


@dataclass(frozen=True)
class MLPSettings:
    """Width and number (depth) of the hidden layers, length of an input, number of classes."""

    width: int = 1024
    depth: int = 2
    inputs: int = 784
    classes: int = 10


def mlp(settings: MLPSettings) -> nn.Sequential:
    """Vectors ``[m, inputs]`` → class scores ``[m, classes]``."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    inside = settings.inputs
    for k in range(1, settings.depth + 1):
        layers[f"fc{k}"] = linear(inside, settings.width)
        layers[f"relu{k}"] = nn.ReLU()
        inside = settings.width
    layers[f"fc{settings.depth + 1}"] = linear(inside, settings.classes)
    return nn.Sequential(layers)


def make_task(name: str, argument: str | None) -> SyntheticTask:
    """The task of target `mlp`. Raises TargetError for a wrong argument."""
    settings = parse(name, argument, MLPSettings())
    return SyntheticTask(
        build=lambda: mlp(settings),
        sampler=vectors(settings.inputs, settings.classes),
        criterion=class_loss,
        correct=class_accuracy,
        make_optimizer=sgd,
    )
