"""tp-plan compare: plans side by side, and where they differ."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console, Group
from rich.text import Text

from ...planner.plan import Plan, read_plan
from ...profiles.errors import UserError
from ..errors import common_options, errors_as_lines, output, print_json
from ..tables.columns import fitted, fixed, words
from ..tables.layout import counted
from ..tables.names import first_to_last, printable, shortened
from .compare_figures import (
    FIGURES,
    STAGE_FIGURES,
    Figure,
    best,
    moves,
    shown,
    warnings,
)

_MOST_COLUMNS = 4
"""Plans beside each other; more are rows."""
_MOST_STAGES = 8
"""Stages whose figures are shown unasked."""
_OF_LONE_STAGES = ("layers", "devices", "memory")
"""Shown of stages that some plan doesn't have."""
_MOST_MOVES = 8
_MOST_NAME = 18
_DIFFERS = "≠"


@click.command()
@click.argument("paths", metavar="PLAN PLAN…", nargs=-1, required=True)
@common_options
@errors_as_lines
def compare(paths: Sequence[str], as_json: bool, quiet: bool, verbose: bool) -> None:
    """Show PLANs side by side: what differs, what is best, and which layers moved.

    Up to four plans stand beside each other; more are rows of a table. -v also shows what is the
    same, and every stage.
    """
    if len(paths) < 2:
        raise UserError(f"{paths[0]}: give a second plan to compare it with")
    plans = dict(zip(_names(paths), map(read_plan, paths), strict=True))
    if as_json:
        print_json(as_data(plans))
    elif not quiet:
        print_comparison(output(), plans, every=verbose)


def _names(paths: Sequence[str]) -> list[str]:
    """As short as tells them apart; what is given twice is numbered."""
    folders = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    short = [os.path.relpath(os.path.abspath(path), folders) for path in paths]
    if all(name.endswith(".json") for name in short):
        short = [name.removesuffix(".json") for name in short]
    names: list[str] = []
    for name in map(printable, short):
        count = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({count + 1})" if count else name)
    return names


def print_comparison(console: Console, plans: Mapping[str, Plan], *, every: bool) -> None:
    """Print the plans' figures, their stages', and which layers moved."""
    for line in warnings(plans):
        console.print(Text(f"warning: {line}", style="bold"))
    if len(plans) > _MOST_COLUMNS:
        console.print(_rows(plans, console.width))
    else:
        console.print(_columns(plans, console.width))
        _print_stages(console, plans, every=every)
    console.print(
        Text(
            f"{_DIFFERS}: not the same in all plans. *: the best. most memory, versions, d: of the "
            "stage with most; d: version difference. mean idle: over the stages. Stages' times are "
            "per micro-batch.",
            style="dim",
        )
    )
    _print_moves(console, plans, every=every)


def _columns(plans: Mapping[str, Plan], width: int) -> Group:
    """Plans beside each other, a row for each figure."""
    found = list(plans.values())
    texts = [[shown(figure, plan) for plan in found] for figure in FIGURES]
    signs = [_sign(row) for row in texts]
    columns = [fixed("", signs, left=True)]
    for k, name in enumerate(plans):
        cells = [
            _marked(row[k], k in best(f, found)) for f, row in zip(FIGURES, texts, strict=True)
        ]
        columns.append(fixed(shortened(name, _MOST_NAME), cells))
    keys = fixed("", [figure.name for figure in FIGURES], left=True)
    return fitted(f"{len(plans)} plans", keys, columns, width)


def _rows(plans: Mapping[str, Plan], width: int) -> Group:
    """A row for each plan, a column for each figure in which they differ."""
    found = list(plans.values())
    columns = []
    alike = []
    for figure in FIGURES:
        texts = [shown(figure, plan) for plan in found]
        if not str(_sign(texts)):
            alike.append(f"{figure.name} {texts[0]}")
            continue
        tops = best(figure, found)
        cells = [_marked(text, k in tops) for k, text in enumerate(texts)]
        columns.append(fixed(figure.name, cells))
    title = f"{len(plans)} plans"
    if alike:
        title += f"; all have {', '.join(alike)}"
    return fitted(title, words("plan", plans, 20), columns, width)


def _sign(texts: Sequence[str]) -> Text:
    return Text(_DIFFERS if len(set(texts)) > 1 else "", style="bold yellow")


def _marked(text: str, is_best: bool) -> Text:
    # Figures stay under each other, starred or not.
    return Text(f"{text} *", style="bold green") if is_best else Text(f"{text}  ")


def _print_stages(console: Console, plans: Mapping[str, Plan], *, every: bool) -> None:
    """Figures of each stage in which the plans differ; with `every`, all of them."""
    found = list(plans.values())
    count = max(len(plan.stages) for plan in found)
    # Layers have what three other columns leave.
    room = max(12, (console.width - 22) // len(found) - 1)
    keys: list[str] = []
    signs: list[Text] = []
    cells: list[list[str]] = [[] for _ in found]
    left_out = 0
    for s in range(count):
        rows = [(name, _stage_row(found, s, text, room)) for name, text in STAGE_FIGURES]
        there = all(s < len(plan.stages) for plan in found)
        rows = [
            (name, row)
            for name, row in rows
            if every or (len(set(row)) > 1 and (there or name in _OF_LONE_STAGES))
        ]
        if rows and not every and len({key.split()[0] for key in keys}) >= _MOST_STAGES:
            left_out += 1
            continue
        for name, row in rows:
            keys.append(f"{s} {name}")
            signs.append(_sign(row))
            for k, text in enumerate(row):
                cells[k].append(text)
    if not keys:
        console.print("all stages are alike")
        return
    columns = [fixed("", signs, left=True)]
    columns += [
        fixed(shortened(name, _MOST_NAME), own) for name, own in zip(plans, cells, strict=True)
    ]
    title = "by stage" if every else "by stage, where they differ"
    console.print(fitted(title, fixed("stage", keys, left=True), columns, console.width))
    if left_out:
        more = counted(left_out, "more stage differs", "more stages differ")
        console.print(Text(f"{more} (-v)", style="dim"))


def _stage_row(plans: Sequence[Plan], s: int, text: Any, room: int) -> list[str]:
    return [text(plan, s, room) if s < len(plan.stages) else "-" for plan in plans]


def _print_moves(console: Console, plans: Mapping[str, Plan], *, every: bool) -> None:
    names = list(plans)
    first = plans[names[0]]
    for name in names[1:]:
        if plans[name].profile.fingerprint != first.profile.fingerprint:
            continue
        moved = moves(first, plans[name])
        total = sum(len(move.layers) for move in moved)
        if not total:
            console.print(f"{names[0]} → {name}: no layer is on another stage")
            continue
        layers = counted(total, "layer is", "layers are")
        console.print(f"{names[0]} → {name}: {layers} on another stage")
        if len(plans) > _MOST_COLUMNS and not every:
            continue
        shown_moves = moved if every else moved[:_MOST_MOVES]
        for move in shown_moves:
            to = f"  stage {move.source} → {move.target}: "
            console.print(to + first_to_last(move.layers, max(console.width - len(to), 12)))
        if len(shown_moves) < len(moved):
            console.print(Text(f"  … {len(moved) - len(shown_moves)} more (-v)", style="dim"))


def as_data(plans: Mapping[str, Plan]) -> dict[str, Any]:
    """The comparison for machines."""
    names, found = list(plans), list(plans.values())
    return {
        "plans": {
            name: {
                **{figure.key: figure.value(plan) for figure in FIGURES if figure.key != "gap"},
                "gap": plan.solver.gap,
                "stages_in_detail": [
                    {"nodes": stage.nodes, "devices": stage.devices, "predicted": predicted}
                    for stage, predicted in zip(plan.stages, plan.predicted.stages, strict=True)
                ],
            }
            for name, plan in plans.items()
        },
        "differs": [figure.key for figure in FIGURES if _differs(figure, found)],
        "best": {
            figure.key: [names[k] for k in sorted(best(figure, found))]
            for figure in FIGURES
            if best(figure, found)
        },
        "moved": [
            {
                "from": names[0],
                "to": name,
                "layers": m.layers,
                "source": m.source,
                "target": m.target,
            }
            for name in names[1:]
            if plans[name].profile.fingerprint == found[0].profile.fingerprint
            for m in moves(found[0], plans[name])
        ],
        "warnings": warnings(plans),
    }


def _differs(figure: Figure, plans: Sequence[Plan]) -> bool:
    return len({shown(figure, plan) for plan in plans}) > 1
