"""A target's profile: measured, tried, and with what stages cost in processes where that is asked
for. Loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..profiles.measuring.bench import Progress
from ..profiles.measuring.measure import measure
from ..profiles.measuring.platforms import platform_of
from ..profiles.measuring.process_settings import one_at_a_time
from ..profiles.measuring.trial import TrialCase, TrialReport
from ..profiles.profile import Profile
from ..profiles.target import parse_input, resolve
from ..profiles.tasks.forward_parts import why_mixed
from ..profiles.tasks.loss_parts import own_copy
from .calibration.overhead import with_processes
from .prepare.devices import forward_context
from .verify.trial import try_in_pieces


@one_at_a_time
def measured(name: str, asked: Mapping[str, Any], progress: Progress | None = None) -> Profile:
    """Measure a target.

    Args:
        asked: what `ProfileRequest.read` gives.

    Raises as `measure` and `resolve`; RunError where other processes fail.
    """
    asked = dict(asked)
    together, inputs = asked.pop("together"), asked.pop("inputs")
    of_device = (asked.pop(name) for name in ("device", "spec", "autocast"))
    target = resolve(name, [parse_input(text) for text in inputs])
    profile = measure(
        target, platform=platform_of(*of_device), progress=progress, trial=_tried, **asked
    )
    if together is None:
        return profile
    if progress is not None:
        progress("processes at once", 0, 0)
    return with_processes(profile, target, inputs, together, seconds=asked["seconds"] / 2)


def _tried(case: TrialCase) -> TrialReport:
    """`try_in_pieces`, and whether the forward can be taken apart."""
    calls, targets = zip(*case.micro_batches, strict=True)

    def loss(result: Any, part: int) -> Any:
        return own_copy(case.task).loss(result, targets[part])

    with forward_context(case.autocast, case.device.type):
        mixed = why_mixed(case.model, calls, loss)
    report = try_in_pieces(case)
    lines = [f"{case.name}: {mixed}"] if mixed else []
    return replace(report, lines=(*lines, *report.lines))
