"""tp-plan compare: plans side by side, and where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console, Group
from rich.text import Text

from ...planner.plan import Plan, PlanStage, read_plan
from ...profiles.errors import UserError
from ...profiles.files import Kind, check_outputs
from ...profiles.units import format_seconds, short_bytes
from ..errors import errors_as_lines, output, print_json, printable
from ..options import common_options, plugin_option
from ..options.command import command, group, refuse
from ..options.values import FileName
from ..pictures.html.page import html_option, plans_report
from ..pictures.svg.options import Figures, stacked_options, write_plan_figures
from ..tables.layout import counted, devices_text, first_to_last, fitted, fixed, shortened, words
from ..tables.names import names_by_system, names_of_paths
from ..tables.plan import warn_if_edited
from ..tables.plans import FIGURES, best, figure_text, figures_of, marked, share_of_limit, yes
from ..tables.stages import recomputed_layers

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Figures of stages, and layers that moved ---------------------------------------------------------


def _recomputes(stage: PlanStage) -> str:
    count = recomputed_layers(stage)
    return f"{count} layers" if count > 0 else yes(count)


STAGE_FIGURES: tuple[tuple[str, Callable[[Plan, int, int], str]], ...] = (
    ("layers", lambda p, s, width: first_to_last(p.stages[s].nodes, width)),
    ("devices", lambda p, s, _: devices_text(p, [s])),
    ("forward", lambda p, s, _: format_seconds(p.predicted.stages[s].forward_s)),
    ("backward", lambda p, s, _: format_seconds(p.predicted.stages[s].backward_s)),
    ("transfer", lambda p, s, _: format_seconds(p.predicted.stages[s].transfer_s)),
    ("memory", lambda p, s, _: short_bytes(p.predicted.stages[s].memory_bytes)),
    ("idle", lambda p, s, _: f"{p.predicted.stages[s].idle_share:.0%}"),
    ("L", lambda p, s, _: str(p.stages[s].in_flight)),
    ("versions", lambda p, s, _: str(p.predicted.stages[s].versions_held)),
    ("d", lambda p, s, _: str(p.predicted.stages[s].version_difference)),
    ("recomputed", lambda p, s, _: _recomputes(p.stages[s])),
)
"""Name, and text of a plan's stage in so many columns."""


class Move(NamedTuple):
    """Layers that are on the stage `source` in one plan and on `target` in another."""

    layers: tuple[str, ...]
    source: int
    target: int


def moves(plan: Plan, other: Plan) -> list[Move]:
    """Layers of both plans that are on another stage in the second, by their stages."""
    there = {name: t for t, stage in enumerate(other.stages) for name in stage.nodes}
    found: dict[tuple[int, int], list[str]] = {}
    for s, stage in enumerate(plan.stages):
        for name in stage.nodes:
            t = there.get(name, s)
            if t != s:
                found.setdefault((s, t), []).append(name)
    return [Move(tuple(names), s, t) for (s, t), names in found.items()]


def warnings(plans: Mapping[str, Plan]) -> list[str]:
    """Reasons why the plans' figures can't be compared."""
    names = list(plans)
    first = plans[names[0]]
    lines = []
    for name in names[1:]:
        plan = plans[name]
        one, two = first.profile, plan.profile
        if one.fingerprint != two.fingerprint:
            lines.append(
                f"{names[0]} and {name} are for different models: {one.target}, {two.target}"
            )
        elif (one.device, one.threads, one.dtype) != (two.device, two.threads, two.dtype):
            lines.append(f"{names[0]} and {name} were profiled on different devices or settings")
        if one.fingerprint == two.fingerprint:
            lines += _missing(names[0], first, name, plan)
        if first.cluster != plan.cluster:
            lines.append(f"{names[0]} and {name} are for different clusters")
        if first.mini_batch != plan.mini_batch:
            lines.append(
                f"{names[0]} and {name} have mini-batches of {first.mini_batch} and "
                f"{plan.mini_batch}: compare their samples/s, not their periods"
            )
    return lines


# The command and its tables -----------------------------------------------------------------------

_MOST_COLUMNS = 4
"""Plans beside each other; more are rows."""
_MOST_STAGES = 8
"""Stages whose figures are shown unasked."""
_OF_LONE_STAGES = ("layers", "devices", "memory")
"""Shown of stages that some plan doesn't have."""
_MOST_MOVES = 8
_MOST_NAME = 18
_DIFFERS = "≠"


@command(
    "tp-plan compare plan.gpipe.json plan.timeprest.json",
    "tp-plan compare plan.*.json --json",
    "tp-plan compare plan.timeprest.json plan.pipedream.json plan.gpipe.json --html all.html",
)
@click.argument("paths", type=FileName(), metavar="PLAN PLAN…", nargs=-1, required=True)
@stacked_options
@group("Page", html_option)
@plugin_option
@common_options
@errors_as_lines
def compare(
    paths: Sequence[str],
    html: str | None,
    first: int | None,
    mini_batches: int | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **figures: Unpack[Figures],
) -> None:
    """Show PLANs side by side: what differs, what is best, and which layers moved.

    Up to four plans stand beside each other, and -v also shows what is the same in their stages;
    more are rows of a table. -v names all layers that moved.
    """
    if len(paths) < 2:
        raise UserError(f"{paths[0]}: give a second plan to compare it with")
    check_outputs(("--svg", figures["svg"], Kind.FIGURE), ("--html", html, Kind.PAGE))
    plans = dict(zip(_names(paths), map(read_plan, paths), strict=True))
    systems = [plan.variant for plan in plans.values()]
    named = dict(zip(names_by_system(systems, list(plans)), plans.values(), strict=True))
    if not figures["svg"]:
        refuse(("first", "mini_batches"), "goes with --svg FILE")
    written = write_plan_figures(named, first, mini_batches, figures)
    if html:
        plans_report(named, html)
        written = [*written, html]
    if as_json:
        print_json(as_data(plans))
    elif not quiet:
        print_comparison(output(), plans, every=verbose)
        for path, plan in zip(paths, plans.values(), strict=True):
            warn_if_edited(plan, path)
        if written:
            output().print(f"wrote {' and '.join(written)}", soft_wrap=True)


def _names(paths: Sequence[str]) -> list[str]:
    if all(path.endswith(".json") for path in paths):
        paths = [path.removesuffix(".json") for path in paths]
    return [printable(name) for name in names_of_paths(paths)]


def print_comparison(console: Console, plans: Mapping[str, Plan], *, every: bool) -> None:
    """Print the plans' figures, their stages', and which layers moved."""
    for line in warnings(plans):
        console.print(Text(f"warning: {line}", style="bold"))
    if len(plans) > _MOST_COLUMNS:
        console.print(_rows(plans, console.width))
    else:
        console.print(_columns(plans, console.width))
        _print_stages(console, plans, every=every)
    memory, idle = "", "stages"
    if any(plan.placement for plan in plans.values()):
        memory, idle = "most memory: of the device with most. ", "devices"
    limit = ""
    if any(share_of_limit(plan) is not None for plan in plans.values()):
        one = "device" if memory else "stage"
        limit = f"most of a limit: maybe of another {one} than most memory. "
    console.print(
        Text(
            f"{_DIFFERS}: not the same in all plans. *: the best. {memory}"
            f"most {'' if memory else 'memory, '}versions, d: of the stage with most; d: version "
            f"difference. {limit}mean idle: over the {idle}. Stages' times are per micro-batch.",
            style="dim",
        )
    )
    _print_moves(console, plans, every=every)


def _columns(plans: Mapping[str, Plan], width: int) -> Group:
    """Plans beside each other, a row for each figure."""
    found = list(plans.values())
    figures = figures_of(found)
    texts = [[figure_text(figure, plan) for plan in found] for figure in figures]
    signs = [_sign(row) for row in texts]
    columns = [fixed("", signs, left=True)]
    for k, name in enumerate(plans):
        cells = [marked(row[k], k in best(f, found)) for f, row in zip(figures, texts, strict=True)]
        columns.append(fixed(shortened(name, _MOST_NAME), cells))
    keys = fixed("", [figure.name for figure in figures], left=True)
    return fitted(f"{len(plans)} plans", keys, columns, width)


def _rows(plans: Mapping[str, Plan], width: int) -> Group:
    """A row for each plan, a column for each figure in which they differ."""
    found = list(plans.values())
    columns = []
    alike = []
    for figure in figures_of(found):
        texts = [figure_text(figure, plan) for plan in found]
        if not str(_sign(texts)):
            alike.append(f"{figure.name} {texts[0]}")
            continue
        tops = best(figure, found)
        cells = [marked(text, k in tops) for k, text in enumerate(texts)]
        columns.append(fixed(figure.name, cells))
    title = f"{len(plans)} plans"
    if alike:
        title += f"; all have {', '.join(alike)}"
    return fitted(title, words("plan", plans, 20), columns, width)


def _sign(texts: Sequence[str]) -> Text:
    return Text(_DIFFERS if len(set(texts)) > 1 else "", style="bold yellow")


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
        rows = [
            (name, [text(plan, s, room) if s < len(plan.stages) else "-" for plan in found])
            for name, text in STAGE_FIGURES
        ]
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


def _missing(name: str, plan: Plan, other_name: str, other: Plan) -> Iterator[str]:
    """That plans of one model, edited by hand, lack layers that the other one has."""
    mine, its = ([x for stage in p.stages for x in stage.nodes] for p in (plan, other))
    for lacking, layers in ((name, set(its) - set(mine)), (other_name, set(mine) - set(its))):
        if layers:
            some = first_to_last([x for x in (*mine, *its) if x in layers], 40)
            yield f"{lacking} lacks {counted(len(layers), 'layer', 'layers')} of the model: {some}"


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
    """The comparison as data, for --json."""
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
                "devices_in_detail": plan.predicted.devices,
            }
            for name, plan in plans.items()
        },
        "differs": [
            figure.key
            for figure in FIGURES
            if len({figure_text(figure, plan) for plan in found}) > 1
        ],
        "best": {
            figure.key: [names[k] for k in sorted(best(figure, found))]
            for figure in FIGURES
            if best(figure, found)
        },
        "moved": [
            {"from": names[0], "to": name, **m._asdict()}
            for name in names[1:]
            if plans[name].profile.fingerprint == found[0].profile.fingerprint
            for m in moves(found[0], plans[name])
        ],
        "warnings": warnings(plans),
    }
