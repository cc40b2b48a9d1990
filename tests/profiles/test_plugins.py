"""Plugins of any kind: found by name, loaded when they are asked for, refused in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.paths import ROOT
from timeprest.profiles import plugins
from timeprest.profiles.errors import PluginError
from timeprest.profiles.target import resolve

pytestmark = pytest.mark.usefixtures("plugins_forgotten")

MINE = "IMPORTERS = {'.mine': len}\nCOMMANDS = {}\n"


def file_of(tmp_path, text, name="mine.py"):
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_the_page_has_every_kind():
    page = (ROOT / "docs/plugins.md").read_text()
    assert [k for k in plugins.KINDS if f"| `{k.upper()}` |" not in page] == []


def test_a_file_adds_what_its_tables_have(tmp_path):
    assert ".mine" not in plugins.names("importers")
    plugins.load_file(file_of(tmp_path, MINE))
    assert ".mine" in plugins.names("importers")
    assert plugins.load("importers", ".mine") is len
    with pytest.raises(PluginError, match=r"no importer is called '\.no'; there are .*\.mine"):
        plugins.load("importers", ".no")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("lambda name: 3", r"task odd: can't be called with 2 arguments: too many positional arg"),
        ("3", r"task odd: can't be called with 2 arguments: 3 is not a callable object"),
        ("lambda name, argument: 3", r"task odd: gives a int; give a task"),
    ],
)
def test_what_a_plugin_has_is_called_and_gives_what_it_should(tmp_path, value, why):
    plugins.load_file(file_of(tmp_path, f"TASKS = {{'odd': {value}}}"))
    with pytest.raises(PluginError, match=why):
        resolve("odd:1")


def test_a_target_of_another_kind_is_named(tmp_path):
    plugins.load_file(file_of(tmp_path, "TARGETS = {'.odd': lambda name, inputs: 3}"))
    with pytest.raises(PluginError, match=r"kind of target \.odd: gives a int; give Target"):
        resolve("a.odd")


def test_a_process_that_is_started_has_it_too(tmp_path):
    plugins.load_file(file_of(tmp_path, MINE))
    code = "from timeprest.profiles import plugins; print(plugins.load('importers', '.mine'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "len" in done.stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x = 1", "has no SYSTEMS, a list of rows, and none of .*IMPORTERS"),
        ("IMPORTERS = ['.mine']", r"mine\.py: IMPORTERS: give a dict of names"),
        ("IMPORTERS = {1: len}", r"mine\.py: IMPORTERS: give a dict of names"),
        ("IMPORTERS = {'.other': len}", r"mine\.py: IMPORTERS: importer '\.other' is there"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, text, why):
    plugins.load_file(file_of(tmp_path, "IMPORTERS = {'.other': len}", "other.py"))
    with pytest.raises(PluginError, match=why):
        plugins.load_file(file_of(tmp_path, text))


def test_packages_name_theirs_as_entry_points(tmp_path, monkeypatch):
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    points = "[timeprest.importers]\n.good = theirs:LOADED\n.bad = nothing_of_this_name:x\n"
    (info / "entry_points.txt").write_text(points)
    (tmp_path / "theirs.py").write_text("LOADED = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {".good", ".bad"} <= set(plugins.names("importers"))
    assert "theirs" not in sys.modules
    assert plugins.load("importers", ".good") == 7
    with pytest.raises(PluginError, match=r"importer \.bad: ModuleNotFoundError"):
        plugins.load("importers", ".bad")
