"""What the image classifiers of the zoo share: their arguments and their task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from .arguments import check, parse
from .synthetic import SyntheticTask, class_accuracy, class_loss, images, sgd


@dataclass(frozen=True)
class ImageSettings:
    """Side of the square images in pixels, and number of classes."""

    size: int = 224
    classes: int = 1000


def image_task(
    name: str,
    argument: str | None,
    build: Callable[[ImageSettings], nn.Module],
    *,
    least: int,
    size: int = 224,
    rate: float = 0.01,
    criterion: Callable[[Any, Tensor], Tensor] = class_loss,
    correct: Callable[[Any, Tensor], Tensor] = class_accuracy,
) -> SyntheticTask:
    """The task of an image classifier, trained with SGD.

    Args:
        name: of the target; argument: what stands behind its colon.
        build: makes the net.
        least: side of the smallest image that the net takes; size: the usual side.
        rate: learning rate.

    Raises:
        TargetError: the argument can't be read or asks for what can't be.
    """
    settings = parse(name, argument, ImageSettings(size))
    small = f"size={settings.size} is too small: {least} is the least"
    check(name, settings, settings.size >= least, small)
    return SyntheticTask(
        build=lambda: build(settings),
        sampler=images(settings.size, settings.classes),
        criterion=criterion,
        correct=correct,
        make_optimizer=partial(sgd, rate=rate),
    )
