"""A layer's costs at micro-batch sizes that weren't measured, from those that were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .profile import Measurement

_COSTS = tuple(
    # How well it is known isn't interpolated.
    name
    for name in Measurement.__struct_fields__
    if name not in ("micro_batch", "relative_error")
)


def measured_at(measurements: Sequence[Measurement], micro_batch: int) -> Measurement:
    """What was measured at a size; else what lies on the line through the two nearest sizes.

    Beyond the measured sizes, what more samples cost is never less than what fewer do, nor are
    fewer cheaper than in proportion. Where a single size was measured, all is in proportion.

    Args:
        measurements: at rising sizes, one or more.
    """
    for m in measurements:
        if m.micro_batch == micro_batch:
            return m
    if len(measurements) == 1:
        return _made(micro_batch, lambda field: _in_proportion(measurements[0], field, micro_batch))
    above = next((k for k, m in enumerate(measurements) if m.micro_batch > micro_batch), None)
    high = len(measurements) - 1 if above is None else max(above, 1)
    low = measurements[high - 1]
    return _made(micro_batch, lambda field: _on_line(low, measurements[high], field, micro_batch))


def _made(micro_batch: int, cost: Callable[[str], float | None]) -> Measurement:
    found: dict[str, Any] = {name: cost(name) for name in _COSTS}
    for name, value in found.items():
        if value is not None and name.endswith(("_bytes", "_tensors")):
            found[name] = round(value)
    return Measurement(micro_batch=micro_batch, **found)


def _in_proportion(known: Measurement, field: str, micro_batch: int) -> float | None:
    value: float | None = getattr(known, field)
    if value is None or field.endswith("_tensors"):
        return value
    return value * (micro_batch / known.micro_batch)


def _on_line(low: Measurement, high: Measurement, field: str, micro_batch: int) -> float | None:
    a: float | None = getattr(low, field)
    b: float | None = getattr(high, field)
    if a is None or b is None:
        return None
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)
    found = a + (b - a) * share
    if share > 1:
        return max(found, b)
    if share < 0:
        return min(max(found, a * micro_batch / low.micro_batch), a)
    return found
