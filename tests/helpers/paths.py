"""Where files lie that tests read: the tests themselves, the package, and published inputs."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
TASKS = TESTS / "tasks"
ROOT = TESTS.parent
