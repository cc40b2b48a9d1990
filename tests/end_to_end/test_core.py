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
    "tests/runtime/prepare/test_same_data.py",
    "tests/runtime/checkpoint/test_plain_attributes.py",
    "tests/runtime/weights/test_stash.py",
)
"""Some of the core's, of each package: without what goes through all cases, as where satellites
are."""

IN_TURN = """
import importlib, os, pkgutil, pytest, sys
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
os.chdir(sys.argv[1])
sys.exit(pytest.main(sys.argv[3:]))
"""
"""Lines of commands, one after another, then whatever they haven't imported, and tests: loading
torch takes longer than what they do."""


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


@pytest.mark.slow
def test_it_profiles_plans_trains_and_passes_its_tests(core, tmp_path, mlp_target):
    folder, environment = core
    for name in SATELLITES:
        assert not (folder / name).exists()
    given = f"""
    profile {mlp_target} --seconds 0
    plan --help
    plan solve profile.json
    run plan.json --inline --steps 3 --run-dir run
    """
    words = ("-q", "-x", "-p", "no:cacheprovider")
    more = ("--every-case",) if cases.every else ("-m", "not slow")
    done = subprocess.run(
        [sys.executable, "-c", IN_TURN, str(folder), given, *words, *more, *TESTS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "solve" in done.stdout
    assert "export" not in done.stdout
    assert (tmp_path / "run/summary.json").exists()
