"""Orders that users give: what each device runs, mini-batch after mini-batch, without an end.

As text, a line for each device, of operations as `operations` has them:

    0F0.0 0F0.1 0F1.0 0F1.1 | 0B0 0F2.0 0F2.1
    1F0.0 1F0.1 | 1B0 1F1.0 1F1.1

What stands behind ``|`` repeats, the numbers of its mini-batches going on. Without ``|`` the lines
have the same whole mini-batches, from first forward to last backward, and go on with the shortest
part of theirs that makes all they have: where a run ends, forwards of further mini-batches are left
out. ``#`` begins a comment. Updates may be left out of all lines: each stands behind its stage's
last backward of the mini-batch then.

Index letters: N micro-batches in a mini-batch; M mini-batches written out; c mini-batches of what
repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ...profiles.errors import OrderError, ScheduleError
from .operations import (
    BACKWARD,
    BACKWARDS,
    FORWARD,
    FORWARDS,
    KINDS,
    LETTERS,
    UPDATE,
    UPDATES,
    WEIGHT,
    WEIGHTS,
    Op,
    Pattern,
    Row,
    op_text,
    parse_op,
    row_of,
)

REPEATS = "|"


class OrderWord(NamedTuple):
    """An operation of a file, as it stands there."""

    text: str
    stage: int
    op: Op


@dataclass(frozen=True)
class OrderLine:
    """A line of a file: what one device runs.

    Attributes:
        number: in the file, from 1.
        repeats: how many of them stand before ``|``; None: there is none.
    """

    number: int
    words: tuple[OrderWord, ...]
    repeats: int | None = None


Step = tuple[int, int]
"""Kind of an operation, and its stage."""


@dataclass(frozen=True)
class OrderRow:
    """What a device runs: `first`, then `repeat` for ever.

    Attributes:
        stages: of the device, ascending.
        cycle: c, mini-batches in `repeat`.
        device: its position among the file's lines.
        line: its number in the file.
    """

    first: tuple[Step, ...]
    repeat: tuple[Step, ...]
    stages: tuple[int, ...]
    cycle: int
    device: int = field(default=0, compare=False)
    line: int = field(default=0, compare=False)

    def steps(self) -> Iterator[Step]:
        """All of them, without an end."""
        yield from self.first
        while True:
            yield from self.repeat

    @property
    def begins(self) -> int:
        """Mini-batches after which all that is run is of `repeat`."""
        return max(self.first.count((UPDATES, s)) for s in self.stages)


@dataclass(frozen=True)
class Order:
    """An order of all devices, each operation of every mini-batch once.

    Attributes:
        rows: by their lowest stages.
        micro_batches: N.
        micro: each backward takes a micro-batch, not a mini-batch.
        split: backwards have two parts.
        reverse: backwards take a mini-batch's micro-batches from the last to the first.
        where: the file, for errors.
        spelt: how it has operations, for errors.
        marked: its lines say what repeats.
    """

    rows: tuple[OrderRow, ...]
    micro_batches: int
    micro: bool
    split: bool
    reverse: bool = False
    where: str = field(default="order", compare=False)
    spelt: Callable[[int, Op], str] = field(default=op_text, compare=False, repr=False)
    marked: bool = field(default=True, compare=False)

    @property
    def stages(self) -> int:
        """S."""
        return sum(len(row.stages) for row in self.rows)

    @property
    def placement(self) -> tuple[int, ...]:
        """Per stage, the number of its device; empty where each has one of its own."""
        found = {s: d for d, row in enumerate(self.rows) for s in row.stages}
        return tuple(found[s] for s in sorted(found)) if len(self.rows) < len(found) else ()

    @property
    def cycle(self) -> int:
        """The most mini-batches of what repeats on a device."""
        return max(row.cycle for row in self.rows)

    @property
    def alike(self) -> bool:
        """Whether every device runs one whole mini-batch after another, each in one sequence."""
        return all(not row.first and row.cycle == 1 for row in self.rows)

    @cached_property
    def patterns(self) -> tuple[Pattern, ...]:
        return tuple(map(_pattern, self.rows))

    @property
    def limits(self) -> tuple[int, ...]:
        """Per stage, the most mini-batches in flight."""
        found = {s: _most_in_flight(self, row, s) for row in self.rows for s in row.stages}
        return tuple(found[s] for s in sorted(found))

    def numbered(self, row: OrderRow, steps: Iterable[Step]) -> Iterator[tuple[int, Op]]:
        """(stage, operation) of a row's operations, from its first on."""
        counts = Counter[Step]()
        for step in steps:
            yield step[1], self.nth(step[0], counts[step])
            counts[step] += 1

    def nth(self, kind: int, count: int) -> Op:
        """A stage's operation of a kind after so many of that kind."""
        each = self.each(kind)
        b, i = divmod(count, each)
        if self.reverse and kind in (BACKWARDS, WEIGHTS):
            i = each - 1 - i
        of_micro_batch = kind == FORWARDS or (kind != UPDATES and self.micro)
        return Op(LETTERS[kind], b, i if of_micro_batch else None)

    def each(self, kind: int) -> int:
        """Operations of a kind that a stage runs in a mini-batch."""
        if kind == WEIGHTS and not self.split:
            return 0
        return self.micro_batches if kind == FORWARDS or (kind != UPDATES and self.micro) else 1

    def lines(self) -> tuple[str, ...]:
        """As text, device by device; `parse_order` reads it."""
        found = []
        for row in self.rows:
            words = [op_text(*op) for op in self.numbered(row, (*row.first, *row.repeat))]
            if not self.alike:
                words.insert(len(row.first), REPEATS)
            found.append(" ".join(words))
        return tuple(found)


def parse_order(text: str | Sequence[str], where: str = "order") -> Order:
    """An order from text, or from its lines. Raises OrderError naming line and operation."""
    found = []
    for number, line in enumerate(text.splitlines() if isinstance(text, str) else text, 1):
        words: list[OrderWord] = []
        repeats = None
        for each in line.partition("#")[0].replace(REPEATS, f" {REPEATS} ").split():
            if each == REPEATS:
                if repeats is not None:
                    raise _error(where, number, "has two |; what stands behind the one repeats")
                repeats = len(words)
                continue
            try:
                words.append(OrderWord(each, *parse_op(each)))
            except ScheduleError as error:
                raise _error(where, number, str(error)) from None
        if words:
            found.append(OrderLine(number, tuple(words), repeats))
    return order_of(found, where)


def order_of(
    lines: Sequence[OrderLine], where: str, spelt: Callable[[int, Op], str] = op_text
) -> Order:
    """The order that a file's lines give.

    Args:
        spelt: how the file has operations, for errors.

    Raises:
        OrderError: naming file, line and operation: one stands twice, is missing, or stands
            before what it needs; a stage stands on two lines, or on none.
    """
    if not lines:
        raise OrderError(f"{where}: has no operations")
    _check_stages(lines, where)
    words = [(line, word) for line in lines for word in line.words]
    backwards = [(line, word) for line, word in words if word.op.kind == BACKWARD]
    first = backwards[0][1].op.micro_batch if backwards else None
    micro = first is not None
    for line, word in backwards:
        if micro != (word.op.micro_batch is not None):
            raise _error(
                where,
                line.number,
                f"{word.text}: some backwards take a micro-batch, as 0B0.1, others a mini-batch, "
                "as 0B0; all must be alike",
            )
    split = any(word.op.kind == WEIGHT for _, word in words)
    n = 1 + max((word.op.micro_batch or 0 for _, word in words), default=0)
    reverse = n > 1 and first == n - 1
    shape = Order((), n, micro, split, reverse, where, spelt)
    has_updates = any(word.op.kind == UPDATE for _, word in words)
    with_bar = [line for line in lines if line.repeats is not None]
    if with_bar and len(with_bar) < len(lines):
        line = next(line for line in lines if line.repeats is None)
        raise _error(
            where,
            line.number,
            f"has no |, line {with_bar[0].number} has; mark in every line what repeats",
        )
    for line, word in words:
        if word.op.kind in (FORWARD, WEIGHT) and word.op.micro_batch is None:
            raise _error(where, line.number, f"{word.text}: names no micro-batch, as 0F0.1 does")
    written = 1 + max(word.op.mini_batch for _, word in words)
    rows = []
    for device, line in enumerate(lines):
        steps, repeats = _walk(shape, line, updates=not has_updates)
        stages = tuple(sorted({word.stage for word in line.words}))
        if line.repeats is None:
            _check_whole(shape, line, stages, steps, written)
            begins, repeat = _repeated(shape, steps, stages, written)
        else:
            begins, repeat = steps[:repeats], steps[repeats:]
            _check_repeats(shape, line, stages, repeat)
        rows.append(_shortest(begins, repeat, stages, device, line.number))
    rows.sort(key=lambda row: row.stages)
    return Order(tuple(rows), n, micro, split, reverse, where, spelt, bool(with_bar))


# What a file has ---------------------------------------------------------------------------------


def _error(where: str, number: int, what: str) -> OrderError:
    return OrderError(f"{where}: line {number}: {what}")


def _check_stages(lines: Sequence[OrderLine], where: str) -> None:
    line_of: dict[int, int] = {}
    for line in lines:
        for word in line.words:
            first = line_of.setdefault(word.stage, line.number)
            if first != line.number:
                raise _error(
                    where,
                    line.number,
                    f"{word.text}: stage {word.stage} stands on line {first}, too; a stage is one "
                    "device's",
                )
    for s in range(max(line_of)):
        if s not in line_of:
            raise OrderError(
                f"{where}: stage {s} has no operations, stage {max(line_of)} has; stages are "
                "numbered from 0, without gaps"
            )


def _walk(shape: Order, line: OrderLine, *, updates: bool) -> tuple[list[Step], int]:
    """A line's operations, with updates where it has none (`updates`), and how many stand before
    the mark. Each is checked: it is the next of its kind, and what it needs stands before it."""
    where, n = shape.where, shape.micro_batches
    counts = Counter[Step]()
    seen: set[tuple[int, Op]] = set()
    ahead = {(word.stage, word.op) for word in line.words}
    steps: list[Step] = []
    repeats = 0
    last_part = WEIGHTS if shape.split else BACKWARDS
    for number, word in enumerate(line.words):
        s, op = word.stage, word.op
        if number == line.repeats:
            repeats = len(steps)
        kind = KINDS[op.kind]

        def fail(what: str, text: str = word.text) -> OrderError:
            return _error(where, line.number, f"{text}: {what}")

        if (s, op) in seen:
            raise fail("stands twice")
        wanted = shape.nth(kind, counts[kind, s])
        if op != wanted:
            expected = shape.spelt(s, wanted)
            if (s, wanted) in ahead:
                raise fail(
                    f"stands before {expected}; a stage runs its micro-batches in sequence, and "
                    "all backwards in that one or all in the other"
                )
            raise fail(f"{expected} is missing before it")
        missing = None
        if kind == BACKWARDS:
            needs = op.mini_batch * n + (n if op.micro_batch is None else op.micro_batch + 1)
            if counts[FORWARDS, s] < needs:
                missing = shape.nth(FORWARDS, counts[FORWARDS, s])
        elif kind == WEIGHTS and counts[BACKWARDS, s] <= counts[kind, s]:
            missing = shape.nth(BACKWARDS, counts[kind, s])
        elif kind == UPDATES:
            needs = (counts[kind, s] + 1) * shape.each(last_part)
            if counts[last_part, s] < needs:
                missing = shape.nth(last_part, counts[last_part, s])
        if missing is not None:
            raise fail(f"stands before {shape.spelt(s, missing)}, which it needs")
        if kind in (BACKWARDS, WEIGHTS) and counts[UPDATES, s] < op.mini_batch:
            before = shape.spelt(s, Op(UPDATE, counts[UPDATES, s]))
            raise fail(f"stands before {before}; gradients of two mini-batches would mix")
        seen.add((s, op))
        steps.append((kind, s))
        counts[kind, s] += 1
        if updates and kind == last_part and not counts[kind, s] % shape.each(kind):
            steps.append((UPDATES, s))
            counts[UPDATES, s] += 1
    if line.repeats == len(line.words):
        raise _error(where, line.number, "nothing stands behind |")
    return steps, repeats


def _check_whole(
    shape: Order, line: OrderLine, stages: Sequence[int], steps: Sequence[Step], written: int
) -> None:
    """That a line has all operations of all mini-batches."""
    counts, every = Counter(steps), "the mini-batch"
    if written > 1:
        every = f"mini-batches 0 to {written - 1}, or | marks what repeats"
    for s in stages:
        for kind in (FORWARDS, BACKWARDS, WEIGHTS, UPDATES):
            if counts[kind, s] < written * shape.each(kind):
                missing = shape.spelt(s, shape.nth(kind, counts[kind, s]))
                raise _error(
                    shape.where,
                    line.number,
                    f"{missing} is missing; each stage has all operations of {every}",
                )


def _check_repeats(
    shape: Order, line: OrderLine, stages: Sequence[int], repeat: Sequence[Step]
) -> None:
    counts = Counter(repeat)
    c = max(counts[UPDATES, s] for s in stages)
    names = {FORWARDS: "forwards", BACKWARDS: "backwards", WEIGHTS: "weight parts"}
    names[UPDATES] = "updates"
    for s in stages:
        for kind, name in names.items():
            found, wanted = counts[kind, s], max(c, 1) * shape.each(kind)
            if found != wanted:
                raise _error(
                    shape.where,
                    line.number,
                    f"what repeats behind | has {found} {name} of stage {s}; whole mini-batches "
                    f"must repeat, of {shape.each(kind)} each",
                )


# What repeats ------------------------------------------------------------------------------------


def _repeated(
    shape: Order, steps: Sequence[Step], stages: Sequence[int], written: int
) -> tuple[Sequence[Step], Sequence[Step]]:
    """What begins and what repeats in whole mini-batches: of the fewest, and as early as can be."""
    each = Counter({(k, s): shape.each(k) for s in stages for k in range(4) if shape.each(k)})
    size = sum(each.values())
    for c in range(1, written):
        length, wanted = c * size, {step: c * count for step, count in each.items()}
        window = Counter(steps[:length])
        for p in range(len(steps) - length + 1):
            if window == wanted and _makes(steps, p, length, each, written):
                return steps[:p], steps[p : p + length]
            if p + length < len(steps):
                window[steps[p]] -= 1
                window[steps[p + length]] += 1
    return (), steps


def _makes(steps: Sequence[Step], p: int, length: int, each: Counter[Step], written: int) -> bool:
    """Whether `length` steps from p on, repeated, make the rest, without further mini-batches."""
    counts = Counter(steps[: p + length])
    at = position = p + length
    while position < len(steps):
        step = steps[p + (at - p) % length]
        at += 1
        if counts[step] >= written * each[step]:
            continue
        if steps[position] != step:
            return False
        counts[step] += 1
        position += 1
    return True


def _shortest(
    first: Sequence[Step], repeat: Sequence[Step], stages: tuple[int, ...], device: int, line: int
) -> OrderRow:
    """The one way to write a row: what repeats as short, and as early, as can be."""
    cycle = repeat.count((UPDATES, stages[0]))
    for c in range(1, cycle):
        part = len(repeat) * c // cycle
        if not cycle % c and tuple(repeat[:part]) * (cycle // c) == tuple(repeat):
            repeat, cycle = repeat[:part], c
            break
    begin = len(first)
    turned = list(repeat)
    while begin and first[begin - 1] == turned[-1]:
        turned.insert(0, turned.pop())
        begin -= 1
    return OrderRow(tuple(first[:begin]), tuple(turned), stages, cycle, device, line)


def _pattern(row: OrderRow) -> Pattern:
    """Of what a device runs, from update to update of all its stages."""
    blocks, steps = list[Row](), list[Step]()
    updates = dict.fromkeys(row.stages, 0)
    for kind, s in row.steps():
        steps.append((kind, s))
        updates[s] += kind == UPDATES
        if min(updates.values()) > len(blocks):
            blocks.append(row_of(steps))
            steps = []
            # What is run behind that is all of what repeats.
            if len(blocks) > row.begins + row.cycle:
                break
    return Pattern(tuple(blocks), row.cycle)


def _most_in_flight(order: Order, row: OrderRow, stage: int) -> int:
    units, most, forwards, backwards = order.each(BACKWARDS), 0, 0, 0
    for kind, s in (*row.first, *row.repeat, *row.repeat):
        if s != stage:
            continue
        forwards += kind == FORWARDS
        backwards += kind == BACKWARDS
        most = max(most, -(-forwards // order.micro_batches) - backwards // units)
    return most
