"""What simulating a plan takes, in operations: the same on every machine, so that plans repeat."""

from __future__ import annotations

from ..schedules.schedules import has_pattern
from ..systems.variants import Variant

_PER_PLACED = 250
"""What it takes to lay out a plan whose devices have several stages, and to look at its memory."""

_MINI_BATCHES, _LISTED = 8, 32
"""What it takes a simulation to become steady, about; where a list schedule makes it, which takes
longer for each operation, too."""

_SLOWER = 2
"""Times as long as an operation of others takes one of a device with several stages there."""

_FLUSHED = 3
"""The same where the pipeline runs empty after each."""


def operations_of(variant: Variant, stages: int, micro_batches: int) -> int:
    """What simulating a plan takes, about."""
    # Split backwards have a third operation, and three schedules are tried for them.
    each = 3 * 3 if variant.split_backward else 2
    operations = stages * (each * micro_batches + 1)
    if variant.flushes:
        return operations * _FLUSHED
    return operations * (_MINI_BATCHES if has_pattern(variant) else _LISTED)


def placed_operations(variant: Variant, stages: int, micro_batches: int) -> int:
    """The same where devices have several stages: making the schedule takes as long, more where
    several ways to place weight parts are tried."""
    each = 5 if variant.split_backward else 2
    if has_pattern(variant) and not has_pattern(variant, several=True):
        # A list schedule makes it then.
        each *= _LISTED // _MINI_BATCHES
    return each * operations_of(variant, stages, micro_batches) + _PER_PLACED


def unsettled_operations(variant: Variant, operations: int, mini_batches: int) -> int:
    """What a simulation took beyond what was expected, where a list schedule made it that was long
    in becoming steady.

    Args:
        operations: expected.
        mini_batches: that it took.
    """
    if has_pattern(variant, several=True):
        return 0
    return operations * max(mini_batches - _LISTED, 0) * _SLOWER // _LISTED
