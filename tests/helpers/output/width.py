"""What holds for all that the commands print: it fits its width, and people can read it."""

from __future__ import annotations

import re

from rich.cells import cell_len

NO_NUMBER = re.compile(r"\b(nan|inf|None)\b", re.IGNORECASE)
RAW = re.compile(r"\{['\"]|\w+\(\w+=|<\w+ object|0x[0-9a-f]{6}|\[\(|Ellipsis")
MANY_DIGITS = re.compile(r"\d{7,}|\de\+\d|\b(?!0\.0+\d{1,3}\b)\d+\.\d{5,}")
"""Three that count may stand behind zeros: 0.00999."""


def check_fits(text, width, bytes_in_it=()):
    """Lines of `width` columns at most, no nan or raw Python value, no byte count without a unit.

    Args:
        bytes_in_it: byte counts that must not stand there as they are.
    """
    for line in text.splitlines():
        assert cell_len(line) <= width, line
        assert line.isprintable(), ascii(line)
    for pattern in (NO_NUMBER, RAW, MANY_DIGITS):
        found = pattern.search(text)
        assert found is None, f"{found and found.group()!r} in\n{text}"
    bare = {str(count) for count in bytes_in_it if count >= 1024}
    for word in re.findall(r"\d+(?! ?[KMGTPE]?i?B\b)", text):
        assert word not in bare, f"{word} bytes without a unit in\n{text}"


def byte_counts(plan):
    """All byte counts of a plan."""
    found = [edge.bytes_per_micro_batch for edge in plan.edges]
    for stage in plan.predicted.stages:
        kinds = ("weights", "gradients", "optimizer", "activations", "boundary", "workspace")
        found += [stage.parameter_bytes, stage.memory_bytes]
        found += [getattr(stage.memory, f"{kind}_bytes") for kind in kinds]
    return found
