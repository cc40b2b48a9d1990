"""The states of torch's, Python's and NumPy's random generators: read, set and compared."""

from __future__ import annotations

import ctypes
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only


def states() -> tuple[Any, ...]:
    """States of torch's, Python's and NumPy's own generators."""
    return torch.get_rng_state(), random.getstate(), _numpy_state()


def set_states(given: tuple[Any, ...]) -> None:
    """Set them."""
    global _last
    torch.set_rng_state(given[0])
    random.setstate(given[1])
    if _numpy_state() is not given[2]:
        np.random.set_state(given[2])
        _last = b"", None


_last: tuple[bytes, Any] = b"", None
"""Of NumPy's generator, memory and state when it was last looked at."""


def _numpy_state() -> Any:
    """NumPy's state; the same object where nothing was drawn since it was last read.

    NumPy reads and sets one number by number, in 50 µs: for each sample that is loaded, those were
    half of what it took. Its memory is compared in one.
    """
    global _last
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    memory = b""
    if isinstance(generator, np.random.MT19937):
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    known, state = _last
    # A normal number that was drawn with another, and is still to come, lies elsewhere.
    if memory != known or not memory or state[3]:
        state = np.random.get_state()
        _last = memory, state
    return state


_MT19937_BYTES = 4 * 624 + 4
"""Its words, and how many of them were used."""


def seed_all(seed: int) -> None:
    """Seed all three with a number of up to 63 bits."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def seed_everywhere(seed: int) -> None:
    """Seed cards' generators, too: `torch.manual_seed` formats the stack for every kind of card
    that is not there, to say some day where it was."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    seed_all(seed)


def same_states(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether nothing was drawn between the two."""
    # Also where tensors are fake.
    with _disable_current_modes():
        same = torch.equal(a[0], b[0])
    return same and a[1] == b[1] and a[2][2:] == b[2][2:] and np.array_equal(a[2][1], b[2][1])


# Generators that modules have for themselves ----------------------------------------------------


def own_states(modules: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """Generators that are attributes of modules, each with its state."""
    found = (value for module in modules for value in vars(module).values())
    others = (value for value in found if type(value) not in COLLECTED)
    return [(value, state_of(value)) for value in others if isinstance(value, GENERATORS)]


def set_own_states(given: Sequence[tuple[Any, Any]]) -> None:
    """Set them."""
    for generator, state in given:
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.tensor(state, dtype=torch.uint8))
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        else:
            generator.setstate(state)


def same_own_states(given: Sequence[tuple[Any, Any]]) -> bool:
    """Whether nothing was drawn from them since."""
    return all(state_of(generator) == state for generator, state in given)


PLAIN = frozenset({bool, bytes, float, int, str, type(None)})
"""What most attributes are: what else they might be needn't be asked, which is dear."""

COLLECTED = PLAIN | {dict, list, set, tuple, OrderedDict}
"""Those and collections, which are neither generators nor functions."""

GENERATORS = (random.Random, np.random.Generator, torch.Generator)


def state_of(generator: Any) -> Any:
    """The state of one of `GENERATORS`, to be compared."""
    if isinstance(generator, torch.Generator):
        with _disable_current_modes():
            return generator.get_state().tolist()
    if isinstance(generator, np.random.Generator):
        # Some have arrays, which can't be compared as a whole.
        return tree_map_only(np.ndarray, np.ndarray.tolist, generator.bit_generator.state)
    return generator.getstate()
