"""Where files lie that tests read: the tests themselves, the package, and published inputs."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TASKS = TESTS / "tasks"
ROOT = TESTS.parent
SHIPPED_DEVICES = ROOT / "profiles" / "device_specs.toml"
PLANNERS = TESTS / "benchmarks" / "published" / "plugin.py"
"""The plugin that reads other planners' files."""
PUBLISHED = ROOT.resolve().parent / "shared" / "data"
"""Other planners' own files, which aren't part of the repository."""


def _satellites():
    config = configparser.ConfigParser(delimiters=("=",))
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    groups = config["options.entry_points"]
    text = "\n".join(groups[group] for group in groups if group.startswith("timeprest."))
    return {"/".join(found) for found in re.findall(r"= *timeprest\.(\w+)\.(\w+)", text)}


SATELLITES = _satellites()
"""Folders that the core does without, such as "profiles/onnx": where setup.cfg's entry points
lead."""


def published(name):
    """The path of a published file; skips the test where it isn't there."""
    path = PUBLISHED / name
    if not path.exists():
        pytest.skip(f"a published file that isn't part of the repository: {path}")
    return path
