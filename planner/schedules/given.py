"""Orders that users give (`systems.orders`): reading them, and checks of what they lead to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import lcm
from pathlib import Path

from ...profiles.errors import FileError, OrderError, ScheduleError
from ..simulator.executor import execute
from ..simulator.pipeline import in_a_row
from ..systems.operations import BACKWARDS, FORWARD, UPDATE, Op, op_text, parse_op
from ..systems.orders import Order, OrderRow, parse_order
from ..systems.variants import VARIANTS, Variant, under_order, variant_named
from ..systems.versions import entry_versions
from .schedules import make_schedule
from .torch_csv import parse_csv

MOST_BYTES = 64 * 1024 * 1024
"""Larger files aren't read."""


def read_order(path: str | Path) -> Order:
    """The order in a file: our text, or torch's CSV, as its name or a comma says.

    Raises:
        FileError: it can't be read.
        OrderError: naming file, line and operation: it breaks a rule of `parse_order`, or its
            devices would wait for each other for ever.
    """
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise FileError(f"{path}: is larger than {MOST_BYTES} bytes")
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "isn't text"
        raise FileError(f"{path}: can't be read: {why}") from None
    is_csv = Path(path).suffix.lower() == ".csv" or "," in text.partition("#")[0]
    order = (parse_csv if is_csv else parse_order)(text, str(path))
    check_order(order)
    return order


def check_order(order: Order) -> None:
    """Check that devices never wait for each other for ever, as far as each stage feeds the next.

    Raises OrderError naming the lines, and the operations that wait.
    """
    count = 2 + max(row.begins for row in order.rows) + 2 * max(order.limits)
    count += 2 * lcm(*(row.cycle for row in order.rows))
    unit = "micro" if order.micro else "mini"
    # Of those with such operations; when they run is the same in all.
    rules = next(v for v in VARIANTS.values() if v.backward_unit == unit)
    rules = replace(rules, order=order, split_backward=order.split, whole_mini_batches=False)
    pipeline = in_a_row(rules, order.micro_batches, order.limits, order.placement)
    try:
        execute(pipeline, make_schedule(pipeline, count))
    except ScheduleError as error:
        what = _with_lines(order, str(error))
        if not order.marked:
            what += (
                "; if the lines as they are don't, what they go on with does (the shortest part of "
                "each that makes it): begin every line with |, and all of it is repeated"
            )
        raise OrderError(f"{order.where}: {what}") from None


def _with_lines(order: Order, what: str) -> str:
    """A deadlock's words, each operation with its line."""
    head, _, words = what.rpartition(": ")
    line_of = {s: row.line for row in order.rows for s in row.stages}
    found = []
    for word in words.split(", "):
        stage, op = parse_op(word)
        number = line_of[stage]
        found.append(order.spelt(stage, op) + (f" (line {number})" if number else ""))
    return f"{head}: {', '.join(found)}"


def system_of(name: str, lines: tuple[str, ...] = ()) -> Variant:
    """The system of this name; with lines, in the order that they give.

    Raises PlanError where there is no such system, OrderError for a bad order.
    """
    variant = variant_named(name)
    return _ordered(variant, lines) if lines else variant


@lru_cache(maxsize=256)
def _ordered(variant: Variant, lines: tuple[str, ...]) -> Variant:
    order = parse_order(lines)
    check_order(order)
    return in_rules_of(variant, order)


# In a system's weight rules ----------------------------------------------------------------------


def in_rules_of(variant: Variant, order: Order) -> Variant:
    """The system with its weight rules as they are, and this order in the place of its own.

    Raises OrderError, naming line and operation, where the rules don't allow the order: other
    backwards than the system's; a forward of a further mini-batch before the update, where the
    system flushes; a forward that is to use a version which its stage hasn't got yet.
    """
    found = under_order(variant, order)
    if order.reverse and not variant.flushes:
        row = order.rows[0]
        raise _not_so(
            order,
            row,
            (row.stages[0], order.nth(BACKWARDS, 0)),
            f"backwards run from the last micro-batch to the first; {variant.name} doesn't flush, "
            "and takes them in the sequence of the forwards (--variant gpipe)",
        )
    if variant.flushes:
        _check_flushes(variant, order)
    elif variant.synchronises:
        _check_versions(found, order)
    return found


def _check_flushes(variant: Variant, order: Order) -> None:
    for row in order.rows:
        updates = Counter[int]()
        for s, op in order.numbered(row, (*row.first, *row.repeat, *row.repeat)):
            updates[s] += op.kind == UPDATE
            if op.kind == FORWARD and op.mini_batch > updates[s]:
                raise _not_so(
                    order,
                    row,
                    (s, op),
                    f"stands before {op_text(s, Op(UPDATE, op.mini_batch - 1))}; {variant.name} "
                    "flushes before each update: choose a system that doesn't (--variant)",
                )


def _check_versions(variant: Variant, order: Order) -> None:
    """That the version of each entry at stage 0 is there at every stage when it comes."""
    n = order.micro_batches
    count = 2 + max(row.begins for row in order.rows)
    count += 2 * lcm(*(row.cycle for row in order.rows))
    schedule = make_schedule(in_a_row(variant, n, order.limits, order.placement), count)
    entries = entry_versions(variant, n, schedule[0])
    for row in order.rows:
        for s in row.stages:
            updates = 0
            for op in schedule[s]:
                updates += op.kind == UPDATE
                if op.kind != FORWARD:
                    continue
                if entries[op.mini_batch * n + (op.micro_batch or 0)] > updates:
                    raise _not_so(
                        order,
                        row,
                        (s, op),
                        f"stands before {op_text(s, Op(UPDATE, updates))}, which stage 0 had made "
                        f"when the micro-batch entered there; {variant.name} uses one version at "
                        f"all stages, of {n} micro-batches each",
                    )


def _not_so(order: Order, row: OrderRow, op: tuple[int, Op], what: str) -> OrderError:
    line = f"line {row.line}: " if row.line else ""
    return OrderError(f"{order.where}: {line}{op_text(*op)}: {what}")
