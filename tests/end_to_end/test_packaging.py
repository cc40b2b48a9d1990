"""The source distribution: it holds what its tests need, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import PurePosixPath

import pytest
from helpers.paths import ROOT

MADE = {"PKG-INFO", "timeprest.egg-info"}


def test_the_sdist_is_the_repository(tmp_path):
    pytest.importorskip("setuptools")
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a checkout: this may be the sdist itself")
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    # A copy: what an earlier build left beside the sources would be packed too.
    for name in tracked:
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "copy" / name)
    build = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tmp_path / "copy", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("timeprest-*.tar.gz")
    with tarfile.open(archive) as packed:
        paths = [PurePosixPath(member.name) for member in packed if member.isfile()]
    inside = {PurePosixPath(*path.parts[1:]) for path in paths}
    held = {str(path) for path in inside if path.parts[0] not in MADE}
    assert held == tracked
