"""Training systems from outside: rows of the table, with rules, in a file or package of a user's.

A plugin is a Python file, or a module that an installed package names in the entry-point group
"timeprest.systems". Its `SYSTEMS` are rows (`Variant`); a row has an `Outside` for what no row of
the table can say. The file itself shouldn't import torch where planning is to do without: rules
are made in the process that trains. docs/plugins.md shows one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...profiles.errors import PluginError, StoppedError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_T = TypeVar("_T")

GROUP = "timeprest.systems"
"""Entry points of installed packages."""

VARIABLE = "TIMEPREST_PLUGINS"
"""The environment variable with the files of plugins: processes that this one starts load them."""

PACKAGE = "package "
"""Before the name of an entry point, where a plugin is named."""


@dataclass(frozen=True)
class StageContext:
    """What a rule may know of its stage.

    Attributes:
        stage: its number, 0 the input side.
        stages: S.
        micro_batches: N.
        replicas: of the stage.
        updates: that the run will make; None while planning.
        delay: d, the stage's largest version difference in the steady state; None while planning.
    """

    stage: int
    stages: int
    micro_batches: int
    replicas: int = 1
    updates: int | None = None
    delay: int | None = None


class StageRules:
    """What a system does with one stage's weights; made once in each process that trains it.

    Attributes:
        context: of the stage.
        parameters: that it trains.
        kept: state by a name, per parameter: it is accounted for as weight versions are, and saved
            in checkpoints. All tensors are there from the beginning, for parameters of these.
    """

    def __init__(self, context: StageContext, parameters: Sequence[nn.Parameter]) -> None:
        self.context = context
        self.parameters = tuple(parameters)
        self.kept: dict[str, dict[nn.Parameter, Tensor]] = {}

    def rate(self, update: int) -> float:
        """Of the learning rate, what an update has, counted from 0."""
        return 1.0

    def before_update(self) -> None:
        """The optimizer is about to step; gradients are there."""

    def after_update(self) -> None:
        """It has stepped."""

    def forward_weights(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights of a forward ("outside" `forward_weights`).

        Args:
            updates: how far ahead of the latest version, above 0, as the row's `horizon` counts.
            into: a tensor for each parameter.
        """
        raise NotImplementedError

    def backward_weights(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights of a backward ("outside" `backward_weights`).

        Args:
            updates: made since its forward, above 0; without any it runs on the latest weights.
            into: a tensor for each parameter.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Outside:
    """What a system from outside does that no row of the table says.

    Attributes:
        rules: makes a stage's; None: none are needed.
        update: the optimizer to step, from the user's.
        copies: of a stage's parameters that are held besides weight versions: what rules keep, and
            one that "outside" weights are written to.
        plugin: where it is from; filled in.
        checksum: of that file's content, or of the package's module; filled in.
    """

    rules: Callable[[StageContext, Sequence[nn.Parameter]], StageRules] | None = None
    update: Callable[[StageContext, Optimizer], Optimizer] | None = None
    copies: Callable[[StageContext], int] = lambda _: 0
    plugin: str = field(default="", compare=False)
    checksum: str = field(default="", compare=False)

    @property
    def acts(self) -> bool:
        """Whether anything of it runs while training; the row is one of known words else."""
        return self.rules is not None or self.update is not None

    def copies_on(self, context: StageContext) -> int:
        """As declared. Raises PluginError where that fails, or for what is no number of copies."""
        found = call_plugin(
            self.plugin, lambda: self.copies(context), f"copies for stage {context.stage}"
        )
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise PluginError(
                f"{self.plugin}: copies gives {found!r} for stage {context.stage}; give a whole "
                "number from 0"
            )
        return found


def systems_in(plugin: str) -> tuple[Sequence[Any], str]:
    """The `SYSTEMS` of a plugin, of a file or of "package NAME"; and a checksum of what is there.

    Raises PluginError naming plugin and line: it isn't there, fails, or has none.
    """
    name = plugin.removeprefix(PACKAGE)
    if name != plugin:
        found = [point for point in entry_points(group=GROUP) if point.name == name]
        if not found:
            raise PluginError(f"no installed package has the entry point {name!r} of {GROUP}")
        module = call_plugin(plugin, found[0].load)
    else:
        module = call_plugin(plugin, lambda: _of_file(plugin))
    systems = getattr(module, "SYSTEMS", None)
    if not isinstance(systems, (list, tuple)) or not systems:
        raise PluginError(f"{plugin}: has no SYSTEMS, a list of rows (docs/plugins.md)")
    return systems, _checksum(getattr(module, "__file__", None))


def _checksum(file: str | None) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ""
    except OSError:  # a module in an archive, or without a file
        return ""


def _of_file(plugin: str) -> Any:
    path = Path(plugin)
    if not path.is_file():
        raise PluginError(f"{plugin}: no such file")
    name = f"timeprest_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{plugin}: can't be imported as Python; give a file.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def call_plugin(plugin: str, run: Callable[[], _T], part: str = "") -> _T:
    """What a plugin's code gives. Raises PluginError where it fails, or would end the program.

    Args:
        part: of the plugin, for the message; it is the whole file otherwise.
    """
    try:
        return run()
    except (PluginError, StoppedError):
        raise
    except (Exception, SystemExit) as error:
        trace, line = error.__traceback__, ""
        while trace is not None:
            if Path(trace.tb_frame.f_code.co_filename).name == Path(plugin).name:
                line = f"line {trace.tb_lineno}: "
            trace = trace.tb_next
        said = str(error).splitlines()
        what = f"{type(error).__name__}: {said[0] if said else ''}".rstrip(": ")
        raise PluginError(f"{plugin}: {line}{part and f'{part}: '}{what}") from error


def remember(plugin: str) -> None:
    """Let processes that this one starts load a file, too."""
    given = plugins_given()
    path = str(Path(plugin).resolve())
    if path not in given:
        os.environ[VARIABLE] = json.dumps([*given, path])


def plugins_given() -> list[str]:
    """The files that the environment names, as JSON: paths may have any character.

    Raises PluginError for something else there.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        found = json.loads(text or "[]")
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(path, str) for path in found):
        raise PluginError(f"{VARIABLE}: {text!r} is no list of files; unset it, and give --plugin")
    return found


def packages() -> list[str]:
    """Plugins of installed packages."""
    return [f"{PACKAGE}{point.name}" for point in entry_points(group=GROUP)]
