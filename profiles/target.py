"""Targets: from what the user names (`digits`, `file.py:task`, `pkg.module:factory`) to a model."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import TargetError, TimeprestError
from .files import is_file
from .tasks.hooks import describe_error, is_ctrl_c
from .tasks.loaders import batch_size_of, first_batch, may_vary, rows_among, some_samples
from .tasks.objects import SESSION, given, importing
from .tasks.shapes import LookedAt, look_at_batches
from .tasks.task import Task, read_batch
from .tracing.call import Call
from .zoo import BUILT_IN
from .zoo.hf_model import is_config

_HOOKS = {
    "model": "model()",
    "data": "data(split)",
    "loss": "loss(output, target)",
    "optimizer": "optimizer(parameters)",
}
"""What makes a task, as it is called."""
_OPTIONAL_HOOKS = {
    "metrics": "metrics(output, target)",
    "parameter_groups": "parameter_groups(named_parameters)",
    "scheduler": "scheduler(optimizer)",
    "figures": "figures(means)",
    "scheduler_step": 'scheduler_step = "epoch"',
}
_BATCH_SIZE = 64
_ALIKE, _VERY_ALIKE = 0.6, 0.8
"""From which ratio of difflib's on a name may be meant for another, where that one is missing, or
needn't be there."""


@dataclass(frozen=True)
class InputSpec:
    """A model input given by hand: shape of one sample, dtype, and for integers their bound.

    Attributes:
        name: of the forward's argument; None: by position.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    high: int = 2
    name: str | None = None

    def sample(self, samples: int) -> Tensor:
        """Random data of shape ``[samples, *shape]``."""
        shape = (samples, *self.shape)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(shape, dtype=self.dtype)
        return torch.randint(0, self.high, shape).to(self.dtype)


@dataclass(frozen=True)
class Target:
    """A model that can be profiled, and trained where `task` isn't None.

    Attributes:
        front_end: the only one that the model is for; None: they are tried in order.
    """

    name: str
    task: Task | None
    _factory: Callable[[], Any]
    _inputs: tuple[InputSpec, ...]
    front_end: str | None = None

    def model(self, seed: int = 0) -> nn.Module:
        """Build the model with its initial weights for this seed. Raises TargetError."""
        torch.manual_seed(seed)
        model = _call(self.name, "building the model", self._factory)
        if not isinstance(model, nn.Module):
            given = "None" if model is None else f"a {type(model).__name__}"
            what = "" if self.task is None else "model() "
            raise TargetError(f"{self.name}: {what}gave {given} where a torch.nn.Module is needed")
        return model

    def sample(self, samples: int) -> tuple[tuple[Tensor, ...], Any]:
        """Inputs of the model, each ``[samples, ...]``, and the target (None without a task)."""
        call, target = self.call(samples)
        return call.tensors, target

    def call(self, samples: int) -> tuple[Call, Any]:
        """Like `sample`, with the names of the arguments that the inputs are for."""
        if self.task is None:
            tensors = tuple(spec.sample(samples) for spec in self._inputs)
            return Call(tensors, tuple(spec.name for spec in self._inputs)), None
        if self._first_batch is not None:
            return rows_among(*self._first_batch, "train", samples)
        batch: tuple[Call, Any] = _call(
            self.name,
            "collating samples",
            lambda: some_samples(self._training(), "train", samples, self._arguments_among),
        )
        return batch

    def look_at_batches(self, mini_batch: int, most: int | None = None) -> LookedAt | None:
        """Look at the shapes of the training data's first mini-batches; None where they can't
        differ, or there are none. Arguments and errors as of `tasks.shapes.look_at_batches`."""
        if self._first_batch is None:
            return None
        like, names = self._first_batch[0], self._arguments_among
        found: LookedAt | None = _call(
            self.name,
            "loading mini-batches",
            lambda: look_at_batches(self._training(), mini_batch, like, names, most),
        )
        return found

    def _training(self) -> Any:
        """The training data. Raises TargetError."""
        task = self.task
        assert task is not None
        return _call(self.name, "data('train')", lambda: task.data("train"))

    @functools.cached_property
    def _first_batch(self) -> tuple[Call, Any] | None:
        """A mini-batch of data whose mini-batches may differ in shape: samples of one are alike."""
        if self.task is None or not may_vary(data := self._training()):
            return None
        batch: tuple[Call, Any] = _call(
            self.name,
            "collating samples",
            lambda: read_batch(first_batch(data, "train", _BATCH_SIZE), self._arguments_among),
        )
        return batch

    @property
    def batch_size(self) -> int:
        """Samples in a mini-batch where nothing else is said: the data's own, or 64.

        Raises TargetError where `data` does.
        """
        return self.loader_batch_size or _BATCH_SIZE

    @functools.cached_property
    def loader_batch_size(self) -> int | None:
        """Samples in a batch of the training data's DataLoader; None where there is none, or it
        doesn't say. Raises TargetError where `data` does."""
        return None if self.task is None else batch_size_of(self._training())

    def _arguments_among(self, keys: Collection[str]) -> Sequence[str]:
        """Which of a batch's keys are names of the model's arguments. Raises TargetError."""
        named, others = self._parameters
        found = sorted(named.intersection(keys))
        if not found and others:
            return sorted(keys)
        if not found:
            given, wanted = _joined(sorted(map(str, keys))), _joined(sorted(named) or ["nothing"])
            raise TargetError(
                f"{self.name}: data(split): samples are dicts of {given}, and the model's "
                f"forward takes {wanted}: name entries as its arguments are, or make samples pairs "
                "(inputs, target)"
            )
        return found

    @functools.cached_property
    def _parameters(self) -> tuple[set[str], bool]:
        """Names of the forward's arguments, and whether it takes any others by name."""
        with torch.random.fork_rng(devices=[]):
            try:
                with torch.device("meta"):
                    model = self.model()
            except TargetError:  # some can't be made without numbers
                model = self.model()
        parameters = inspect.signature(model.forward).parameters.values()
        any_kind = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return (
            {p.name for p in parameters if p.kind not in any_kind},
            any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters),
        )


def parse_input(text: str) -> InputSpec:
    """``"3x32x32:float32"``, ``"64:int64:1000"`` (integers below 1000) or ``"mask=64:int64"``.

    Raises TargetError when the text can't be read.
    """
    name, equals, described = text.rpartition("=")
    parts = described.split(":")
    try:
        shape = tuple(int(size) for size in parts[0].split("x") if size)
        dtype = getattr(torch, parts[1] if len(parts) > 1 else "float32")
        high = int(parts[2]) if len(parts) > 2 else 2
        if not isinstance(dtype, torch.dtype) or min(shape, default=1) < 1 or len(parts) > 3:
            raise ValueError
        if high < 1 or (equals and not name.isidentifier()):
            raise ValueError
    except (ValueError, AttributeError):
        raise TargetError(
            f"--input {text!r}: write the shape of one sample and a dtype, like 3x32x32:float32, "
            "64:int64:1000 for integers below 1000, or with the argument's name mask=64:int64"
        ) from None
    return InputSpec(shape, dtype, high, name or None)


TASK_NEEDED = (
    "training needs data, a loss and an optimizer too; write a task whose model() makes this model "
    "(docs/tasks.md), and profile that, or name it with tp-run --task"
)
"""What to do about a model that is to be trained."""


def resolve(name: str, inputs: Sequence[InputSpec] = (), *, to_train: bool = False) -> Target:
    """Find the target.

    Args:
        name: a built-in task (``digits``, ``text``, ``text:FILE``), ``file.py:name`` or
            ``pkg.module:name``, where name is a task, a task class, a model class or factory;
            an ONNX file; or ``session:name`` for an object of this process (`tasks.objects`).
        inputs: for targets that aren't tasks, what the model takes.
        to_train: it should be a task; of a model the message says so, not that inputs are missing.

    Raises:
        TargetError: it can't be imported or built; the message says where and why.
    """
    # Those that go by position come first, as in any call.
    inputs = sorted(inputs, key=lambda spec: spec.name is not None)
    head, _, tail = name.partition(":")
    if head in BUILT_IN:
        task = BUILT_IN[head](tail or None)
        return Target(name, task, task.model, ())
    if name.endswith(".onnx"):
        return _onnx(name, inputs)
    if not tail:
        raise TargetError(
            f"{name}: no such target; give {', '.join(sorted(BUILT_IN))}, file.py:NAME, "
            "pkg.module:NAME or model.onnx"
        )
    # From the right: a path may hold a colon, a name can't.
    head, _, tail = name.rpartition(":")
    if name.startswith(SESSION):
        found = given(name)
    else:
        with importing(name):
            found = _attribute(name, _import(name, head), tail)
    if is_config(found):
        from .zoo.hf import hugging_face

        found = hugging_face(found)
    if _meant_as_task(found, inputs):
        task = _call(name, f"{tail}()", found) if inspect.isclass(found) else found
        _check_hooks(name, task)
        return Target(name, task, task.model, ())
    if not inputs:
        there = [hook for hook in _HOOKS if hasattr(found, hook)]
        needed = "say what it takes with --input SHAPE:DTYPE for each input, like "
        needed = TASK_NEEDED if to_train else needed + "--input 3x32x32:float32"
        raise TargetError(
            f"{name}: is a model, not a task: {needed}"
            + (f" (it has {_joined(there)}; a task isn't a torch.nn.Module)" if there else "")
        )
    if isinstance(found, nn.Module):
        return Target(name, None, lambda: found, tuple(inputs))
    if not callable(found):
        raise TargetError(
            f"{name}: is a {type(found).__name__}; expected a task, a model or a function "
            "that makes a model"
        )
    return Target(name, None, found, tuple(inputs))


def misspelt_hooks(task: Task) -> list[str]:
    """A line for each method that nothing calls, whose name is like that of an optional hook."""
    return [
        f"the task has {meant!r}, which nothing calls: is {_OPTIONAL_HOOKS[hook]} meant? "
        "(docs/tasks.md)"
        for hook in _OPTIONAL_HOOKS
        if not hasattr(task, hook)
        for meant in _alike(task, hook, _VERY_ALIKE)
        if callable(getattr(task, meant)) == (hook != "scheduler_step")
    ]


def _meant_as_task(found: Any, inputs: Sequence[InputSpec]) -> bool:
    """Whether it has all that makes a task, or something of it and can't be a model."""
    there = [hook for hook in _HOOKS if hasattr(found, hook)]
    if len(there) == len(_HOOKS):
        return True
    if inspect.isclass(found):
        # What is still missing, `__init__` may bring.
        return bool(there) and not issubclass(found, nn.Module)
    makes_model = callable(found) and bool(inputs)
    return bool(there) and not isinstance(found, nn.Module) and not makes_model


def _check_hooks(name: str, task: Any) -> None:
    """Raises TargetError naming a method that a task must have and this one hasn't."""
    missing = [hook for hook in _HOOKS if not hasattr(task, hook)]
    if missing:
        meant = {hook: found[0] for hook in missing if (found := _alike(task, hook, _ALIKE))}
        mend = [f"rename {there!r} to {hook}" for hook, there in meant.items()]
        if len(meant) < len(missing):
            mend.append(f"write {_joined([_HOOKS[hook] for hook in missing if hook not in meant])}")
        raise TargetError(
            f"{name}: is a task without {_joined([_HOOKS[hook] for hook in missing])}: "
            f"{_joined(mend)} (docs/tasks.md)"
        )
    for hook, call in _HOOKS.items():
        found = getattr(task, hook)
        if isinstance(found, nn.Module) and hook == "model":
            raise TargetError(
                f"{name}: model is a {type(found).__name__}, not a method: write model() so that "
                "it makes a new one each time (docs/tasks.md)"
            )
        if not callable(found):
            kind = "None" if found is None else f"a {type(found).__name__}"
            raise TargetError(
                f"{name}: {hook} is {kind}, not a method: write {call} (docs/tasks.md)"
            )


def _alike(task: Any, hook: str, ratio: float) -> list[str]:
    """What the task has under a name like this one, the likest first."""
    by_name = {
        name.lower().strip("_"): name
        for name in dir(task)
        if not name.startswith("__") and name not in {**_HOOKS, **_OPTIONAL_HOOKS}
    }
    close = difflib.get_close_matches(hook, by_name, n=3, cutoff=ratio)
    return [by_name[name] for name in close]


def _joined(words: Sequence[str]) -> str:
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def _onnx(name: str, inputs: Sequence[InputSpec]) -> Target:
    """An ONNX file. Inputs given by hand, in its order, replace what it says of its own."""
    from .onnx.file import read_file
    from .onnx.model import import_onnx

    own = tuple(InputSpec(spec.shape, spec.dtype) for spec in read_file(name).inputs)
    if inputs and len(inputs) != len(own):
        raise TargetError(f"{name}: takes {len(own)} inputs, but --input was given {len(inputs)}")
    given = tuple(replace(spec, name=None) for spec in inputs) or own
    # Read again for every model: training must not start from what profiling left behind.
    return Target(name, None, lambda: import_onnx(name).module, given, "onnx")


def _import(name: str, head: str) -> Any:
    if not head.endswith(".py"):
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return _call(name, "importing it", lambda: importlib.import_module(head))
    path = Path(head)
    if not is_file(path):
        raise TargetError(f"{name}: no such file: {head}")
    module_name = f"timeprest_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{name}: {head} can't be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    # Like a script's folder: the file may import its neighbours.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loader = spec.loader
    _call(name, "importing it", lambda: loader.exec_module(module))
    return module


def _attribute(name: str, module: Any, attribute: str) -> Any:
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_")
            and not inspect.ismodule(value)
            and getattr(value, "__module__", module.__name__) == module.__name__
        ]
        shown = ", ".join(public[:8]) or "nothing of its own"
        raise TargetError(f"{name}: there is no {attribute!r} in it; it has {shown}") from None


def _call(name: str, doing: str, function: Callable[[], Any]) -> Any:
    """Run the user's code; its errors become one line with the user's file and line."""
    try:
        return function()
    except TimeprestError:
        raise
    except ModuleNotFoundError as error:
        raise TargetError(f"{name}: {doing}: {error}") from error
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise TargetError(f"{name}: {doing} failed: {describe_error(error)}") from error
