"""A layer's costs at micro-batch sizes that weren't measured, from those that were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .profile import Measurement

_COSTS = tuple(
    # How well it is known isn't interpolated.
    name
    for name in Measurement.__struct_fields__
    if name not in ("micro_batch", "relative_error")
)


def measured_at(measurements: Sequence[Measurement], micro_batch: int) -> Measurement:
    """What was measured at a size; else what lies on the line through the two nearest of the sizes,
    which rise.

    Beyond the measured sizes, what more samples cost is never less than what fewer do, nor are
    fewer cheaper than in proportion. Where a single size was measured, all is in proportion.
    """
    for m in measurements:
        if m.micro_batch == micro_batch:
            return m
    low, high = None, measurements[0]
    if len(measurements) > 1:
        above = (k for k, m in enumerate(measurements) if m.micro_batch > micro_batch)
        end = max(next(above, len(measurements) - 1), 1)
        low, high = measurements[end - 1], measurements[end]
    found: dict[str, Any] = {name: _on_line(low, high, name, micro_batch) for name in _COSTS}
    for name, value in found.items():
        if value is not None and name.endswith(("_bytes", "_tensors")):
            found[name] = round(value)
    return Measurement(micro_batch=micro_batch, **found)


def _on_line(
    low: Measurement | None, high: Measurement, field: str, micro_batch: int
) -> float | None:
    """Through both, or in proportion to `high`, where there is nothing else."""
    b: float | None = getattr(high, field)
    if low is None:
        if b is None or field.endswith("_tensors"):
            return b
        return b * (micro_batch / high.micro_batch)
    a: float | None = getattr(low, field)
    if a is None or b is None:
        return None
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)
    found = a + (b - a) * share
    if share > 1:
        return max(found, b)
    if share < 0:
        return min(max(found, a * micro_batch / low.micro_batch), a)
    return found
