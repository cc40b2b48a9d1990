"""Costs at sizes that weren't measured."""

from __future__ import annotations

import msgspec
import pytest
from timeprest.profiles.profile import Measurement
from timeprest.profiles.sizes import measured_at


def measured(*of):
    """At (size, forward in s)."""
    return [
        Measurement(
            micro_batch=size,
            forward_s=seconds,
            backward_s=2 * seconds,
            saved_bytes=1000 + 10 * size,
            workspace_bytes=0,
        )
        for size, seconds in of
    ]


@pytest.mark.parametrize(
    ("of", "size", "seconds"),
    [
        # The nearest two sizes make the line, not all.
        ([(1, 1), (2, 1.1), (8, 5), (16, 9)], 2, 1.1),
        ([(1, 1), (2, 1.1), (8, 5), (16, 9)], 12, 7),
        ([(1, 1), (2, 1.1), (8, 5), (16, 9)], 24, 13),
        # More samples never cost less, as measured ones may by chance.
        ([(1, 3), (2, 2.5)], 4, 2.5),
        ([(4, 3), (8, 2.5)], 1, 3),
        # Fewer cost a part at the least, and never less than nothing.
        ([(4, 1), (8, 5)], 1, 0.25),
        ([(4, 2), (8, 3)], 1, 1.25),
        ([(4, 2)], 8, 4),
        ([(4, 2)], 1, 0.5),
    ],
)
def test_seconds_lie_on_the_line_through_the_nearest(of, size, seconds):
    found = measured_at(measured(*of), size)
    assert found.micro_batch == size
    assert (found.forward_s, found.backward_s) == pytest.approx((seconds, 2 * seconds))
    if len(of) > 1 and seconds != 3:
        assert found.backward_input_s is None
        assert found.saved_bytes == 1000 + 10 * size or size < of[0][0]


def test_what_is_known_of_one_size_is_in_proportion_but_for_counts():
    (one,) = measured((4, 1.0))
    more = measured_at([msgspec.structs.replace(one, saved_tensors=3)], 8)
    assert (more.saved_bytes, more.saved_tensors, more.relative_error) == (2080, 3, None)
