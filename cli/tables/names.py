"""Short names that tell files, folders and systems apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def numbered(names: Sequence[str]) -> list[str]:
    """Names, with numbers where several are the same: ``a (1)``, ``a (2)``, ``b``."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: k + 1].count(name)})"
        for k, name in enumerate(names)
    ]


def names_of_paths(paths: Sequence[str]) -> list[str]:
    """As much of the paths' ends as tells them apart; what is given several times is numbered."""
    parts = [Path(path).resolve().parts for path in paths]
    names: list[str] = []
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-depth:]) for own in parts]
        if len(set(names)) == len(set(parts)):
            break
    return numbered(names)


def names_by_system(systems: Sequence[str], names: Sequence[str]) -> list[str]:
    """The systems' names, where those tell them apart; else the names, with the systems'."""
    if len(set(systems)) == len(systems):
        return list(systems)
    return [
        name if system in name else f"{name} ({system})"
        for name, system in zip(names, systems, strict=True)
    ]
