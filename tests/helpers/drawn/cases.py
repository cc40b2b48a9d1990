"""Which cases of a test `make test` runs, where `make every-case` runs them all.

Many tests hold for every system, placement, model or drawn question, and go through them all. A
few of these cases, evenly spread, show as soon as all do that something is broken everywhere;
what is broken in one place is found by the rest. Some show as a whole, in ten seconds or more,
what shorter tests show in parts: of those none runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

every = False
"""Whether all cases run: set before tests are collected."""


def examples(most: int) -> int:
    """How many examples a test looks at that draws them: a fifth of them where a choice is run."""
    return most if every else -(-most // 5)


def chosen(params: Sequence[Mapping[str, Any]], most: int) -> list[int]:
    """Positions of the cases to run, ascending.

    Every value that several cases have of a parameter is in one of them, where there are several
    parameters; then come others, evenly spread, until there are `most`.

    Args:
        params: per case, its parameters.
    """
    found: list[int] = []
    if params and len(params[0]) > 1:
        of = [{(name, repr(value)) for name, value in case.items()} for case in params]
        times = Counter(value for values in of for value in values)
        left = {value for value, count in times.items() if count > 1}
        for k, values in enumerate(of):
            if values & left:
                found.append(k)
                left -= values
    rest = [k for k in range(len(params)) if k not in set(found)]
    more = min(max(most - len(found), 0), len(rest))
    found += [rest[k * len(rest) // more] for k in range(more)]
    return sorted(found)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of tests marked with `choice`, the cases that aren't chosen: by number (of 0, none is), or
    those whose ids hold none of the words given."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("choice") is not None:
            functions.setdefault(item.nodeid.split("[")[0], []).append(item)
    found: list[pytest.Item] = []
    for name, cases in functions.items():
        marker = cases[0].get_closest_marker("choice")
        assert marker is not None
        if marker.args[0] == 0:
            kept = []
        elif isinstance(marker.args[0], int):
            params = [case.callspec.params for case in cases]  # type: ignore[attr-defined]
            kept = [cases[k] for k in chosen(params, marker.args[0])]
        else:
            ids = {case: case.nodeid[len(name) :] for case in cases}
            kept = [case for case in cases if any(word in ids[case] for word in marker.args)]
            missing = [word for word in marker.args if not any(word in ids[c] for c in kept)]
            assert not missing, f"{name} has no case {missing}"
        found += [case for case in cases if case not in kept]
    return found
