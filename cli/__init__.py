"""The command lines. Each begins here, with nothing loaded yet that takes time."""

from __future__ import annotations

import sys
from importlib import import_module


def tp_profile() -> None:
    """The command ``tp-profile``."""
    _begin("profile")


def tp_plan() -> None:
    """The command ``tp-plan``."""
    _begin("plan")


def tp_run() -> None:
    """The command ``tp-run``."""
    _begin("run")


def _begin(name: str) -> None:
    """Load a command and run it. Ctrl-C ends it with code 130 while it is loaded, too."""
    try:
        command = import_module(f"{__name__}.{name}").main
    except KeyboardInterrupt:
        print(f"tp-{name}: stopped", file=sys.stderr)
        sys.exit(130)
    command()
