"""What several benchmarks need: our commands, tables for pages, the machine in words."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence

from timeprest.profiles.errors import UserError


def command(tool: str, *arguments: object, limit_s: float | None = None) -> None:
    """Run tp-profile, tp-plan or tp-run. Raises UserError with its last words."""
    line = [sys.executable, "-m", f"timeprest.cli.{tool}", *map(str, arguments)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise UserError(f"tp-{tool}: took more than {limit_s:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError("".join(last) or f"tp-{tool} failed")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def head_of(headings: Sequence[str]) -> list[str]:
    """A long table's first lines, whose rows are printed as they come."""
    return [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]


def machine() -> str:
    """``2 cores (x86_64), Python 3.13.1``."""
    return f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"


def around(head: str, results: Sequence[str]) -> list[str]:
    """A page's parts: what is written by hand up to its first section, the results, then how they
    were made."""
    first, mark, how = head.rstrip().partition("\n## ")
    return [first.rstrip(), *results, *([mark.lstrip() + how] if mark else [])]
