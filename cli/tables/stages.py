"""Tables of a plan's stages: layers, devices and times; and memory by kind, of each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import msgspec
from rich.console import Console, Group
from rich.text import Text

from ...planner.engine_costs import ENGINE_COSTS
from ...planner.plan import DevicePrediction, Plan, PlanStage, StagePrediction
from ...planner.recordings.recording import lanes_of, stages_text
from ...planner.systems.placement import pattern_of
from ...profiles.units import format_bytes, format_seconds, short_bytes
from ..errors import printable
from .layout import Cell, Column, counted, devices_text, first_to_last, fitted, fixed, words
from .palette import LETTERS, LIMIT, MEMORY, memory_style

# Devices and their stages ------------------------------------------------------------------------


class OnDevice(NamedTuple):
    """A device with its stages, or the devices of their replicas, which all hold as much."""

    stages: tuple[int, ...]
    predicted: StagePrediction | DevicePrediction


def on_devices(plan: Plan) -> list[OnDevice]:
    """A plan's devices, as stages come to them. Of a plan that was edited since it was predicted,
    its stages, each by itself."""
    known = {device.stages: device for device in plan.predicted.devices}
    lanes = [lane.stages for lane in lanes_of(plan) if lane.replica == 0]
    if not known or any(stages not in known for stages in lanes):
        return [OnDevice((s,), stage) for s, stage in enumerate(plan.predicted.stages)]
    return [OnDevice(stages, known[stages]) for stages in lanes]


def placement_name(plan: Plan) -> str:
    """``straight``, ``loop``, ``v`` or ``free``."""
    return pattern_of(plan.placement, len(plan.stages))


def device_name(plan: Plan, found: OnDevice) -> str:
    """``stage 1``; where devices have several, ``device0 (stages 0, 3)``."""
    name = stages_text(found.stages)
    devices = plan.stages[found.stages[0]].devices
    if not plan.placement or len(devices) > 1:
        return name
    return f"{printable(plan.cluster.devices[devices[0]].name)} ({name})"


# Rows of stages that are alike, with figures as ranges --------------------------------------------

MOST_ROWS = 16
"""A plan with more stages is folded where its stages are alike."""

_APART = (0.0, 0.02, 0.05, 0.1, 0.25)
"""How far apart figures of stages in one row may be, tried in this sequence."""


@dataclass(frozen=True)
class Folded:
    """Rows of stages, first to last.

    Attributes:
        apart: share by which times, memory and idle shares within a row differ at most; None:
            rows are of equal length, whatever is in them.
    """

    rows: tuple[range, ...]
    apart: float | None

    @property
    def stages(self) -> int:
        """How many there are."""
        return self.rows[-1].stop

    @property
    def note(self) -> str:
        """How rows were folded, in words; empty where none was."""
        if len(self.rows) == self.stages:
            return ""
        if self.apart is None:
            return f"{self.stages} stages in {len(self.rows)} rows; -v: each by itself"
        far = "" if not self.apart else f" to within {self.apart:.0%}"
        return f"neighbours that are alike{far} share a row; -v: each stage by itself"


def folded(plan: Plan, *, every: bool = False) -> Folded:
    """The plan's stages in rows: `MOST_ROWS` of them or fewer. `every`: each has its own."""
    figures = [_figures(plan, s) for s in range(len(plan.stages))]
    return _folded(figures, len(figures) if every else MOST_ROWS)


def _folded(figures: Sequence[_Figures], most: int) -> Folded:
    count = len(figures)
    if count <= most:
        return Folded(tuple(range(k, k + 1) for k in range(count)), 0.0)
    for apart in _APART:
        rows = _alike(figures, apart)
        if len(rows) <= most:
            return Folded(tuple(rows), apart)
    borders = [round(k * count / most) for k in range(most + 1)]
    return Folded(tuple(range(a, b) for a, b in pairwise(borders)), None)


_Figures = tuple[tuple[int, ...], tuple[float, ...]]
"""What must be equal, and what must be near."""


def _figures(plan: Plan, s: int) -> _Figures:
    stage, predicted = plan.stages[s], plan.predicted.stages[s]
    times = predicted.forward_s, predicted.backward_s, predicted.transfer_s
    counts = len(stage.nodes), len(stage.devices), recomputed_layers(stage)
    # Idle shares are shares of a period already: 3 % and 4 % are near.
    return counts, (*times, float(predicted.memory_bytes), 1 + predicted.idle_share)


def _device_rows(plan: Plan, found: Sequence[OnDevice], *, every: bool) -> tuple[range, ...]:
    if not plan.placement:
        return folded(plan, every=every).rows
    figures = [
        (
            (len(each.stages), len(plan.stages[each.stages[0]].devices)),
            (float(each.predicted.memory_bytes), 1 + each.predicted.idle_share),
        )
        for each in found
    ]
    return _folded(figures, len(figures) if every else MOST_ROWS).rows


def _alike(figures: Sequence[_Figures], apart: float) -> list[range]:
    rows: list[range] = []
    lowest: list[float] = []
    highest: list[float] = []
    for s, (same, near) in enumerate(figures):
        low, high = list(map(min, near, lowest)), list(map(max, near, highest))
        if (
            rows
            and same == figures[rows[-1].start][0]
            and all(b <= a * (1 + apart) + 1e-30 for a, b in zip(low, high, strict=True))
        ):
            rows[-1] = range(rows[-1].start, s + 1)
            lowest, highest = low, high
        else:
            rows.append(range(s, s + 1))
            lowest = highest = list(near)
    return rows


def ranged(values: Iterable[float], text: Callable[[float], str]) -> str:
    """``"3.2 GiB"``, ``"3.2–4.1 GiB"`` or ``"980.0 MiB–1.2 GiB"``: the least to the most."""
    found = list(values)
    least, most = text(min(found)), text(max(found))
    if least == most:
        return most
    number, _, unit = least.partition(" ")
    if unit and most.endswith(f" {unit}"):
        return f"{number}–{most}"
    if least.endswith("%"):
        return f"{least[:-1]}–{most}"
    return f"{least}–{most}"


# Tables -------------------------------------------------------------------------------------------

_LEAST_BAR, _MOST_BAR = 12, 32


def stage_table(plan: Plan, width: int, *, every: bool = False) -> Group:
    """Table of layers, devices and times of each stage; fits `width` columns. `every`: no rows are
    folded."""
    rows = folded(plan, every=every).rows
    stages = plan.predicted.stages

    def figures(
        name: str, value: Callable[[StagePrediction], float], text: Callable[[float], str]
    ) -> Column:
        return fixed(name, [ranged((value(stages[s]) for s in row), text) for row in rows])

    limits = [ranged((plan.stages[s].in_flight for s in row), _whole) for row in rows]
    columns = [
        _layers(plan, rows),
        words("device", [devices_text(plan, row) for row in rows], 14),
        figures("parameters", lambda p: p.parameter_bytes, short_bytes),
        figures("forward", lambda p: p.forward_s, format_seconds),
        figures("backward", lambda p: p.backward_s, format_seconds),
        figures("transfer", lambda p: p.transfer_s, format_seconds),
        # Where stages share devices, those are idle, and hold the memory of all.
        figures("memory", lambda p: p.memory_bytes, short_bytes)
        if plan.placement
        else figures("idle", lambda p: p.idle_share, _share),
        fixed("L", limits),
        figures("ver", lambda p: p.versions_held, _whole),
        figures("d", lambda p: p.version_difference, _whole),
    ]
    return fitted(_title(plan), _keys(rows), columns, width)


def memory_table(plan: Plan, console: Console, width: int, *, every: bool = False) -> Group:
    """Table of the peak memory of each stage, or of each device where they share those: a bar
    against its limit, and by kind; fits `width`. `every`: no rows are folded."""
    found = on_devices(plan)
    rows = _device_rows(plan, found, every=every)
    held = [each.predicted for each in found]
    limits = [memory_limit(plan, each.stages[0]) for each in found]
    free = [kept_free(plan, each.stages[0]) for each in found]
    most = max(each.memory_bytes for each in held)
    # The fullest stands for its row.
    fullest = [max(row, key=lambda k: held[k].memory_bytes / (limits[k] or 1)) for row in rows]

    def sizes(name: str, values: Callable[[int], float]) -> Column:
        return fixed(name, [ranged(map(values, row), short_bytes) for row in rows])

    def bars(columns: int) -> list[Cell]:
        return [
            memory_bar(console, by_kind(held[k]), limits[k] or most, columns, free[k])
            for k in fullest
        ]

    of_limit = any(limit is not None for limit in limits)
    key, columns = _keys(rows), []
    if plan.placement:
        names = [devices_text(plan, (found[k].stages[0] for k in row)) for row in rows]
        key = words("device", names, 14)
        stages = [_row_stages(found, row) for row in rows]
        idle = [ranged((held[k].idle_share for k in row), _share) for row in rows]
        columns = [words("stages", stages, 8), fixed("idle", idle)]
    columns += [
        sizes("memory", lambda k: held[k].memory_bytes),
        Column("of its limit" if of_limit else "of the most", _MOST_BAR, _LEAST_BAR, bars, True),
    ]
    if of_limit:
        columns.append(fixed("", [_percent(held[k], limits[k], free[k]) for k in fullest]))
    if len({limit for limit in limits if limit}) > 1 or (of_limit and None in limits):
        columns.append(fixed("limit", [_limits(limits[k] for k in row) for row in rows]))
    for kind in MEMORY:
        if any(by_kind(each)[kind] for each in held):
            columns.append(sizes(f"{kind}", lambda k, kind=kind: by_kind(held[k])[kind]))  # type: ignore[misc]
    return fitted(_memory_title(limits), key, columns, width)


def notes(plan: Plan, *, every: bool = False) -> Text:
    """Legend of both tables."""
    held = [each.predicted for each in on_devices(plan)]
    used = [kind for kind in MEMORY if any(by_kind(each)[kind] for each in held)]
    said = (
        "forward, backward, transfer: per micro-batch. L: mini-batches in flight at most. ver: "
        "weight versions held. d: version difference, backward less forward. v: mini-batches from "
        "one to the next of the same sequence of updates. In the bars: "
    )
    said += ", ".join(f"{LETTERS[kind]} {kind}" for kind in used)
    free = any(map(partial(kept_free, plan), range(len(plan.stages))))
    said += f", {_FREE} kept free." if free else "."
    if plan.order is not msgspec.UNSET:
        said += f" The order is a given one, in {plan.variant}'s weight rules."
    if plan.placement:
        said += " A device's peak isn't the sum of its stages' peaks: those come at other moments."
    if any(stage.recompute for stage in plan.stages):
        said += " ↻: activations are computed again"
        some = any(stage.recomputed for stage in plan.stages)
        said += "; ↻ n: those of n layers alone." if some else "."
    if plan.profile.reserved_bytes:
        most = max(map(partial(_reserved, plan), held))
        said += (
            f" workspace: with up to {format_bytes(most)} that each process takes of its GPU "
            "besides tensors."
        )
    if plan.engine is not msgspec.UNSET:
        said += f" engine: what {ENGINE_COSTS[plan.engine].title} keeps besides what tp-run does."
    if any(len(stage.devices) > 1 for stage in plan.stages):
        said += " (n) after devices: so many replicas; memory is each one's."
    more = folded(plan, every=every).note
    return Text(f"{said} {more}".rstrip(), style="dim")


def _reserved(plan: Plan, held: StagePrediction | DevicePrediction) -> int:
    """Bytes of what a process holds that are no tensors' (`memory.with_reserved`)."""
    fixed_bytes, share = plan.profile.reserved_bytes or 0, plan.profile.reserved_share or 0.0
    return held.memory_bytes - round((held.memory_bytes - fixed_bytes) / (1.0 + share))


def by_kind(held: StagePrediction | DevicePrediction) -> dict[str, int]:
    """Bytes by the palette's kinds."""
    return {kind: getattr(held.memory, f"{kind}_bytes") for kind in MEMORY}


def memory_limit(plan: Plan, s: int) -> int | None:
    """Memory of the stage's smallest device, in bytes; None: no limit."""
    device = plan.cluster.tightest(plan.stages[s].devices)
    return None if device is None else device.memory_bytes


def kept_free(plan: Plan, s: int) -> int:
    """Bytes of that memory that the plan leaves free."""
    device = plan.cluster.tightest(plan.stages[s].devices)
    return 0 if device is None else device.free_bytes


_FREE = "x"


def memory_bar(
    console: Console, kinds: dict[str, int], whole: int, width: int, free: int = 0
) -> Text:
    """Kinds stacked in a bar of `width` columns that stands for `whole` bytes.

    Each column has the letter of what most of it is; on a terminal, in that kind's colour. `free`
    bytes at its end stay so.
    """
    bar = Text()
    held = sum(kinds.values())
    scale = width / max(whole, held, 1)
    total = 0
    drawn = 0
    for kind, size in kinds.items():
        total += size
        # What would have a quarter of a column has one, taken from those after it.
        end = min(max(round(total * scale), drawn + (size * scale >= 0.25)), width)
        bar.append(LETTERS[kind] * (end - drawn), memory_style(console, kind))
        drawn = max(end, drawn)
    if held > whole:
        # Beyond the limit: the mark stands where it is.
        bar = bar[: width - 1]
        bar.append("!", f"bold {LIMIT.rich}")
        return bar
    last = min(round(free * scale), width - drawn)
    bar.append("·" * (width - drawn - last), "dim")
    bar.append(_FREE * last, "dim")
    return bar


def _title(plan: Plan) -> str:
    on = ""
    if plan.placement or plan.workers != len(plan.stages):
        on = f" on {counted(plan.workers, 'device')}"
    text = (
        f"{plan.title}: {counted(len(plan.stages), 'stage')}{on}, mini-batch "
        f"{plan.mini_batch} in {counted(plan.micro_batches, 'micro-batch')} of "
        f"{plan.micro_batch}"
    )
    if plan.update_every > 1:
        text += f", an update after every {plan.update_every}"
    return text


def _memory_title(limits: Sequence[int | None]) -> str:
    known = {limit for limit in limits if limit}
    if not known:
        return "memory at its peak, without a limit"
    if len(known) == 1 and None not in limits:
        return f"memory at its peak, against the limit of {format_bytes(known.pop())} per device"
    return "memory at its peak, against the limit of each stage's smallest device"


def _keys(rows: Sequence[range]) -> Column:
    """``3``, or ``3–17``."""
    names = [f"{r.start}" if len(r) == 1 else f"{r.start}–{r.stop - 1}" for r in rows]
    return fixed("stage", names, left=True)


def recomputed_layers(stage: PlanStage) -> int:
    """How many layers a stage computes again; -1: its whole forward."""
    return -1 if stage.recompute is True else len(stage.recomputed)


def _mark(stage: PlanStage) -> str:
    count = recomputed_layers(stage)
    return "" if not count else " ↻" if count < 0 else f" ↻ {count}"


def _layers(plan: Plan, rows: Sequence[range]) -> Column:
    groups = [[name for s in row for name in plan.stages[s].nodes] for row in rows]
    marks = [_mark(plan.stages[row.start]) for row in rows]

    def cells(width: int | None) -> list[str]:
        return [
            first_to_last(names, None if width is None else width - len(mark)) + mark
            for names, mark in zip(groups, marks, strict=True)
        ]

    natural = max(len(text) for text in cells(None))
    return Column("layers", max(natural, 6), min(natural, 24), cells, left=True)


def _row_stages(found: Sequence[OnDevice], row: range) -> str:
    """``0, 3``; of several devices those of the first and of the last."""
    first, last = (stages_text(found[k].stages).partition(" ")[2] for k in (row[0], row[-1]))
    return first if len(row) == 1 else f"{first}; … {last}"


def _percent(held: StagePrediction | DevicePrediction, limit: int | None, free: int) -> Text:
    if not limit:
        return Text("-")
    share = held.memory_bytes / limit
    if held.memory_bytes > limit - free:
        return Text(f"{_share(share)}!", style=f"bold {LIMIT.rich}")
    return Text(_share(share))


def _limits(limits: Iterable[int | None]) -> str:
    found = list(limits)
    known = [limit for limit in found if limit]
    if len(known) < len(found):
        return "-" if not known else "some"
    return ranged(known, short_bytes)


def _share(value: float) -> str:
    text = f"{value:.0%}"
    return text if len(text) <= 6 else f"{value * 100:.3g}%"


def _whole(value: float) -> str:
    return f"{value:.0f}" if value < 1e7 else f"{value:.3g}"
