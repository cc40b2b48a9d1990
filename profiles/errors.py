"""Every error of TiMePReSt, drawn once.

    TimeprestError          exit code 1
    ├── UserError           exit code 2: bad input; the message says what to do
    │   ├── FileError       a file that is missing, broken or of another kind
    │   ├── TargetError     a model or task that can't be imported or built
    │   ├── TraceError      a model that can't be traced
    │   ├── PlanError       a plan that contradicts its profile, its model or itself
    │   │   └── OrderError  an order of the user's that breaks a rule
    │   ├── PluginError     a system from outside that is missing, fails or breaks a rule
    │   └── InfeasibleError no plan fits the limits
    ├── ScheduleError       an order that breaks its rules (a bug here, or an edited plan)
    └── RunError            training failed: a worker died or got stuck, or the user's code raised
        └── StoppedError    a signal from outside ended it
    TaskWarning             no error: something may be meant otherwise than it is taken

Messages are one line: what is wrong, where, and what to do about it. Where the user's code failed,
it is their line that is named (`is_users`).
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


class TimeprestError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class UserError(TimeprestError):
    """The input is at fault; the message names the file, field or layer and the mend."""

    exit_code = 2


class FileError(UserError):
    """A file is missing, unreadable, broken, or of another kind than expected."""


class TargetError(UserError):
    """A model or a task can't be imported or built."""


class TraceError(UserError):
    """A model can't be traced; the message names the user's file and line."""


class TaskWarning(UserWarning):
    """Something in a task may be meant otherwise than it is taken."""


class PlanError(UserError):
    """A plan contradicts its profile, its model or itself."""


class PluginError(UserError):
    """A system from outside is missing, fails, or breaks a rule; names the plugin and the line."""


class OrderError(PlanError):
    """An order of operations that a user gave breaks a rule; names file, line and operation."""


class InfeasibleError(UserError):
    """No plan fits the limits. In the plan that came closest, stage `stage` lacks `missing_bytes`
    of its device's memory; both are None when memory isn't what is in the way."""

    def __init__(
        self, message: str, *, stage: int | None = None, missing_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.missing_bytes = missing_bytes


class ScheduleError(TimeprestError):
    """An order breaks its own rules: a missing message, a cycle, a micro-batch twice."""


class RunError(TimeprestError):
    """Training failed; the message says which rank, at which operation, and why."""


class StoppedError(RunError):
    """A signal from outside ended the run; the message names it."""


def one_line(error: BaseException) -> str:
    """The text of an error; its kind, where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


_PACKAGES = (Path(__file__).parents[1], Path(__file__).resolve().parents[1])
"""Ours, under either name where it is reached by a link."""


def is_ours(file: str) -> bool:
    """Whether a file, as tracebacks name it, is of this toolkit."""
    folders = ("profiles", "planner", "runtime", "cli")
    return any(Path(file).is_relative_to(package / f) for package in _PACKAGES for f in folders)


def is_users(file: str, *, models: bool = False) -> bool:
    """Whether a file, as tracebacks name it, is the user's: not ours, Python's or a library's.
    `models`: where a model's line is looked for, those of libraries and of our zoo are, too."""
    ours = ["profiles/tracing"] if models else ["profiles", "planner", "runtime", "cli"]
    libraries = ["stdlib"] if models else ["stdlib", "purelib", "platlib"]
    others = [package / folder for package in _PACKAGES for folder in ours]
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is not None:
        # Which an environment may have by a link.
        others.append(Path(torch).parent)
    if not (models and "site-packages" in file):
        others += [Path(sysconfig.get_path(name)) for name in libraries]
    return not file.startswith("<") and not any(map(Path(file).is_relative_to, others))
