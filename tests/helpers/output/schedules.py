"""Schedules as text, a line for each device, and back."""

from __future__ import annotations

from timeprest.planner.systems.operations import Op, Schedule, op_text, parse_op
from timeprest.profiles.errors import ScheduleError


def schedule_text(schedule: Schedule) -> str:
    """A schedule as text, a line for each device."""
    return "\n".join(
        " ".join(op_text(stage, op) for stage, op in ops) for ops in schedule.on_devices()
    )


def parse_schedule(text: str) -> Schedule:
    """The reverse of `schedule_text`. Raises ScheduleError."""
    stages: dict[int, list[Op]] = {}
    line_of: dict[int, int] = {}
    turns = []
    for number, line in enumerate(text.splitlines()):
        found = [parse_op(word) for word in line.split()]
        for stage, op in found:
            if line_of.setdefault(stage, number) != number:
                word = op_text(stage, op)
                raise ScheduleError(f"{word!r} stands apart from the line of stage {stage}")
            stages.setdefault(stage, []).append(op)
        turns.append(tuple(stage for stage, _ in found))
    ops = tuple(tuple(stages.get(s, ())) for s in range(max(stages, default=-1) + 1))
    own = all(set(mine) <= {s} for s, mine in enumerate(turns))
    return Schedule(ops, () if own else tuple(turns))
