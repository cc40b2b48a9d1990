"""Hosts' clocks, brought together by their messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeprest.runtime.records.recording import offsets


@given(
    st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=4),
    st.floats(0, 0.01),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
def test_clocks_that_are_off_are_found_out(ahead, way_s, waits):
    """Messages take as long there as back, and some wait until they are taken."""
    names = [f"host{k}" for k in range(len(ahead))]
    delays = [
        (names[a], names[b], way_s + wait + ahead[b] - ahead[a])
        for a, b in [(k, k + 1) for k in range(len(ahead) - 1)]
        + [(k + 1, k) for k in range(len(ahead) - 1)]
        for wait in [*waits, 0.0]
    ]
    found = offsets(names, delays)
    for k, name in enumerate(names):
        assert found[name] == pytest.approx(ahead[0] - ahead[k], abs=1e-6)


def test_messages_in_one_direction_never_arrive_before_they_were_sent():
    found = offsets(["a", "b", "a"], [("a", "b", -5.0), ("a", "b", -4.0)])
    assert found == {"a": 0.0, "b": 5.0}


def test_hosts_without_messages_keep_their_clocks():
    assert offsets(["a", "b"], [("a", "a", 3.0)]) == {"a": 0.0, "b": 0.0}
