"""Plugins: the one way to what the core doesn't know by itself, found by kind and name.

Of each kind of `KINDS` there are what plugins have that were given as Python files (`--plugin`,
`timeprest.plugin`), in a table named after the kind (`TARGETS`), and what installed packages name
in the entry-point group of the kind ("timeprest.targets"): this package's own setup.cfg among
them. Names alone are listed without loading anything. docs/plugins.md says what each kind is.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .errors import PluginError, StoppedError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_T = TypeVar("_T")

Kind = Literal[
    "systems",
    "tasks",
    "targets",
    "objects",
    "importers",
    "front_ends",
    "engines",
    "logs",
    "formats",
    "judges",
    "transports",
    "views",
    "commands",
    "api",
]

KINDS: Mapping[Kind, str] = {
    # A file's SYSTEMS, or an entry point's module with SYSTEMS: `planner.systems.variants`.
    "systems": "system",
    # (name, what stands behind the target's colon or None) -> `Task`
    "tasks": "task",
    # By a file's suffix: (file, its `InputSpec`s) -> `Target`
    "targets": "kind of target",
    # By a library's name: (object of one of its classes) -> that itself, or a task in its place
    "objects": "library of objects",
    # By a file's suffix: (file, batch size or None, micro-batch sizes or None) -> `Profile`
    "importers": "importer",
    # (model, `Call`, granularity) -> `TracedModel`
    "front_ends": "front end",
    # (plan, what looks at its model) -> `EngineFiles`
    "engines": "engine",
    # (folder, `RunBegun`) -> `MetricLog`
    "logs": "log",
    # (`Weights`, folder, bytes of a file at most or None) -> how many files
    "formats": "format",
    # (`Planning`, file) -> `Judge` of plans
    "judges": "judge",
    # (`Connection`) -> `PeerChannels`
    "transports": "transport",
    # What shows profiles, plans and runs: `Views`
    "views": "view",
    # A click.Command; "plan.NAME" is `tp-plan NAME`.
    "commands": "command",
    # `timeprest.NAME`
    "api": "function of the package",
}
"""What each kind is to be, and what messages call one of it."""

GROUP = "timeprest.systems"
"""The entry points of systems: those are modules, whose names are no systems'."""

VARIABLE = "TIMEPREST_PLUGINS"
"""The environment variable with the files of plugins: processes that this one starts load them."""

PACKAGE = "package "
"""Before the name of an entry point, where a plugin is named."""

_SETUP = Path(__file__).resolve().parents[1] / "setup.cfg"
"""Of a checkout: what it installs may be older than its code."""

_PACKAGE = __name__.partition(".")[0]

_FILES: dict[str, Any] = {}
"""The module of each file, by its path."""


def names(kind: Kind) -> list[str]:
    """What there is of a kind; nothing is loaded but files of plugins. Raises PluginError for one
    that can't be."""
    return list(_loaders(kind))


def load(kind: Kind, name: str) -> Any:
    """What has this name. Raises PluginError where there is none, or it can't be loaded."""
    loaders = _loaders(kind)
    if name not in loaders:
        known = ", ".join(loaders) or "none"
        raise PluginError(f"no {KINDS[kind]} is called {name!r}; there are {known}")
    return call_plugin(f"{KINDS[kind]} {name}", loaders[name])


def make(kind: Kind, name: str, *arguments: Any, gives: type = object) -> Any:
    """What one makes of these. Raises PluginError as `load` and `made`."""
    return made(f"{KINDS[kind]} {name}", load(kind, name), *arguments, gives=gives)


def made(what: str, made_by: Any, *arguments: Any, gives: type) -> Any:
    """Raises PluginError naming `what` where it doesn't take these, or gives something else."""
    try:
        inspect.signature(made_by).bind(*arguments)
    except TypeError as error:
        given = f"{len(arguments)} argument{'s' * (len(arguments) != 1)}"
        raise PluginError(f"{what}: can't be called with {given}: {error}") from None
    except ValueError:  # some that are built in don't say what they take
        pass
    found = made_by(*arguments)
    if not isinstance(found, gives):
        raise PluginError(f"{what}: gives a {type(found).__name__}; give {gives.__name__}")
    return found


def _loaders(kind: Kind, but: str = "") -> dict[str, Callable[[], Any]]:
    """How each is had; of all plugins but one file's."""
    found: dict[str, Callable[[], Any]] = {}
    for path in plugins_given():
        table = _table(load_file(path), kind) if path != but else {}
        for name, value in table.items():
            found.setdefault(name, functools.partial(lambda value: value, value))
    for point in _entry_points(kind):
        found.setdefault(point.name, point.load)
    return found


def _entry_points(kind: Kind) -> list[EntryPoint]:
    from importlib.metadata import distribution

    own = _own_entry_points()
    packages = {name: None for path in sys.path for name in _plugins_in(path, _changed_ns(path))}
    every = list(own or ())
    for name in packages:
        if own is None or name != _PACKAGE:
            # Of a package that is in several folders, the first one is imported.
            every += distribution(name).entry_points
    return [point for point in every if point.group == f"timeprest.{kind}"]


def _changed_ns(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=256)
def _plugins_in(folder: str, changed_ns: int) -> tuple[str, ...]:
    """Names of the packages in a folder of `sys.path` that have entry points of any kind of ours.

    Their files, which take 10 ms, are read again when the folder has changed.
    """
    from importlib.metadata import distributions

    return tuple(
        package.name
        for package in distributions(path=[folder])
        if any(point.group.startswith("timeprest.") for point in package.entry_points)
    )


@functools.cache
def _own_entry_points() -> tuple[EntryPoint, ...] | None:
    """Those of this checkout's setup.cfg; None where the package is no checkout."""
    from configparser import ConfigParser
    from importlib.metadata import EntryPoint

    config = ConfigParser(delimiters=("=",))
    if not config.read(_SETUP, encoding="utf-8"):
        return None
    return tuple(
        EntryPoint(name.strip(), value.strip(), group)
        for group, lines in config["options.entry_points"].items()
        for name, _, value in (line.partition("=") for line in lines.strip().splitlines())
    )


# Plugins that are files, or modules of packages -------------------------------------------------


def load_file(plugin: str) -> Any:
    """The module of a file; it is loaded once, and by processes that this one starts, too.

    Raises PluginError naming file and line: it isn't there, fails, has nothing of any kind, or a
    name that is taken.
    """
    path = str(Path(plugin).resolve())
    if path not in _FILES:
        module = call_plugin(plugin, lambda: _of_file(plugin))
        if not any(hasattr(module, kind.upper()) for kind in KINDS):
            others = ", ".join(kind.upper() for kind in KINDS if kind != "systems")
            raise PluginError(
                f"{plugin}: has no SYSTEMS, a list of rows, and none of {others} (docs/plugins.md)"
            )
        for kind in KINDS:
            _check_table(plugin, path, module, kind)
        _FILES[path] = module
    given = plugins_given()
    if path not in given:
        os.environ[VARIABLE] = json.dumps([*given, path])
    return _FILES[path]


def forget(plugin: str) -> None:
    """Have a file loaded anew, should it be given again."""
    path = str(Path(plugin).resolve())
    _FILES.pop(path, None)
    if path in plugins_given():
        os.environ[VARIABLE] = json.dumps([other for other in plugins_given() if other != path])


def module_of(plugin: str) -> Any:
    """The module of a file, or of "package NAME", the name of an entry point for systems.

    Raises PluginError as `load_file`, and where no package has it.
    """
    name = plugin.removeprefix(PACKAGE)
    if name == plugin:
        return load_file(plugin)
    found = [point for point in _entry_points("systems") if point.name == name]
    if not found:
        raise PluginError(f"no installed package has the entry point {name!r} of {GROUP}")
    return call_plugin(plugin, found[0].load)


def checksum_of(module: Any) -> str:
    """Of a plugin's file; empty where there is none."""
    file = getattr(module, "__file__", None)
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ""
    except OSError:  # a module in an archive
        return ""


def _table(module: Any, kind: Kind) -> Mapping[str, Any]:
    if kind == "systems":
        return {}
    found: Mapping[str, Any] = getattr(module, kind.upper(), {})
    return found


def _check_table(plugin: str, path: str, module: Any, kind: Kind) -> None:
    table, where = _table(module, kind), f"{plugin}: {kind.upper()}"
    if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
        raise PluginError(f"{where}: give a dict of names (docs/plugins.md)")
    taken = _loaders(kind, path) if table else {}
    for name in table:
        if name in taken:
            raise PluginError(f"{where}: {KINDS[kind]} {name!r} is there already")


def _of_file(plugin: str) -> Any:
    path = Path(plugin)
    if not path.is_file():
        raise PluginError(f"{plugin}: no such file")
    module = import_file(path, f"timeprest_plugin_{path.stem}")
    if module is None:
        raise PluginError(f"{plugin}: can't be imported as Python; give a file.py")
    return module


def import_file(path: Path, name: str) -> ModuleType | None:
    """The module of that name that a file's code makes; None for a file that isn't Python's."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def call_plugin(plugin: str, run: Callable[[], _T], part: str = "") -> _T:
    """What the code of a plugin, or of a part of it, gives. Raises PluginError where it fails, or
    would end the program."""
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
    """Plugins for systems that installed packages have."""
    return [f"{PACKAGE}{point.name}" for point in _entry_points("systems")]
