"""Tasks and models given as Python objects: found by their names, in other processes too.

What an importable module or a script has under a name is found by that name again. What else there
is in a session (a class of a notebook, an instance made on the spot) has a name that this process
alone knows, ``session:NAME``; to the workers' processes it goes as bytes (cloudpickle) through
memory. Nothing is ever read from a file that way.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pickle
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from ..errors import TargetError, TaskWarning, UserError, one_line
from ..files import is_file
from ..plugins import import_file
from .hooks import described, in_one_line
from .task import Task

SESSION = "session:"
"""What names of objects begin with that no file has."""

T = TypeVar("T")

_given: dict[str, Any] = {}
_importing: list[tuple[int, str]] = []
"""By thread, of those that go on."""


def name_of(target: object) -> str:
    """The name of a target for `profiles.target.resolve`, and for whoever reads a profile.

    Args:
        target: a name already; or a task, a model, or a class or function that makes one.
    """
    if isinstance(target, str):
        return target
    maker = target if inspect.isclass(target) or inspect.isroutine(target) else type(target)
    module = sys.modules.get(str(getattr(maker, "__module__", None)))
    named_so = {} if module is None else vars(module)
    name = next((name for name, found in named_so.items() if found is target), None)
    if module is not None and name is not None:
        named = _module_name(module)
        if named is not None and (maker is target or _is_imported(f"{named}:{name}", target)):
            return f"{named}:{name}"
    return _given_name(target, getattr(maker, "__name__", "object"))


def _is_imported(name: str, target: object) -> bool:
    """Whether who imports an instance's file gets one like it: a script may make it, or set
    attributes of it, under ``if __name__ == "__main__":``. Of modules that are in no file of the
    user's own it isn't known."""
    if not name.rpartition(":")[0].endswith(".py"):
        return True
    try:
        found = find(name)
    except TargetError:
        return False
    if isinstance(target, nn.Module):
        return repr(target) == repr(found)
    mine, others = _plain_attributes(target), _plain_attributes(found)
    return all(mine[key] == others[key] for key in mine.keys() & others.keys())


def _plain_attributes(target: object) -> dict[str, Any]:
    attributes = getattr(target, "__dict__", {})
    return {k: v for k, v in attributes.items() if isinstance(v, int | float | str | None)}


def _module_name(module: ModuleType) -> str | None:
    """How another process imports a module: by its name or its file; None: it can't."""
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__":
        spec = module.__spec__
        if hasattr(sys, "ps1") or file is None:
            return None
        if spec is not None:  # python -m pkg.module
            return spec.name
        # A script, unless it can't be imported: "<stdin>", or one without .py.
        return file if file.endswith(".py") and is_file(Path(file)) else None
    try:
        spec = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):
        spec = None
    found = spec is not None and spec.origin == file
    if found and ("." in module.__name__ or _is_installed(file)):
        return module.__name__
    # A neighbour of the script, which other processes find by its file alone.
    return str(file) if file is not None and str(file).endswith(".py") else None


def _is_installed(file: str | None) -> bool:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return file is None or any(Path(file).is_relative_to(folder) for folder in folders)


def _given_name(target: object, base: str) -> str:
    for name, found in _given.items():
        if found is target:
            return name
    name, count = SESSION + base, 1
    # A class that a notebook defines anew takes the place of the one before.
    while name in _given and not inspect.isclass(target) and not inspect.isroutine(target):
        count += 1
        name = f"{SESSION}{base}-{count}"
    _given[name] = target
    return name


def give(name: str, target: object) -> None:
    """From now on, this process has this object under a name."""
    _given[name] = target


def given(name: str) -> Any:
    """The object of a name that begins with `SESSION`. Raises TargetError."""
    if name not in _given:
        raise TargetError(
            f"{name}: is an object of the Python session that first used it, and no file has it; "
            "give it again, as task=… of timeprest.Trainer or timeprest.run"
        )
    target = _given[name]
    _given[name] = now = _as_defined_now(target)
    if now is not target:
        warnings.warn(
            f"{name}: has been defined anew since it was given; it is taken as it is now",
            TaskWarning,
            stacklevel=2,
        )
    kinds = inspect.getmro(now if inspect.isclass(now) else type(now))
    old = [kind for kind in kinds if _as_defined_now(kind) is not kind]
    if old:
        warnings.warn(
            f"{name}: is of the class {old[0].__qualname__} as it was before that was defined "
            "anew; for the new one, make it and its profile anew",
            TaskWarning,
            stacklevel=2,
        )
    return now


def _as_defined_now(target: Any) -> Any:
    """What a session has now under the name of a class or function of its own: a cell of a notebook
    that ran once more has defined another. Anything else is as it is."""
    if getattr(target, "__module__", None) != "__main__":
        return target
    now = vars(sys.modules["__main__"]).get(getattr(target, "__qualname__", ""))
    same = all(
        getattr(now, part, None) == getattr(target, part) for part in ("__module__", "__qualname__")
    )
    return now if same and type(now) is type(target) else target


def find(name: str) -> Any:
    """The object of a name ``file.py:NAME``, ``pkg.module:NAME`` or ``session:NAME``. Raises
    TargetError: there is none, or what is imported for it fails."""
    if name.startswith(SESSION):
        return given(name)
    # From the right: a path may hold a colon, a name can't.
    head, _, attribute = name.rpartition(":")
    with importing(name):
        return _attribute(name, _import(name, head), attribute)


def _import(name: str, head: str) -> Any:
    if not head.endswith(".py"):
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return call_users_code(name, "importing it", lambda: importlib.import_module(head))
    path = Path(head)
    if not is_file(path):
        raise TargetError(f"{name}: no such file: {head}")
    # Like a script's folder: the file may import its neighbours.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = f"timeprest_target_{path.stem}"
    return call_users_code(name, "importing it", lambda: import_file(path, module))


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
        shown = first_names(public) or "nothing of its own"
        raise TargetError(f"{name}: there is no {attribute!r} in it; it has {shown}") from None


def first_names(names: Sequence[str]) -> str:
    """The first names of a module's."""
    return ", ".join(names[:8]) + ", …" * (len(names) > 8)


def call_users_code(name: str, doing: str, function: Callable[[], T]) -> T:
    """Run the user's code; its errors become one line with the user's file and line."""
    with in_one_line(f"{name}: {doing} failed"):
        try:
            return function()
        except ModuleNotFoundError as error:
            raise TargetError(f"{name}: {doing}: {error}") from error


# Whether one is a task ----------------------------------------------------------------------------

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
_ALIKE, _VERY_ALIKE = 0.6, 0.8
"""From which ratio of difflib's on a name may be meant for another, where that one is missing, or
needn't be there."""


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


def hooks_of(found: Any) -> list[str]:
    """Which of the methods that make a task it has."""
    return [hook for hook in _HOOKS if hasattr(found, hook)]


def task_of(name: str, found: Any, *, has_inputs: bool) -> Task | None:
    """The task that the object of a name is, or that its class makes; None: it isn't meant as one,
    as where it is said what it takes (`has_inputs`), which a task knows by itself.

    Raises TargetError: it can't be made, or lacks a method that a task must have.
    """
    if not _meant_as_task(found, has_inputs=has_inputs):
        return None
    attribute = name.rpartition(":")[2]
    make: Callable[[], Task] = found
    task = call_users_code(name, f"{attribute}()", make) if inspect.isclass(found) else found
    _check_hooks(name, task)
    return task


def _meant_as_task(found: Any, *, has_inputs: bool) -> bool:
    """Whether it has all that makes a task, or something of it and can't be a model."""
    there = hooks_of(found)
    if len(there) == len(_HOOKS):
        return True
    if inspect.isclass(found):
        # What is still missing, `__init__` may bring.
        return bool(there) and not issubclass(found, nn.Module)
    makes_model = callable(found) and has_inputs
    return bool(there) and not isinstance(found, nn.Module) and not makes_model


def _check_hooks(name: str, task: Any) -> None:
    """Raises TargetError naming a method that a task must have and this one hasn't."""
    missing = [hook for hook in _HOOKS if not hasattr(task, hook)]
    if missing:
        meant = {hook: found[0] for hook in missing if (found := _alike(task, hook, _ALIKE))}
        mend = [f"rename {there!r} to {hook}" for hook, there in meant.items()]
        if len(meant) < len(missing):
            mend.append(f"write {joined([_HOOKS[hook] for hook in missing if hook not in meant])}")
        raise TargetError(
            f"{name}: is a task without {joined([_HOOKS[hook] for hook in missing])}: "
            f"{joined(mend)} (docs/tasks.md)"
        )
    for hook, call in _HOOKS.items():
        found = getattr(task, hook)
        if isinstance(found, nn.Module) and hook == "model":
            raise TargetError(
                f"{name}: model is a {type(found).__name__}, not a method: write model() so that "
                "it makes a new one each time (docs/tasks.md)"
            )
        if not callable(found):
            raise TargetError(
                f"{name}: {hook} is {described(found)}, not a method: write {call} (docs/tasks.md)"
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


def joined(words: Sequence[str]) -> str:
    """Words as a sentence lists them."""
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


# To other processes -----------------------------------------------------------------------------


def as_bytes(name: str) -> bytes | None:
    """An object of this session for another process of this program; None: that finds the target
    by its name.

    Raises TargetError when it can't be sent, UserError without cloudpickle.
    """
    if not name.startswith(SESSION):
        return None
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise UserError(
            f"{name}: is in no file, so that other processes need cloudpickle for it: in the "
            "checkout, pip install -e '.[notebook]'; or put it in a file, or train inline"
        ) from None
    mend = "; make it in the task's own methods, put the task in a file, or train inline"
    with in_one_line(f"{name}: can't be sent to the workers' processes", mend=mend, text=one_line):
        # The path first: what modules have is found by it.
        return pickle.dumps((sys.path, cloudpickle.dumps(given(name))))


def give_bytes(name: str, content: bytes) -> None:
    """Have the object that this program's first process has made bytes of. Raises TargetError."""
    mend = "; put the task in a file, or train inline"
    with in_one_line(f"{name}: can't be made in a worker's process", mend=mend):
        path, inside = pickle.loads(content)
        sys.path += [folder for folder in path if folder not in sys.path]
        give(name, pickle.loads(inside))


# Scripts that are imported ------------------------------------------------------------------------


@contextmanager
def importing(name: str) -> Iterator[None]:
    """A target's module is being imported."""
    here = threading.get_ident(), name
    _importing.append(here)
    try:
        yield
    finally:
        _importing.remove(here)


def check_not_importing(what: str) -> None:
    """Raise UserError where a script would do this whenever it is imported, in workers too."""
    here = [name for thread, name in _importing if thread == threading.get_ident()]
    if here:
        raise UserError(
            f"{here[-1]}: calls {what} when it is imported, as every worker does; put that "
            'under if __name__ == "__main__":'
        )
