"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RANK = {"profiles": 0, "planner": 1, "runtime": 2, "cli": 3}
DATA_MODULES = {"errors", "units", "files", "profile", "published.workload"}


def imports_of(path):
    """(folder, module) of every import between the package's folders."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            parts = (*base, *(node.module or "").split("."))
            names = [a.name for a in node.names] if len(parts) == 1 else [".".join(parts[1:])]
            for name in names:
                if parts[0] != package[0]:
                    yield parts[0], name


@pytest.mark.parametrize("folder", RANK)
def test_arrows_run_one_way(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for other, module in imports_of(path):
            if other in RANK:
                assert RANK[other] < RANK[folder], f"{path}: imports {other}"
            if folder == "planner" and other == "profiles":
                assert module in DATA_MODULES, f"{path}: imports profiles.{module}"


@pytest.mark.parametrize(
    "module",
    [
        "timeprest",
        "timeprest.planner",
        "timeprest.cli.plan",
        "timeprest.cli.profile",
        "timeprest.cli.run",
        "timeprest.profiles",
        "timeprest.profiles.published.reader",
    ],
)
def test_planning_and_help_never_import_torch(module):
    # networkx is imported where a graph is made, so that commands start in no time.
    code = f"import {module}, sys; assert not {{'torch', 'networkx'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_systems_differ_in_their_table_alone():
    """No branch on a system's name outside the table."""
    from timeprest.planner.systems.variants import VARIANTS

    names = tuple(VARIANTS)
    for folder in RANK:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare):
                    for part in ast.walk(node):
                        if isinstance(part, ast.Constant) and part.value in names:
                            raise AssertionError(f"{path}:{node.lineno}: compares with a system")


def test_public_names():
    import timeprest

    assert sorted(timeprest.__all__) == [
        "Cluster",
        "Plan",
        "Profile",
        "__version__",
        "plan",
        "profile",
        "run",
    ]
    assert all(hasattr(timeprest, name) for name in timeprest.__all__)
    assert dir(timeprest) == sorted(timeprest.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        timeprest.nothing  # noqa: B018


def test_no_file_of_the_package_has_grown_too_large():
    for folder in RANK:
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 600, path
