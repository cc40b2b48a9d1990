"""States of generators, read and set, hold what comes of them later."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from timeprest.profiles.tracing.random_states import same_states, seed_all, set_states, states


def drawn():
    """What each of the generators gives next."""
    normals = np.random.randn(3).tolist()
    return [*normals, np.random.rand(), random.gauss(0, 1), torch.randn(2).tolist()]


DRAWS = {
    "nothing": lambda: None,
    "NumPy's": np.random.rand,
    "half of a pair": np.random.randn,
    "a pair": lambda: np.random.randn(2),
    "a whole block": lambda: np.random.rand(700),
    "Python's": random.random,
    "torch's": lambda: torch.rand(1),
}


@pytest.mark.parametrize("before", DRAWS)
@pytest.mark.parametrize("between", DRAWS)
def test_what_was_read_comes_back(before, between):
    outside = states()
    try:
        seed_all(1)
        DRAWS[before]()
        kept = states()
        assert same_states(kept, states())
        DRAWS[between]()
        assert same_states(kept, states()) == (between == "nothing")
        wanted = []
        for _ in range(2):
            set_states(kept)
            assert same_states(kept, states())
            wanted.append(drawn())
        assert wanted[0] == wanted[1]
        seed_all(1)
        DRAWS[before]()
        assert drawn() == wanted[0]
    finally:
        set_states(outside)
