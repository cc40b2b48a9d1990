"""Broken files and command lines end in success, or in code 2 with one line that says where.

`make fuzz` breaks far more of them.
"""

from __future__ import annotations

import ast
import re

import pytest
import torch
from fuzz.__main__ import complaint_of
from fuzz.cases import COMMANDS, FILES
from helpers.paths import ROOT

OF_EACH = dict.fromkeys(FILES, 16) | dict.fromkeys(COMMANDS, 12)
"""Few enough for the suite; the project's own files are what people edit."""
OF_EACH |= {"profile": 40, "plan": 60, "cluster": 40}


@pytest.fixture
def not_compiled(monkeypatch):
    """For most of a stage's time goes into that, and tests of compiled stages do it."""
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)


@pytest.mark.slow
@pytest.mark.usefixtures("plugins_forgotten", "not_compiled")
@pytest.mark.parametrize("kind", OF_EACH)
def test_broken_input_is_refused_in_one_line(kind, tmp_path):
    found = {seed: complaint_of(kind, seed, tmp_path / str(seed)) for seed in range(OF_EACH[kind])}
    wrong = {seed: complaint for seed, complaint in found.items() if complaint}
    assert not wrong, next(iter(wrong.items()))


def sources():
    for folder in ("cli", "planner", "profiles", "runtime"):
        yield from (ROOT / folder).rglob("*.py")
    yield from ROOT.glob("*.py")


def test_nothing_unpickles_or_evaluates():
    """Files are data: nothing that is read from one is run.

    Objects of a session go to its own workers as pickles, through memory, and what sends them
    reads no file.
    """
    objects = ROOT / "profiles/tasks/objects.py"
    assert not re.search(r"\bopen\(|read_bytes|read_text|read_limited", objects.read_text())
    modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    builtins = {"eval", "exec", "compile", "__import__"}
    for path in sources():
        if path == objects:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not modules & {a.name.split(".")[0] for a in node.names}, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in modules or node.level, where
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in builtins, where
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                # These unpickle.
                assert ast.unparse(node.func) not in {"torch.load", "np.load", "numpy.load"}, where
