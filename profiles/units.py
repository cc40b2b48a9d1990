"""Reading what people give: numbers, names, and bytes, seconds and bandwidths with their units;
and printing these."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from decimal import Decimal
from math import inf, nan
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from .errors import UserError
from .files import MAX_BYTES, MAX_SECONDS, MIN_SECONDS

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = {k + unit: factor for k, factor in (_DECIMAL | _BINARY).items() for unit in ("", "b")}
# Micro is written with the sign of that name, or with the Greek letter.
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9}
_QUANTITY = re.compile(r"^\s*(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d+))?\s*([a-zA-Z\u00b5\u03bc/]*)\s*$")

_BANDWIDTH = re.compile(r"^\s*(.*?)(b|B|bits?|Bits?)?(/s|ps)?\s*$")
_MOST_BANDWIDTH = 2**62
_LEAST_BARE = 1000
"""Amounts below it are taken for ones without their unit."""
_MOST_SHOWN = 80


def shown(value: object) -> str:
    """A value as errors show it, on one line that isn't endless."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:
        # Of an integer with thousands of digits Python makes no text.
        return "such a large number"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def truth(value: object, what: str) -> bool:
    """True or False, numpy's too. Raises UserError naming `what`."""
    kind = type(value)
    # By its name: commands that need no numpy start without it.
    of_numpy = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    if not (isinstance(value, bool) or of_numpy):
        raise UserError(f"{what}: give True or False, not {shown(value)}")
    return bool(value)


def whole_number(value: object) -> int | None:
    """Any library's whole number as Python's; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return index(value)
    # Arrays of several and numpy's bool have the method alone.
    except TypeError:
        return None


def real_number(value: object) -> float | None:
    """Any library's number as Python's, whole ones as they are; None for what is none."""
    whole = whole_number(value)
    if whole is not None or isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
        return whole
    try:
        return float(value)
    # Of a fraction too large, and of a decimal that signals that it is none.
    except (OverflowError, ValueError):
        return nan


def whole(count: object, name: str, least: int = 1) -> int:
    """Raises UserError for what is no whole number, or less."""
    found = whole_number(count)
    if found is None or found < least:
        raise UserError(f"{name} {shown(count)}: give a whole number from {least}")
    return found


def number(
    value: object, name: str, most: float = sys.float_info.max, other: str = ""
) -> float | None:
    """None stays None. Raises UserError for what is no number from 0 to `most`."""
    if value is None:
        return None
    found = real_number(value)
    if found is None or not 0 <= found <= most:
        raise UserError(f"{name} {shown(value)}: give a number from 0{other}")
    return float(found)


def path(value: object, name: str) -> Path:
    """Raises UserError for what is no path."""
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{name} {shown(value)}: give a path")
    return Path(value)


# Texts become Python's own below: files can't hold NumPy's.


def words(**given: object) -> dict[str, Any]:
    """Raises UserError for what is no text."""
    for name, value in given.items():
        if not isinstance(value, str):
            raise UserError(f"{name}: give a name in quotes, not {shown(value)}")
    return {name: str(value) for name, value in given.items()}


def texts(given: object, name: str, example: str) -> list[str]:
    """One or several texts as a list. Raises UserError for what is neither."""
    try:
        found = [given] if isinstance(given, str) else list(given)  # type: ignore[call-overload]
    except TypeError:
        found = [None]
    if not all(isinstance(text, str) for text in found):
        raise UserError(f"{name}: give one or more such as {example!r}, not {shown(given)}")
    return list(map(str, found))


def _written(amount: object, what: str, example: str) -> str:
    """An amount as text; a number has no unit. Raises UserError for what is neither."""
    number = real_number(amount)
    if number is not None:
        try:
            return repr(number)
        except ValueError:
            raise UserError(
                f"{what}: {shown(number)} is too large; write it like {example}"
            ) from None
    if not isinstance(amount, str):
        raise UserError(f"{what}: can't read {shown(amount)}; write it like {example}")
    return amount


def _quantity(
    text: str, what: str, example: str, units: Mapping[str, float], given: str | None = None
) -> float:
    """A number with one of these units. `given`: what the user wrote, which `text` is a part of."""
    given = text if given is None else given
    match = _QUANTITY.match(text)
    if not match:
        raise UserError(f"{what}: can't read {given!r}; write it like {example}")
    number, exponent, unit = match.groups()
    value = float(f"{number}e{exponent or 0}")
    if value == inf:
        raise UserError(f"{what}: {given!r} is too large; write it like {example}")
    factor = units.get(unit.lower())
    if factor is None:
        raise UserError(f"{what}: unknown unit in {given!r}; write it like {example}")
    return value * factor


def parse_bytes(text: str | float, what: str = "bytes", *, most: int = MAX_BYTES) -> int:
    """``"16GiB"``, ``"500MB"``, ``"4096"``, ``4096`` → bytes. Raises UserError naming `what`."""
    example = "16GiB, 500MB or 4096"
    amount = _quantity(_written(text, what, example), what, example, _BYTES)
    if amount > most:
        raise UserError(f"{what}: {text!r} is more than {format_bytes(most)}")
    return int(amount)


def parse_memory(text: str | float, what: str = "memory") -> int:
    """As `parse_bytes`, of a device's memory: few bytes without a unit are a unit forgotten."""
    found = parse_bytes(text, what)
    _check_unit(text, found, what, "bytes", "GiB")
    return found


def parse_share(text: str | float, what: str) -> float:
    """``"8%"``, ``"0.08"`` or ``0.08`` → 0.08. Raises UserError naming `what` for what is no share
    from 0 to below 1."""
    example = "8% or 0.08"
    written = _written(text, what, example).strip()
    try:
        share = float(written.removesuffix("%")) / (100 if written.endswith("%") else 1)
        if not 0 <= share < 1:
            raise ValueError
    except ValueError:
        raise UserError(f"{what} {text}: give a share below 100%, like {example}") from None
    return share


def _check_unit(text: str | float, amount: float, what: str, bare: str, unit: str) -> None:
    if 0 < amount < _LEAST_BARE and re.fullmatch(r"[\d.]+", str(text).strip()):
        number = str(text).strip()
        raise UserError(
            f"{what}: {number} is {number} {bare}; write its unit, as in {number}{unit}"
        )


def parse_bandwidth(text: str | float, what: str = "bandwidth") -> float:
    """``"12GB/s"``, ``12e9`` or, in bits, ``"100Mbit/s"`` and ``"100Mbps"`` → bytes per second.

    Raises UserError naming `what`; for ``Gb/s``, too, which is bits to some and bytes to others.
    """
    example = "12GB/s or 100Mbit/s"
    text = _written(text, what, example)
    match = _BANDWIDTH.match(text)
    number, unit, per = match.groups("") if match else (text, "", "")
    if unit == "b" and per != "ps":
        raise UserError(
            f"{what}: {text!r} may mean bits or bytes; write {number}bit/s or {number}B/s"
        )
    bits = 8 if unit.lower().startswith("bit") or unit == "b" else 1
    bandwidth = _quantity(number, what, example, _BYTES, text) / bits
    if bandwidth > _MOST_BANDWIDTH:
        raise UserError(f"{what}: {text!r} is more than {format_bytes(_MOST_BANDWIDTH)}/s")
    if bandwidth < 1:
        raise UserError(
            f"{what}: must be at least a byte per second, not {text!r}; write it like {example}"
        )
    _check_unit(text, bandwidth, what, "bytes per second", "GB/s")
    return bandwidth if bits > 1 else float(int(bandwidth))


def parse_seconds(text: str | float, what: str = "time") -> float:
    """``"10us"``, ``"0.5ms"``, ``"2"``, ``2`` → seconds. Raises UserError naming `what`."""
    example = "10us, 0.5ms or 2s"
    text = _written(text, what, example)
    seconds = _quantity(text, what, example, _SECONDS)
    if seconds > MAX_SECONDS:
        raise UserError(f"{what}: {text!r} is more than {MAX_SECONDS:.0e} s")
    return seconds if seconds >= MIN_SECONDS else 0.0


def parse_latency(text: str | float, what: str = "latency") -> float:
    """The same of a link's latency; a bare number must be less than a second."""
    found = parse_seconds(text, what)
    if found >= 1 and re.fullmatch(r"[\d.]+", str(text).strip()):
        raise UserError(f"{what}: {text} is {text} seconds; write its unit, as in {text}us")
    return found


def format_bytes(count: float) -> str:
    """Bytes as people read them: ``1536`` → ``"1.5 KiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1023.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} EiB" if size < 1000 else f"{size:.3g} EiB"


def short_bytes(count: float) -> str:
    """Bytes in three digits and the unit, for tables: ``"781 KiB"``, ``"66.8 MiB"``."""
    number, unit = format_bytes(count).split()
    return f"{float(number):.0f} {unit}" if len(number) > 4 else f"{number} {unit}"


def format_seconds(seconds: float) -> str:
    """Seconds as people read them: ``0.0123`` → ``"12.3 ms"``."""
    # Rounded before the unit is chosen: 999.6 µs is 1 ms.
    seconds = float(f"{seconds:.3g}") if seconds < 1000 else seconds
    if seconds == 0:
        return "0 s"
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit:
            return f"{seconds * factor:.3g} {unit}"
    if seconds < 1000:
        return f"{seconds:.3g} s"
    return f"{seconds:.0f} s" if seconds < 1e6 else f"{seconds:.3g} s"


def format_rate(per_s: float, what: str) -> str:
    """``7641.2`` → ``"7641 samples/s"``; slow rates with three digits."""
    text = f"{per_s:.0f}" if 1000 <= per_s < 1e7 else f"{float(f'{per_s:.3g}'):g}"
    return f"{text} {what}/s"
