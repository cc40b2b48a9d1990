"""Targets: from what the user names (`digits`, `file.py:task`, `pkg.module:factory`) to a model."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from . import plugins
from .errors import FileError, PluginError, TargetError
from .files import is_file, read_limited
from .tasks.hooks import call_hook, described, in_one_line
from .tasks.objects import call_users_code, find, first_names, hooks_of, joined, task_of
from .tasks.prefetch import OwnRandomness
from .tasks.samples import (
    batch_size_of,
    check_whole,
    first_batch,
    first_rows,
    may_vary,
    pick,
    read_batch,
    rows_of,
    some_samples,
)
from .tasks.shapes import LookedAt, look_at_batches, samples_alone
from .tasks.task import Task
from .tracing.call import Call
from .tracing.random_states import seed_everywhere

_BATCH_SIZE = 64


@dataclass(frozen=True)
class InputSpec:
    """A model input given by hand: shape of one sample, dtype, whether that was given, too, and for
    integers their bound; by the name of the forward's argument, or of an ONNX file's input, or by
    position (None)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    high: int = 2
    name: str | None = None
    says_dtype: bool = True

    def sample(self, samples: int) -> Tensor:
        """Random data of shape ``[samples, *shape]``."""
        shape = (samples, *self.shape)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(shape, dtype=self.dtype)
        return torch.randint(0, self.high, shape).to(self.dtype)


_EXPORTED = (
    "torch.export has fixed its mode and its numbers of samples; give the module that was exported "
    "(its weights: module.load_state_dict(program.state_dict))"
)

_NO_GROUP = (
    "(data are the same for all workers, which share each mini-batch among them: leave out "
    "DistributedSampler, and what else asks torch.distributed for this process's part)"
)

_WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pt2")
"""What files of weights, or of exported programs, are called like."""


_MADE, _REUSED = (WeakValueDictionary[int, nn.Module]() for _ in range(2))
"""Models that the user's code has given, and those that it has given more than once, by `id`. It
isn't asked twice to see that: a task may hold on to the module that it gave last."""


def kept_numbers(model: nn.Module) -> Callable[[], None] | None:
    """What gives a module its weights and buffers of now back after a training, and leaves it no
    gradients; None where the user's code wasn't seen to give this very module twice."""
    if _REUSED.get(id(model)) is not model:
        return None
    tensors = [*model.parameters(), *model.buffers()]
    before = [(tensor, tensor.data, tensor.data.clone()) for tensor in tensors]

    def put_back() -> None:
        for tensor, own, numbers in before:
            tensor.data, tensor.grad = own.copy_(numbers), None

    return put_back


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
        # Each worker builds it: a mask of NumPy's numbers must be the same one, too.
        seed_everywhere(seed)
        model = call_users_code(self.name, "building the model", self._factory)
        if not isinstance(model, nn.Module):
            what = "" if self.task is None else "model() "
            more = "" if type(model).__name__ != "ExportedProgram" else f": {_EXPORTED}"
            raise TargetError(
                f"{self.name}: {what}gave {described(model)} where a torch.nn.Module is needed"
                f"{more}"
            )
        for name, module in model.named_modules():
            shown = repr(name) if name else "the model"
            if isinstance(module, fx.GraphModule) and "train" in vars(module):
                # It has one mode for good, and says so whenever another is asked for.
                raise TargetError(
                    f"{self.name}: {shown} is the module of an exported program: {_EXPORTED}"
                )
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise TargetError(
                    f"{self.name}: {shown} has sparse gradients, which can't be measured or sent: "
                    "make it with sparse=False"
                )
            if isinstance(module, nn.SyncBatchNorm):
                # Its group is every process, those of other stages too; on a CPU it fails at once.
                raise TargetError(
                    f"{self.name}: {shown} is a SyncBatchNorm, which would gather from the "
                    "processes of all stages: use BatchNorm, with tp-run --deferred-batch-norm for "
                    "running statistics of whole mini-batches"
                )
            if isinstance(module, torch.jit.ScriptModule) and any(module.state_dict()):
                # A trace goes into its code, which hides what weights it uses: nobody'd train them.
                raise TargetError(
                    f"{self.name}: {shown} is made by torch.jit, which hides its parameters from "
                    "the graph of layers: use the module itself, without torch.jit.script, trace "
                    "or load (its weights: module.load_state_dict(scripted.state_dict()))"
                )
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(tensor):
                raise TargetError(
                    f"{self.name}: {name!r} has no shape before the model's first call (a lazy "
                    "module): give it its sizes, or call the model once where it is built"
                )
        if _MADE.get(id(model)) is model:
            _REUSED[id(model)] = model
        _MADE[id(model)] = model
        # Of a backward that looked at it where it was built; stages begin without.
        model.zero_grad()
        return model

    def call(self, samples: int) -> tuple[Call, Any]:
        """Inputs of the model, each ``[samples, ...]``, and the target (None without a task)."""
        if self.task is None:
            tensors = tuple(spec.sample(samples) for spec in self._inputs)
            return Call(tensors, tuple(spec.name for spec in self._inputs)), None
        return call_users_code(self.name, "collating samples", lambda: self._samples(samples))

    def _samples(self, samples: int) -> tuple[Call, Any]:
        if self._first_batch is not None:
            return first_rows(*self._first_batch, "train", samples)
        data, names = self._training(), self._argument_names
        found: tuple[Call, Any] = call_hook(
            "data('train')", some_samples, data, "train", samples, names
        )
        return found

    def whole_and_parts(self, samples: int) -> tuple[Call, list[Call]] | None:
        """A batch that the data puts together by itself, and its first and last samples; None where
        samples are put together one by one, or it has no whole numbers, that could count in it."""
        if self._first_batch is None:
            return None
        call, _ = self._first_batch
        rows = rows_of(call.tensors, "train")
        # Numbers that may count in all of the batch.
        whole = [t for t in call.tensors if not (t.is_floating_point() or t.is_complex())]
        if rows <= samples or all(tensor.dtype == torch.bool for tensor in whole):
            return None
        ends = torch.arange(samples), torch.arange(rows - samples, rows)
        return call, [call.with_tensors(pick(call.tensors, end, rows)) for end in ends]

    def look_at_batches(self, mini_batch: int, most: int | None = None) -> LookedAt | None:
        """Look at the shapes of the training data's first mini-batches; None where they can't
        differ, or there are none. Arguments and errors as of `tasks.shapes.look_at_batches`."""
        if self._first_batch is None:
            return None
        like, names = self._first_batch[0], self._argument_names

        def look() -> LookedAt | None:
            training = self._training()
            sets = []
            if getattr(training, "own_lengths", False):
                assert self.task is not None
                sets = [training, self.task.data("test")]
            alone = samples_alone(sets, names)
            return look_at_batches(training, mini_batch, like, names, most, alone)

        return call_users_code(self.name, "loading mini-batches", look)

    def _training(self) -> Any:
        task = self.task
        assert task is not None
        try:
            found = call_users_code(self.name, "data('train')", lambda: task.data("train"))
        except TargetError as error:
            if "process group" not in str(error):
                raise
            raise TargetError(f"{error} {_NO_GROUP}") from error
        check_whole(found, "train")
        return found

    @functools.cached_property
    def _first_batch(self) -> tuple[Call, Any] | None:
        """A mini-batch of data whose mini-batches may differ in shape: samples of one are alike."""
        if self.task is None or not may_vary(data := self._training()):
            return None
        return call_users_code(
            self.name,
            "collating samples",
            lambda: read_batch(first_batch(data, "train", _BATCH_SIZE), self._argument_names),
        )

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

    def _argument_names(self, keys: Collection[str]) -> Sequence[str]:
        """Which of a batch's keys are names of the model's arguments. Raises TargetError."""
        named, others = self._parameters
        found = sorted(named.intersection(keys))
        if not found and others:
            return sorted(keys)
        if not found:
            given, wanted = joined(sorted(map(str, keys))), joined(sorted(named) or ["nothing"])
            raise TargetError(
                f"{self.name}: data(split): samples are dicts of {given}, and the model's "
                f"forward takes {wanted}: name entries as its arguments are, or make samples pairs "
                "(inputs, target)"
            )
        return found

    @functools.cached_property
    def _parameters(self) -> tuple[set[str], bool]:
        """Names of the forward's arguments, and whether it takes any others by name."""
        with OwnRandomness(0)():
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
        # ONNX names its inputs as it likes ("x.1"); arguments of Python are `resolve`'s to check.
        if high < 1 or (equals and not name.strip()):
            raise ValueError
    except (ValueError, AttributeError):
        raise TargetError(
            f"--input {text!r}: write the shape of one sample and a dtype, like 3x32x32:float32, "
            "64:int64:1000 for integers below 1000, or with the argument's name mask=64:int64"
        ) from None
    return InputSpec(shape, dtype, high, name or None, len(parts) > 1)


TASK_NEEDED = (
    "training needs data, a loss and an optimizer too; write a task whose model() makes this model "
    "(docs/tasks.md; model = timeprest.onnx(FILE) for an ONNX file), and profile that, or name it "
    "with tp-run --task"
)
"""What to do about a model that is to be trained."""


def resolve(name: str, inputs: Sequence[InputSpec] = (), *, to_train: bool = False) -> Target:
    """Find the target.

    Args:
        name: a built-in task (``digits``, ``text``, ``text:FILE``), ``file.py:name`` or
            ``pkg.module:name``, where name is a task, a task class, a model class or factory;
            a file of a model, such as ONNX; or ``session:name`` for an object of this process
            (`tasks.objects`).
        inputs: for targets that aren't tasks, what the model takes.
        to_train: it should be a task; of a model the message says so, not that inputs are missing.

    Raises:
        TargetError: it can't be imported or built; the message says where and why.
    """
    # Those that go by position come first, as in any call.
    inputs = sorted(inputs, key=lambda spec: spec.name is not None)
    head, _, tail = name.partition(":")
    if head in plugins.names("tasks"):
        task = plugins.make("tasks", head, head, tail or None)
        if not hooks_of(task):
            raise PluginError(f"task {head}: gives a {type(task).__name__}; give a task")
        return _of_task(name, task, inputs)
    suffix = Path(name).suffix
    if suffix in plugins.names("targets"):
        if to_train:
            raise TargetError(f"{name}: is a model, not a task: {TASK_NEEDED}")
        made: Target = plugins.make("targets", suffix, name, inputs, gives=Target)
        return made
    for spec in inputs:
        if spec.name is not None and not spec.name.isidentifier():
            raise TargetError(
                f"{name}: --input {spec.name}=…: no argument can have that name; write the "
                "argument's, like mask=64:int64"
            )
    if head.endswith(_WEIGHTS):
        raise TargetError(
            f"{head}: is called like a file of weights; a target is code that makes the model and "
            "may load them there: file.py:NAME or pkg.module:NAME"
        )
    if not tail:
        raise TargetError(f"{name}: {_why_nothing(name)}")
    found = find(name)
    for library in {kind.__module__.partition(".")[0] for kind in type(found).__mro__}:
        if library in plugins.names("objects"):
            found = plugins.make("objects", library, found)
    task = task_of(name, found, has_inputs=bool(inputs))
    if task is not None:
        return _of_task(name, task, inputs)
    if not callable(found):
        raise TargetError(
            f"{name}: is a {type(found).__name__}; expected a task, a model or a function "
            "that makes a model"
        )
    if not inputs:
        there = hooks_of(found)
        needed = (
            "say what it takes with --input SHAPE:DTYPE for each input, like --input "
            '3x32x32:float32; in Python inputs=["3x32x32:float32"]'
        )
        needed = TASK_NEEDED if to_train else needed
        raise TargetError(
            f"{name}: is a model, not a task: {needed}"
            + (f" (it has {joined(there)}; a task isn't a torch.nn.Module)" if there else "")
        )
    if isinstance(found, nn.Module):
        return Target(name, None, lambda: _copied(name, found), tuple(inputs))
    return Target(name, None, found, tuple(inputs))


def _names_in(path: Path) -> list[str]:
    """Public classes, functions and variables of a Python file, which isn't run: classes first,
    as most tasks are; none where it can't be read."""
    try:
        body = ast.parse(read_limited(path, "")).body
    except (FileError, SyntaxError, ValueError):
        return []
    classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
    others = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    targets = [node.targets[0] for node in body if isinstance(node, ast.Assign)]
    others += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in dict.fromkeys([*classes, *others]) if not name.startswith("_")]


def _why_nothing(name: str) -> str:
    """Why a name without a colon is no target, and what to give."""
    if is_file(Path(name)) and name.endswith(".py"):
        there = _names_in(Path(name))
        more = f"; it has {first_names(there)}" if there else ""
        return f"say what of it is meant, as in {name}:{(there or ['NAME'])[0]}{more}"
    if is_file(Path(name)):
        return (
            "no importer reads such a file: give a plugin that has one, --plugin FILE "
            "(docs/plugins.md)"
        )
    known = ", ".join(sorted(plugins.names("tasks")))
    files = ", ".join(plugins.names("targets"))
    return f"no such target; give {known}, file.py:NAME, pkg.module:NAME or a file ({files})"


def _of_task(name: str, task: Task, inputs: Sequence[InputSpec]) -> Target:
    """A task as a target. Raises TargetError where it is said what its model takes."""
    if inputs:
        raise TargetError(
            f"{name}: is a task, whose data say what its model takes: leave --input out"
        )
    return Target(name, task, task.model, ())


def _copied(name: str, model: nn.Module) -> nn.Module:
    """A copy of the user's own model, which stays as it is: its buffers, gradients, mode, device.
    Raises TargetError."""
    what = f"{name}: can't be copied, and measuring would change it"
    # A copy of real tensors, also where a device that isn't there is reckoned with.
    with in_one_line(what, mend="; give a function that makes it"), _disable_current_modes():
        return copy.deepcopy(model)
