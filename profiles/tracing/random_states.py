"""The states of torch's, Python's and NumPy's random generators: read, set and compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes


def states() -> tuple[Any, ...]:
    """States of torch's, Python's and NumPy's own generators."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_states(given: tuple[Any, ...]) -> None:
    """Set them."""
    torch.set_rng_state(given[0])
    random.setstate(given[1])
    np.random.set_state(given[2])


def seed_all(seed: int) -> None:
    """Seed all three with a number of up to 63 bits."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def same_states(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether nothing was drawn between the two."""
    # Also where tensors are fake.
    with _disable_current_modes():
        same = torch.equal(a[0], b[0])
    return same and a[1] == b[1] and a[2][2:] == b[2][2:] and np.array_equal(a[2][1], b[2][1])
