"""The plugin for published planners' files, in the tests that import them."""

from __future__ import annotations

import pytest
from helpers.paths import PLANNERS


@pytest.fixture
def planners(plugins_forgotten):
    """What `--plugin` does."""
    from timeprest.profiles.plugins import load_file

    load_file(str(PLANNERS))
