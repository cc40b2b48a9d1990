"""Which cases of a test run by default (helpers/drawn/cases.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers.drawn.cases import chosen, left_out
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2))), st.integers(0, 20))
def test_every_value_of_several_cases_is_in_one(pairs, most):
    params = [dict(zip("ab", pair, strict=True)) for pair in pairs]
    kept = chosen(params, most)
    assert kept == sorted(set(kept))
    assert len(kept) >= min(most, len(params))
    for name in "ab":
        values = [case[name] for case in params]
        assert {params[k][name] for k in kept} >= {v for v in values if values.count(v) > 1}


@pytest.mark.parametrize(
    ("most", "wanted"), [(0, []), (1, [0]), (3, [0, 3, 6]), (20, [*range(10)])]
)
def test_of_one_parameter_the_cases_are_evenly_spread(most, wanted):
    assert chosen([{"seed": seed} for seed in range(10)], most) == wanted


class Case:
    """What pytest collects, as far as it matters here."""

    def __init__(self, nodeid, *choice, **params):
        self.nodeid, self.callspec = nodeid, SimpleNamespace(params=params)
        self.marker = SimpleNamespace(args=choice) if choice else None

    def get_closest_marker(self, name):
        return self.marker


def test_values_of_one_case_alone_keep_no_more_than_asked_for():
    params = [{"system": k, "how": {"stages": k}, "task": "mlp"} for k in range(10)]
    assert len(chosen(params, 4)) == 4


def test_what_a_marker_leaves_out():
    by_number = [Case(f"one[{k}]", 2, k=k) for k in range(6)]
    by_word = [Case(f"two[{word}]", "gpipe", word=word) for word in ("gpipe", "zb-v")]
    whole, plain = Case("three", 0), Case("four")
    out = left_out([*by_number, *by_word, whole, plain])
    assert [item.nodeid for item in out] == [
        *("one[1]", "one[2]", "one[4]", "one[5]"),
        *("two[zb-v]", "three"),
    ]
