"""Operations as boxes with labels: their places, which are merged, and what is written on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from ....planner.recordings.recording import Recording, Span
from .frame import Scale, TimeWindow
from .svg import text_width

TINY = 0.1
"""Neighbours that are narrower, in points, are drawn as one mark."""

_TOUCHING = 0.02
"""Less than this between two marks can't be seen, in points."""

LARGEST, SMALLEST = 7.0, 5.0
"""Of labels, in points."""

_KIND_ORDER = "FBWU"


class Mark(NamedTuple):
    """A box of a lane, and of a stage where the lane has several, for so many operations (`spans`).
    `cut`: the window ends within it. Versions are of the weights, as in `Span`."""

    lane: int
    stage: int | None
    kind: str
    mini_batch: int
    micro_batch: int | None
    x: float
    width: float
    spans: int = 1
    cut: bool = False
    version: int | None = None
    forward_version: int | None = None


def marks_of(recording: Recording, window: TimeWindow, scale: Scale, most: int) -> list[Mark]:
    """Marks of all that runs in the window: one for each operation wide enough, and no more than
    about `most`."""
    lanes: dict[int, list[Mark]] = defaultdict(list)
    for span in recording.spans:
        if span.start_s < window.end_s and span.end_s > window.begin_s:
            several = len(recording.lanes[span.lane].stages) > 1
            lanes[span.lane].append(_mark(span, window, scale, several=several))
    tiny = TINY
    while True:
        found = [mark for marks in lanes.values() for mark in _joined(_merged(marks, tiny))]
        if len(found) <= most or tiny > scale.right - scale.left:
            return found
        tiny *= 2


def _mark(span: Span, window: TimeWindow, scale: Scale, *, several: bool) -> Mark:
    # The scale may go on beyond the window, where another recording is longer.
    x = scale(max(span.start_s, window.begin_s))
    cut = span.start_s < window.begin_s or span.end_s > window.end_s
    return Mark(
        span.lane,
        span.stage if several else None,
        span.kind,
        span.mini_batch,
        span.micro_batch,
        x,
        scale(min(span.end_s, window.end_s)) - x,
        1,
        cut,
        span.version,
        span.forward_version,
    )


def _merged(marks: Iterable[Mark], tiny: float) -> Iterator[Mark]:
    """A lane's marks, tiny neighbours as one; of each stage and kind as long as all of them."""
    few: list[Mark] = []
    for mark in marks:
        small = mark.width < tiny
        if few and (not small or mark.x - few[0].x > max(tiny, 2 * TINY)):
            yield from _as_one(few)
            few = []
        if small:
            few.append(mark)
        else:
            yield mark
    if few:
        yield from _as_one(few)


def _as_one(few: Sequence[Mark]) -> Iterator[Mark]:
    x = few[0].x
    stages = sorted({-1 if mark.stage is None else mark.stage for mark in few})
    for kind, stage in product(_KIND_ORDER, stages):
        same = [mark for mark in few if mark.kind == kind and mark.stage in (None, stage)]
        if same:
            width = sum(mark.width for mark in same)
            yield same[0]._replace(x=x, width=width, spans=sum(mark.spans for mark in same))
            x += width


def _joined(marks: Iterable[Mark]) -> Iterator[Mark]:
    """Marks that stand for several operations, and are alike and side by side, as one."""
    last: Mark | None = None
    for mark in marks:
        if (
            last is not None
            and min(last.spans, mark.spans) > 1
            and last[:4] == mark[:4]
            and mark.x - (last.x + last.width) < _TOUCHING
        ):
            width = mark.x + mark.width - last.x
            last = last._replace(width=width, spans=last.spans + mark.spans)
            continue
        if last is not None:
            yield last
        last = mark
    if last is not None:
        yield last


# Labels -------------------------------------------------------------------------------------------


class Label(NamedTuple):
    """Words on a mark, or on a row of so many: one line, or the mini-batch above the micro-batch,
    around the middle `x`; and `below` the weights' version, smaller, empty where it doesn't fit or
    isn't wanted."""

    lines: tuple[str, ...]
    mark: Mark
    x: float
    row: int = 1
    below: str = ""


class Lettering(NamedTuple):
    """Labels of a figure, all of one size.

    Attributes:
        micro: how micro-batches are named: "line" 3.1, "stack" 3 above 1, or "" not at all.
        lifted: room below for versions.
        stage: the last of those that labels begin with; None: none does.
    """

    size: float
    micro: str
    labels: tuple[Label, ...]
    lifted: float = 0.0
    stage: int | None = None


VERSION_SIZE = 5.0
"""Of versions below labels, in points."""


def lettering(marks: Sequence[Mark], height: float, versions: bool = False) -> Lettering:
    """The labels that fit in lanes of a height, as large as they do; with `versions`, which weights
    each had is said below it."""
    lifted = VERSION_SIZE + 0.5 if versions and height > 2.4 * VERSION_SIZE else 0.0
    height -= lifted
    size, form = _size_and_form(marks, height)
    if form == "row" and any(mark.stage is not None for mark in marks):
        # Rather no stages than no micro-batches: stages have rules, too.
        without = [mark._replace(stage=None) for mark in marks]
        size_without, form_without = _size_and_form(without, height)
        if form_without != "row":
            marks, size, form = without, size_without, form_without
    if size < SMALLEST:
        return Lettering(size, "", ())
    if form == "row":
        labels = _rows(marks, size)
    else:
        labels = _each(marks, form, size)
    if lifted:
        labels = (_with_version(label, marks) for label in labels)
    shown = tuple(labels)
    stages = (label.mark.stage for label in shown if label.mark.stage is not None)
    micro = form if form in ("line", "stack") else ""
    return Lettering(size, micro, shown, lifted, max(stages, default=None))


def _size_and_form(marks: Sequence[Mark], height: float) -> tuple[float, str]:
    """The size of labels, and what they name: as "line", "stack", "whole" or "row"."""
    named = [m for m in marks if m.kind != "U" and m.spans == 1 and not m.cut]
    micro = [m for m in named if m.micro_batch is not None]
    whole = [m for m in named if m.micro_batch is None]
    if any(m.micro_batch for m in micro):
        for form in ("line", "stack"):
            size = _size(micro, form, height)
            if size:
                return min(size, _size(whole, "line", height) or size), form
    else:
        # Whole mini-batches: their number says all.
        size = _size(named, "whole", height)
        if size:
            return size, "whole"
    return min(_size(whole, "line", height) or height - 1, 6.5), "row"


def _lines(mark: Mark, form: str) -> tuple[str, ...]:
    mini = _mini_batch(mark)
    if mark.micro_batch is None or form == "whole":
        return (mini,)
    if form == "stack":
        return mini, str(mark.micro_batch)
    return (f"{mini}.{mark.micro_batch}",)


def _mini_batch(mark: Mark) -> str:
    """``3``; with its stage ``2:3``."""
    return f"{'' if mark.stage is None else f'{mark.stage}:'}{mark.mini_batch}"


def _fits(mark: Mark, form: str, size: float) -> bool:
    return max(text_width(line, size) for line in _lines(mark, form)) + 1 <= mark.width


def _size(marks: Sequence[Mark], form: str, height: float) -> float:
    """The largest size in which nine tenths of the labels fit; 0: none."""
    lines = 2 if form == "stack" else 1
    size = LARGEST
    while size >= SMALLEST and marks:
        if lines * size + 1 <= height:
            fitting = sum(_fits(mark, form, size) for mark in marks)
            if fitting >= 0.9 * len(marks):
                return size
        size -= 0.5
    return 0.0


def _with_version(label: Label, marks: Sequence[Mark]) -> Label:
    """``v3``; of a backward on others than its forward's, ``v0→v3``."""
    mark = label.mark
    if mark.version is None:
        return label
    same = marks[marks.index(mark) :][: label.row]
    last = same[-1]
    text = f"v{mark.version}"
    if mark.forward_version is not None and mark.forward_version != mark.version:
        text = f"v{mark.forward_version}→{text}"
    elif last.version != mark.version:
        text += f", v{last.version}"
    width = last.x + last.width - mark.x
    return label._replace(below=text) if text_width(text, VERSION_SIZE) + 1 <= width else label


def _each(marks: Iterable[Mark], form: str, size: float) -> Iterator[Label]:
    for mark in marks:
        if mark.kind != "U" and mark.spans == 1 and _fits(mark, form, size):
            yield Label(_lines(mark, form), mark, mark.x + mark.width / 2)


def _rows(marks: Sequence[Mark], size: float) -> Iterator[Label]:
    """One label, of the mini-batch alone, for neighbours of one kind and one mini-batch."""
    k = 0
    while k < len(marks):
        first = last = marks[k]
        end = k + 1
        while end < len(marks) and _same(last, marks[end]):
            last = marks[end]
            end += 1
        width = last.x + last.width - first.x
        text = _mini_batch(first)
        if first.kind != "U" and text_width(text, size) + 1.2 <= width:
            yield Label((text,), first, first.x + width / 2, end - k)
        k = end


def _same(one: Mark, other: Mark) -> bool:
    return one[:4] == other[:4] and other.x - (one.x + one.width) < 0.6
