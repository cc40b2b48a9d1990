"""Breaking files and command lines: mutations that know the structure, and ones of bytes.

Everything follows from a `random.Random`: the same seed breaks the same thing in the same way.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

_RAW = "@@raw:"
_TWICE = "@@twice"

NUMBERS = ["1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1" + "0" * 400, "-0.0", "1e-320"]
"""As text: json.dumps would not write them."""

VALUES: list[Any] = [
    *(_RAW + text + "@@" for text in NUMBERS),
    0, -1, 1, 2, 3, 7, 100, 65536, 10**9, 2**31, 2**53 + 1, 2**63, 2**64, 10**18, 10**30,
    0.5, -0.5, 1e-12, 1e17, 1e300, True, False, None,
    "", "1", "x", "nan", "output", "é\n[/x]\x1b[2J", "a" * 5000, "../../etc", "\u202e", "digits",
    [], {}, [0], [[]], [None], ["x", "x"], {"x": 1}, {"": {}},
]  # fmt: skip

PIECES = [
    b"\n", b"\t", b" ", b" -- ", b"-", b"1e308", b"1e400", b"9" * 30, b"[", b"]", b"{", b"}",
    b"[" * 50_000, b'{"a":' * 50_000, b",", b'"', b"null", b"true", b"NaN", b"0", b"\\ud800",
    b"\xff", b"\xfe\xff", b"\x00", b"\xef\xbb\xbf", b"=", b".", b"'''", b"#", b";", b"[]", b"{}",
]  # fmt: skip

AMOUNTS = [
    "", "0", "-1", "1", "1GiB", "0.1KiB", "1e400GiB", "1e308GiB", "1e-400", "nan", "inf", "NaN",
    "16 GiB", "16gib", "10us", "1e30s", "12GB/s", "0GB/s", "1e-300B/s", "1PB", "1/0", "9" * 400,
    "1e" + "9" * 50, "١٢", "true",
]  # fmt: skip


def broken_json(rng: Random, value: Any) -> bytes:
    """A JSON file with one to three places changed, or its bytes."""
    if rng.random() < 0.2:
        return broken_bytes(rng, json.dumps(value, indent=1).encode())
    value = copy.deepcopy(value)
    if rng.random() < 0.35:
        _bend_numbers(rng, value)
    else:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _break_place(rng, value)
    text = json.dumps(value, indent=1, ensure_ascii=rng.random() < 0.5)
    text = re.sub(f'"{_RAW}(.*?)@@"', r"\1", text).replace(_TWICE, "")
    data = text.encode("utf-8", "surrogatepass")
    return broken_bytes(rng, data) if rng.random() < 0.05 else data


def broken_bytes(rng: Random, data: bytes) -> bytes:
    """Bytes left out, put in, moved or cut off."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((0, 0, 1, 1, 3, 30, 300))
        way = rng.random()
        if way < 0.15:
            data = data[:at]
        elif way < 0.25:
            data = data[:at] + data[at : at + length] * 2 + data[at + length :]
        elif way < 0.5:
            flipped = bytes(b ^ (1 << rng.randrange(8)) for b in data[at : at + max(length, 1)])
            data = data[:at] + flipped + data[at + len(flipped) :]
        else:
            data = data[:at] + rng.choice(PIECES) + data[at + length :]
    return data


def broken_lines(rng: Random, text: str, words: Sequence[str] = ()) -> bytes:
    """A file of lines (TOML, graph.txt): lines and the values in them changed, or its bytes."""
    if rng.random() < 0.2:
        return broken_bytes(rng, text.encode())
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        k = rng.randrange(len(lines))
        way = rng.random()
        if way < 0.15:
            del lines[k]
            lines = lines or [""]
        elif way < 0.25:
            lines.insert(k, rng.choice(lines))
        elif way < 0.35:
            j = rng.randrange(len(lines))
            lines[j], lines[k] = lines[k], lines[j]
        else:
            lines[k] = _break_line(rng, lines[k], words)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _break_line(rng: Random, line: str, words: Sequence[str]) -> str:
    found = list(re.finditer(r'"[^"]*"|[\w.+-]+', line))
    if not found:
        return line + rng.choice(("x", " = 1", "[", "\t"))
    match = rng.choice(found[-1:] if rng.random() < 0.6 else found)
    fresh = rng.choice(
        [
            json.dumps(rng.choice(AMOUNTS), ensure_ascii=False),
            rng.choice(AMOUNTS),
            rng.choice(NUMBERS),
            rng.choice(("10000000000", "1000000000", "0", "-1", "true", "[]", "{}", "[1, [2]]")),
            rng.choice(list(words) or ["x"]),
        ]
    )
    return line[: match.start()] + fresh + line[match.end() :]


def _bend_numbers(rng: Random, value: Any) -> None:
    """Numbers of the same kind in other sizes: what the reader has no reason to refuse."""
    places = [
        (parent, key)
        for parent in _containers(value)
        for key in (list(parent) if isinstance(parent, dict) else range(len(parent)))
        if type(parent[key]) in (int, float)
    ]
    name = rng.choice(places)[1]
    same = [place for place in places if place[1] == name]
    everywhere = rng.random() < 0.4
    fresh = rng.choice((0, 1, 2, 3, 5, 64, 4096, 10**6, 10**9, 2**40, 2**53, 2**62, 2**63 - 1))
    for parent, key in same if everywhere else [rng.choice(same)]:
        if isinstance(parent[key], int):
            parent[key] = fresh
        else:
            parent[key] = rng.choice(
                (0.0, 5e-324, 1e-300, 1e-30, 1e-9, 1.0, 1e9, 1e30, 1e150, 1e300, 1.7e308)
            )


def _break_place(rng: Random, value: Any) -> None:
    """Change one place of the value."""
    parents = [p for p in _containers(value) if p]
    parent = rng.choice(parents or [value])
    # Large lists of numbers mustn't hide the few places that say how things belong together.
    if rng.random() < 0.3:
        parent = rng.choice(parents[:12] or [value])
    if not parent:
        return
    key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    if rng.random() < 0.1:
        # A name or number of the same file in another place: cycles, names used twice.
        parent[key] = copy.deepcopy(rng.choice(list(_leaves(value)) or [None]))
        return
    ways: list[Callable[[Random, Any, Any], None]] = [_replace, _replace, _scale, _drop, _repeat]
    ways += [_swap, _rename_or_shuffle, _nest]
    rng.choice(ways)(rng, parent, key)


def _replace(rng: Random, parent: Any, key: Any) -> None:
    parent[key] = copy.deepcopy(rng.choice(VALUES))


def _scale(rng: Random, parent: Any, key: Any) -> None:
    """A number that could be one: larger, smaller, negative."""
    old = parent[key]
    if isinstance(old, bool) or not isinstance(old, (int, float)):
        _replace(rng, parent, key)
    elif isinstance(old, int):
        parent[key] = rng.choice((old + 1, old - 1, old * 2, old * 1000, old * 10**12, -old, 0))
    else:
        parent[key] = rng.choice((old * 2, old * 1e6, old * 1e200, old * 1e-200, -old, 0.0))


def _drop(rng: Random, parent: Any, key: Any) -> None:
    del parent[key]


def _repeat(rng: Random, parent: Any, key: Any) -> None:
    if isinstance(parent, list):
        parent[key:key] = [copy.deepcopy(parent[key])] * rng.choice((1, 1, 2, 50))
    else:
        parent[f"{key}{_TWICE}"] = copy.deepcopy(rng.choice(VALUES))


def _swap(rng: Random, parent: Any, key: Any) -> None:
    other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    parent[key], parent[other] = parent[other], parent[key]


def _rename_or_shuffle(rng: Random, parent: Any, key: Any) -> None:
    if isinstance(parent, list):
        rng.shuffle(parent)
    else:
        parent[rng.choice((f"{key}s", key.upper(), "", "x\n\x00"))] = parent.pop(key)


def _nest(rng: Random, parent: Any, key: Any) -> None:
    deep = parent[key]
    for _ in range(rng.choice((1, 1, 400))):
        deep = [deep] if rng.random() < 0.5 else {str(key): deep}
    parent[key] = deep


def _containers(value: Any) -> Iterator[Any]:
    """All lists and tables, the outer ones first."""
    level = [value]
    while level:
        held = [v for v in level if isinstance(v, (dict, list))]
        yield from held
        level = [x for v in held for x in (v.values() if isinstance(v, dict) else v)]


def _leaves(value: Any) -> Iterator[Any]:
    for parent in _containers(value):
        for item in parent.values() if isinstance(parent, dict) else parent:
            if not isinstance(item, (dict, list)):
                yield item


ARGUMENTS = [
    "", "0", "-1", "1", "2", "3", "7", "65536", "1000000000", "9" * 30, "1.5", "nan", "inf", "-inf",
    "1e400", "auto", "off", "on", "all", "x", "é\n[/x]", "\udcff", "-", "--", "=", "=1", "a=b=c",
    "0.9,0.999", "1,1", "nan,nan", ",", "4,8", "0,1", "4,x", "..", "/", "/dev/null", "nowhere/x",
    "a" * 5000, "%s", "$HOME", "*", "~", "[red]", *AMOUNTS[4:],
]  # fmt: skip


def broken_arguments(
    rng: Random, given: Sequence[str], options: Sequence[tuple[str, bool]]
) -> list[str]:
    """A command line with words left out, changed, put in and moved.

    Args:
        options: names of the command's options, and whether each takes a value.
    """
    words = list(given)
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        k = rng.randrange(len(words) + 1)
        way = rng.random()
        if way < 0.5:
            name, takes_value = rng.choice(list(options))
            words[k:k] = [name, rng.choice(ARGUMENTS)] if takes_value else [name]
        elif way < 0.75 and k < len(words):
            words[k] = rng.choice(ARGUMENTS)
        elif way < 0.85 and k < len(words):
            del words[k]
        elif way < 0.95 and k < len(words):
            word = words[k]
            at = rng.randrange(len(word) + 1)
            words[k] = word[:at] + rng.choice(("", "x", "-", "0", "=", "é")) + word[at + 1 :]
        else:
            rng.shuffle(words)
    return words
