"""Built-in tasks: real data that needs no download, and well-known nets on synthetic samples.

Adding one: a module here with `make_task(name, argument)`, which gives what follows
`profiles.tasks.task.Task`, and a line in MODULES.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

from ..tasks.task import Task

MODULES = {
    "alexnet": "alexnet",
    "bert-base": "bert",
    "bert-large": "bert",
    "densenet121": "densenet",
    "digits": "digits",
    "gnmt": "gnmt",
    "gpt2": "gpt2",
    "gpt2-large": "gpt2",
    "gpt2-medium": "gpt2",
    "gpt2-xl": "gpt2",
    "hf": "hf",
    "inception_v3": "inception",
    "mlp": "mlp",
    "resnet101": "resnet",
    "resnet152": "resnet",
    "resnet18": "resnet",
    "resnet50": "resnet",
    "text": "text",
    "vgg11": "vgg",
    "vgg16": "vgg",
    "vgg19": "vgg",
}
"""The module here that makes each task."""


def _make(name: str, argument: str | None) -> Task:
    # Imported when asked for: a command that names one needs no other.
    task: Task = import_module(f".{MODULES[name]}", __name__).make_task(name, argument)
    return task


BUILT_IN: dict[str, Callable[[str | None], Task]] = {name: partial(_make, name) for name in MODULES}
"""Maker of each built-in task; it gets what stands behind the colon of the target, if anything."""
