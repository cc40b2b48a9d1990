"""The core alone: without satellites' folders and entry points it imports, plans and trains."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys

import pytest
from helpers.drawn import cases
from helpers.paths import ROOT, SATELLITES

TESTS = (
    "tests/planner/schedules/test_orders.py",
    "tests/planner/comparison",
    "tests/profiles/imported",
    "tests/profiles/test_plugins.py",
    "tests/runtime/stage/test_learning_rate.py",
    "tests/runtime/weights/test_stash.py",
)
"""Some of the core's, of each package: without what goes through all cases, as where satellites
are."""

IN_TURN = """
import importlib, pkgutil, sys
import timeprest
assert timeprest.__path__[0] == sys.argv[1], timeprest.__path__
for line in sys.argv[2].split("\\n"):
    if words := line.split():
        main = importlib.import_module(f"timeprest.cli.{words[0]}").main
        try:
            main(words[1:], prog_name=f"tp-{words[0]}")
        except SystemExit as end:
            assert not end.code, line
for found in pkgutil.walk_packages(timeprest.__path__, "timeprest."):
    importlib.import_module(found.name)
"""
"""Lines of commands, one after another, and then whatever they haven't imported: loading torch
takes longer than what they do."""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """A checkout without satellites and their tests; the environment that has it."""
    folder = tmp_path_factory.mktemp("core") / "timeprest"
    out = {*SATELLITES, *(f"tests/{name}" for name in SATELLITES)}

    def left_out(at, names):
        here = os.path.relpath(at, ROOT)
        return {n for n in names if os.path.normpath(f"{here}/{n}") in out}

    for name in ("profiles", "planner", "runtime", "cli", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for name in ("__init__.py", "api.py", "pyproject.toml"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    config = configparser.ConfigParser(delimiters=("=",))
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    groups = config["options.entry_points"]
    for group in [group for group in groups if group.startswith("timeprest.")]:
        del groups[group]
    with (folder / "setup.cfg").open("w") as file:
        config.write(file)
    return folder, {**os.environ, "PYTHONPATH": str(folder.parent)}


def call(core, *words, cwd=None):
    folder, environment = core
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd or folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_it_profiles_plans_and_trains_and_all_of_it_imports(core, tmp_path, mlp_target):
    folder, _ = core
    for name in SATELLITES:
        assert not (folder / name).exists()
    given = f"""
    profile {mlp_target} --seconds 0
    plan --help
    plan solve profile.json
    run plan.json --inline --steps 3 --run-dir run
    """
    said = call(core, "-c", IN_TURN, folder, given, cwd=tmp_path)
    assert "solve" in said
    assert "export" not in said
    assert (tmp_path / "run/summary.json").exists()


@pytest.mark.slow
def test_it_passes_its_tests(core):
    words = ("-q", "-x", "-p", "no:cacheprovider")
    more = ("--every-case",) if cases.every else ("-m", "not slow")
    call(core, "-m", "pytest", *words, *more, *TESTS)
