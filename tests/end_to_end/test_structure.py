"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys

import networkx as nx
import pytest
from helpers.output.doc_pages import names_defined, tables
from helpers.paths import ROOT, SATELLITES

RANK = {"profiles": 0, "planner": 1, "runtime": 2, "api": 3, "cli": 4}
DATA_MODULES = {
    *("device_specs", "errors", "units", "files", "options", "plugins", "profile", "sizes"),
}


LIMITS = {"lines": 60, "parameters": 8, "methods": 20, "attributes": 20, "imports": 15}
"""Of a function without its docstring and of its parameters, of a class, and of the package's own
modules that a module imports. Functions that are a command's script may be longer."""

WORDS = {
    "again": "recompute",
    "absent": "missing",
    "among": "what it chooses from",
    "coming": "upcoming, or expected",
    "crossing": "message, or tensor",
    "crowding": "contention",
    "draws": "dropout, or random",
    "larger": "what is larger than what",
    "listed": "the list schedule",
    "meeting": "rendezvous",
    "rising": "what rises",
    "scores": "metrics",
    "tell": "report, log or send",
}
"""Words that names of this code have or had, and the field's words for them."""

PARTICIPLES = {"Enough", "Foretold", "Given", "Reached", "Seen"}
"""Words that don't name a thing, in class names."""

BROKEN = """
imports 22 api.py
parameters 9 api.py resume
parameters 10 api.py run
parameters 9 runtime/trainer.py Trainer.__init__
"""
"""What breaks these rules by now: nothing may be added or get worse, and what got better goes."""


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


SOURCES = {
    module_of(path): path
    for room in RANK
    for path in [*ROOT.glob(f"{room}.py"), *(ROOT / room).rglob("*.py")]
}


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


def of_satellite(module):
    return "/".join(module[:2]) in SATELLITES


def test_the_core_imports_no_satellite(imports):
    for module, other in imports.edges:
        if not of_satellite(module):
            assert not of_satellite(other), f"{SOURCES[module]}: imports {'/'.join(other)}"


@pytest.mark.parametrize("folder", RANK)
def test_packages_import_one_way(folder, imports):
    for module, other in imports.edges:
        if module[0] == folder != other[0] and not of_satellite(module):
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


def test_every_error_is_drawn_once(trees):
    tree = trees[("profiles", "errors")]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            assert len(re.findall(rf"\b{node.name} ", ast.get_docstring(tree))) == 1, node.name


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def definitions(node, inside=()):
    """Every class and function, with its name after those that it is defined in."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, (ast.ClassDef, *FUNCTIONS))
        name = (*inside, child.name) if named else inside
        if named:
            yield ".".join(name), child
        # In expressions there is none.
        if not isinstance(child, ast.expr):
            yield from definitions(child, name)


def parameters_of(function):
    of = function.args
    found = [*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg]
    return [arg.arg for arg in found if arg is not None and arg.arg not in ("self", "cls")]


def attributes_of(cls):
    """Those that its methods set, and its fields, but for those of records: frozen dataclasses and
    msgspec's structs have what a file or a command has."""
    bases = {ast.unparse(base) for base in cls.bases}
    made = " ".join(ast.unparse(decorator) for decorator in cls.decorator_list)
    record = bases & {"msgspec.Struct", "Struct", "TaggedFile"} or "frozen=True" in made
    declared = [
        part.target.id
        for part in cls.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]
    assigned = [
        part.attr
        for part in ast.walk(cls)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and ast.unparse(part.value) == "self"
    ]
    return declared, set(assigned) | set(() if record else declared)


def sizes_of(node):
    """What is limited, by the limit's name; nothing of commands."""
    if isinstance(node, ast.ClassDef):
        methods = sum(isinstance(part, FUNCTIONS) for part in node.body)
        return {"methods": methods, "attributes": len(attributes_of(node)[1])}
    made = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(re.match(r"(\w+\.)?command\(", decorator) for decorator in made):
        return {}
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return {"lines": lines, "parameters": len(parameters_of(node))}


def words_in(name):
    """Those of WORDS, in singular and plural."""
    words = {word.lower() for word in re.findall("[A-Z]?[a-z]+", name)}
    return sorted({word for word in WORDS if words & {word, word + "s"}})


def broken_rules(trees, imports):
    """A line for each: what is broken, how far, where."""
    for module, tree in trees.items():
        path = SOURCES[module].relative_to(ROOT).as_posix()
        if imports.has_node(module) and imports.out_degree(module) > LIMITS["imports"]:
            yield f"imports {imports.out_degree(module)} {path}"
        names = {module[-1]}
        for name, node in definitions(tree):
            for what, size in sizes_of(node).items():
                if size > LIMITS[what]:
                    yield f"{what} {size} {path} {name}"
            is_class = isinstance(node, ast.ClassDef)
            names |= {node.name, *(attributes_of(node)[0] if is_class else parameters_of(node))}
            if is_class and PARTICIPLES & set(re.findall("[A-Z][a-z]+", node.name)):
                yield f"participle {path} {name}"
        for name in sorted(names):
            for word in words_in(name):
                yield f"word {word} {path} {name}"


def test_rules_that_help(trees, imports):
    found, allowed = set(broken_rules(trees, imports)), set(BROKEN.strip().splitlines())
    changes = [
        *(f"- {line}" for line in allowed - found),
        *(f"+ {line}" for line in found - allowed),
    ]
    assert not changes, "\n".join(
        ["Cure what got worse or is new; BROKEN follows what got better:", *sorted(changes)]
    )


def test_a_public_class_has_its_name_alone(trees):
    import timeprest

    for module, tree in trees.items():
        for name, node in definitions(tree):
            if isinstance(node, ast.ClassDef) and name in timeprest.__all__:
                home = getattr(timeprest, name).__module__
                assert home == ".".join(("timeprest", *module)), f"{SOURCES[module]}: {name}"


def test_architecture_has_a_line_for_each_folder():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for folder in folders():
        assert f"{folder[-1]}/" in text, f"docs/architecture.md: nothing of {'/'.join(folder)}"


def test_every_term_of_the_glossary_is_defined_where_it_says(trees):
    rows = [
        row
        for table in tables(ROOT / "docs" / "glossary.md")
        if table.head == ("term", "what it is", "where")
        for row in table.rows
    ]
    assert 40 <= len(rows) <= 60
    for term, _, where in rows:
        *name, path = re.findall(r"`([^`]+)`", where)
        assert (ROOT / path).is_file(), f"docs/glossary.md: {term}: there is no {path}"
        found = set(names_defined(trees[module_of(ROOT / path)]))
        assert set(name) <= found, f"docs/glossary.md: {term}: {path} has no {name[0]}"


@pytest.mark.parametrize(
    "module",
    [
        "timeprest",
        "timeprest.planner",
        "timeprest.cli.plan",
        "timeprest.cli.profile",
        "timeprest.cli.run",
        "timeprest.profiles",
        "timeprest.profiles.imported.reader",
    ],
)
def test_planning_and_help_never_import_torch(module):
    # networkx and scipy are imported where they are used, so that commands start in no time.
    late = {"torch", "networkx", "scipy"}
    code = f"import {module}, sys; assert not {late} & set(sys.modules)"
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


def test_the_oldest_python_reads_it(trees):
    """Python 3.10 takes a bare ClassVar for no type, nor KW_ONLY, where annotations are read."""
    for path in SOURCES.values():
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    bare = [
        module
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "ClassVar"
    ]
    readers = [
        module
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and "get_type_hints" in {getattr(node.func, "attr", ""), getattr(node.func, "id", "")}
    ]
    assert not bare
    # That of files reads no dataclass.
    assert readers == [("profiles", "files"), ("profiles", "options")]


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
        "TimeprestError",
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
