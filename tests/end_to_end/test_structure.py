"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys

import networkx as nx
import pytest
from helpers.paths import ROOT

RANK = {"profiles": 0, "planner": 1, "runtime": 2, "cli": 3}
DATA_MODULES = {"errors", "units", "files", "profile", "published.workload"}


MOST_ENTRIES = 12
MOST_LINES = 600
LISTS = {"profiles/zoo"}
"""Folders that are lists by nature: a file for each model."""

WORDS = {
    "again": "recompute",
    "absent": "missing",
    "crossing": "message, or tensor",
    "crowding": "contention",
    "draws": "dropout, or random",
    "listed": "the list schedule",
    "meeting": "rendezvous",
    "rising": "what rises",
    "scores": "metrics",
}
"""Words that names of this code once had, and the field's words for them."""


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


SOURCES = {module_of(path): path for folder in RANK for path in (ROOT / folder).rglob("*.py")}


@pytest.fixture(scope="module")
def trees():
    """Every module's code, parsed when the first test asks: all tests are collected before."""
    return {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}


@pytest.fixture(scope="module")
def imports(trees):
    """Which module imports which."""
    return nx.DiGraph(
        (module, other)
        for module, tree in trees.items()
        for other in imports_of(module, tree)
        if other in SOURCES and other != module
    )


def imports_of(module, tree):
    """Every module of the package that this one imports, but for types alone."""
    types = {
        id(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inside in ast.walk(node)
    }
    package = SOURCES[module].relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in types:
            base = package[: len(package) - node.level + 1]
            base += tuple(node.module.split(".")) if node.module else ()
            for name in (alias.name for alias in node.names):
                yield (*base, name) if (*base, name) in SOURCES else base


@pytest.mark.parametrize("folder", RANK)
def test_packages_import_one_way(folder, imports):
    for module, other in imports.edges:
        if module[0] == folder != other[0]:
            assert RANK[other[0]] < RANK[folder], f"{SOURCES[module]}: imports {other}"
            if folder == "planner":
                data = ".".join(other[1:])
                assert data in DATA_MODULES, f"{SOURCES[module]}: imports profiles.{data}"


def folders():
    return sorted({module[:n] for module in SOURCES for n in range(1, len(module))})


@pytest.mark.parametrize("folder", folders(), ids="/".join)
def test_rooms_of_a_folder_import_one_way(folder, imports):
    """No two of its files and folders need each other, by whatever way."""
    rooms = nx.DiGraph()
    depth = len(folder)
    for module, other in imports.edges:
        inside = module[:depth] == other[:depth] == folder
        if inside and len(module) > depth < len(other) and module[depth] != other[depth]:
            rooms.add_edge(module[depth], other[depth])
    assert not list(nx.simple_cycles(rooms))


def test_folders_can_be_taken_in_at_a_glance():
    for top in [*RANK, "tests"]:
        for folder in [ROOT / top, *(p for p in (ROOT / top).rglob("*") if p.is_dir())]:
            entries = [
                entry.name
                for entry in folder.iterdir()
                if entry.name not in ("__init__.py", "__pycache__")
            ]
            if str(folder.relative_to(ROOT)) not in LISTS and "__pycache__" not in folder.parts:
                assert len(entries) <= MOST_ENTRIES, f"{folder}: {len(entries)} entries"


def test_files_are_deep_but_not_endless():
    for path in SOURCES.values():
        assert len(path.read_text().splitlines()) <= MOST_LINES, path


def test_a_class_name_has_one_meaning(trees):
    found = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            # Modules of networks are called as in the networks' own code, and fingerprints have
            # their names: plans of before must go on.
            if isinstance(node, ast.ClassDef) and module[:2] != ("profiles", "zoo"):
                first = found.setdefault(node.name, module)
                assert first == module, f"class {node.name} in {first} and in {module}"


def test_every_error_is_drawn_once(trees):
    tree = trees[("profiles", "errors")]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            assert len(re.findall(rf"\b{node.name} ", ast.get_docstring(tree))) == 1, node.name


def test_names_are_the_fields(trees):
    for module, tree in trees.items():
        defined = [
            node.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        for name in [*defined, module[-1]]:
            for word in re.findall("[A-Z]?[a-z]+", name):
                better = WORDS.get(word.lower().removesuffix("s"), WORDS.get(word.lower()))
                assert not better, f"{SOURCES[module]}: {name}; say {better}"


def test_architecture_has_a_line_for_each_folder():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for folder in folders():
        assert f"{folder[-1]}/" in text, f"docs/architecture.md: nothing of {'/'.join(folder)}"


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


def test_systems_differ_in_their_table_alone(trees):
    """No branch on a system's name outside the table."""
    from timeprest.planner.systems.variants import VARIANTS

    names = tuple(VARIANTS)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                for part in ast.walk(node):
                    where = f"{SOURCES[module]}:{node.lineno}"
                    named = isinstance(part, ast.Constant) and part.value in names
                    assert not named, f"{where}: compares with a system"


def test_every_folder_of_modules_is_installed():
    """In a checkout all are found anyway; from a wheel those alone that setup.cfg lists."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    folders = {ROOT, *(path.parent for path in SOURCES.values())}
    names = {".".join(("timeprest", *path.relative_to(ROOT).parts)) for path in folders}
    assert set(config["options"]["packages"].split()) == names


def test_public_names():
    import timeprest

    assert sorted(timeprest.__all__) == [
        "Callback",
        "Cluster",
        "EarlyStopping",
        "Plan",
        "Profile",
        "Run",
        "Stop",
        "Trainer",
        "__version__",
        "check",
        "dry_run",
        "export",
        "front",
        "hugging_face",
        "links",
        "onnx",
        "plan",
        "plans",
        "plugin",
        "profile",
        "resume",
        "run",
        "what_if",
    ]
    assert all(hasattr(timeprest, name) for name in timeprest.__all__)
    assert dir(timeprest) == sorted(timeprest.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        timeprest.nothing  # noqa: B018
