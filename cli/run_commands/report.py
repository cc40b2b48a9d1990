"""tp-run report: what runs did, beside what their plans predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, Group
from rich.text import Text

from ...profiles.errors import UserError
from ...profiles.files import Kind, check_outputs
from ...profiles.units import format_bytes, format_seconds
from ..errors import errors_as_lines, output, print_json
from ..options import common_options, plugin_option
from ..options.command import command, group, refuse
from ..options.values import FigureName, FileName, FolderName
from ..pictures.curves import (
    AXES,
    CurveTarget,
    RunCurve,
    axes_of,
    curves_kind,
    curves_of,
    read_target,
    target_figures,
)
from ..pictures.svg.options import width_option, write_curves, write_run_figure
from ..tables.layout import beside_predicted, compact_table, counted, fitted, fixed
from ..tables.names import names_by_system, names_of_paths

if TYPE_CHECKING:
    from ...planner.recordings.recording import Recording
    from ..pictures.html.run_data import RunFacts


@command(
    "tp-run report runs/first -o report.html",
    "tp-run report runs/timeprest runs/gpipe -o both.html",
    "tp-run report runs/* --curves accuracy.pdf --over epochs,seconds --target accuracy=0.9",
)
@click.argument("run_dirs", type=FolderName(), metavar="RUN...", nargs=-1, required=True)
@group(
    "Pages and figures",
    click.option("-o", "--output", "path", type=FileName(), help="Write a page (HTML) to look at."),
    click.option(
        "--trace",
        "trace_path",
        type=FileName(),
        help="Write the recorded operations, measured and predicted, as a Chrome trace.",
    ),
    click.option(
        "--svg",
        type=FigureName(),
        help="Write both timelines as a figure, or the measured ones of several runs: SVG, or PDF "
        "where FILE ends in .pdf.",
    ),
    click.option(
        "--curves",
        "curve_files",
        type=FigureName(),
        multiple=True,
        help="Write losses and the task's figures as a figure (SVG, or PDF where FILE ends in "
        ".pdf) or a table (.csv). May be given again.",
    ),
    click.option(
        "--over",
        "axes",
        callback=lambda context, option, text: axes_of(text),
        default=",".join(AXES),
        metavar="AXIS,…",
        help="With --curves: what figures are drawn over: mini-batches, epochs, seconds.",
        show_default=True,
    ),
    width_option,
)
@group(
    "Time to accuracy",
    click.option(
        "--target",
        "targets",
        multiple=True,
        metavar="NAME=VALUE",
        help="Say when each run first reached it: accuracy=0.9, or 'test loss=0.4'.",
    ),
)
@plugin_option
@common_options
@errors_as_lines
def report(
    run_dirs: Sequence[str],
    path: str | None,
    trace_path: str | None,
    svg: str | None,
    curve_files: Sequence[str],
    axes: Sequence[str],
    svg_width: float,
    targets: Sequence[str],
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Show what each RUN did beside what its plan predicted; several runs are overlaid.

    A run that hasn't ended is shown as far as it has come.
    """
    from ..pictures.html.run_data import read_facts, run_figures

    check_outputs(
        ("-o", path, Kind.PAGE),
        ("--trace", trace_path, Kind.TRACE),
        ("--svg", svg, Kind.FIGURE),
        *(("--curves", file, curves_kind(file)) for file in curve_files),
    )
    if not curve_files:
        refuse(("axes",), "goes with --curves FILE")
    if not curve_files and not svg:
        refuse(("svg_width",), "goes with --svg FILE or --curves FILE")
    names = names_of_paths(run_dirs)
    runs = [read_facts(run, name) for run, name in zip(run_dirs, names, strict=True)]
    curves = [each for run in runs for each in curves_of(run_figures(run), run.of_epoch)]
    if len(targets) > 1:
        raise UserError(f"--target: {' and '.join(targets)}: give one of them")
    level = read_target(targets[0] if targets else None, curves)
    timelines = _timelines(runs) if svg else []
    recordings = [
        (f"{run.name}, {source}" if len(runs) > 1 else source, recording)
        for run in runs
        for source, recording in run.recordings
    ]
    if trace_path and not recordings:
        raise UserError(f"--trace: {runs[0].missing[-1]}")
    for file in curve_files:
        write_curves(file, curves, axes, svg_width, level)
    if path:
        from ..pictures.html.page import write_page

        write_page(path, page_data(runs))
    if trace_path:
        from ..pictures.chrome_trace import write_trace

        write_trace(trace_path, recordings)
    if svg:
        write_run_figure(timelines, svg, svg_width)
    if as_json:
        reached = {} if level is None else {"target": target_figures(level, curves)}
        print_json({"runs": [run_figures(run) for run in runs], **reached})
    elif not quiet:
        console = output()
        for run in runs:
            print_run(console, run)
        if len(runs) > 1:
            console.print(_overview(runs))
        if level is not None:
            console.print(_target_table(level, curves))
        for written in (path, trace_path, svg, *curve_files):
            if written:
                console.print(f"wrote {written}", soft_wrap=True)


def page_data(runs: Sequence[RunFacts]) -> dict[str, Any]:
    """Data of the page of these runs, as `html.page` takes it."""
    from ... import __version__
    from ..pictures.html.page import plan_part
    from ..pictures.html.run_data import run_part

    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    plans: list[dict[str, Any]] = []
    for run in runs:
        part = plan_part(run.plan, f"plan of {run.name}", recorded=False)
        if all(part["plan"] != other["plan"] for other in plans):
            plans.append(part)
    return {
        "title": f"{title}: measured and predicted",
        "made_by": {"timeprest": __version__},
        "plans": plans,
        "runs": [run_part(run) for run in runs],
    }


def _timelines(runs: Sequence[RunFacts]) -> list[tuple[str, Recording]]:
    """A run's measured timeline and the predicted one; of several runs, those that were measured,
    by name. Raises UserError where there is none."""
    if len(runs) == 1:
        if not runs[0].recordings:
            raise UserError(f"--svg: {runs[0].missing[-1]}")
        return runs[0].recordings
    several = []
    names = names_by_system([run.plan.variant for run in runs], [run.name for run in runs])
    for run, name in zip(runs, names, strict=True):
        if run.measured is None:
            raise UserError(f"--svg: {run.name}: {run.missing[-1]}")
        several.append((name, run.measured))
    return several


# Tables for the terminal --------------------------------------------------------------------------


def print_run(console: Console, run: RunFacts) -> None:
    """Print a run's figures beside its plan's."""
    from ..pictures.html.run_data import run_figures
    from ..tables.run import compile_lines, period_text

    figures = run_figures(run)
    console.print(_workers_table(run, figures, console.width))
    of = "all training"
    if run.measured is not None and not run.epochs:
        begin, count = figures["recorded"]["first_mini_batch"], figures["recorded"]["mini_batches"]
        of = f"mini-batches {begin} to {begin + count - 1}, which were recorded"
    console.print(
        Text(
            f"times: per mini-batch, of {of}; predicted in the steady state. idle: neither "
            "computing nor communicating nor loading. memory: without scratch. versions: held "
            "(predicted)",
            "dim",
        )
    )
    console.print(Text(period_text(run.period_s, run.plan.predicted.period_s)))
    if run.epochs:
        last = run.epochs[-1]
        test = "".join(f", test {name} {value:.4g}" for name, value in last.test.items())
        # An epoch that --steps cut short is a part of one; one that went on has several records.
        done = counted(sum(record.mini_batches for record in run.epochs), "mini-batch")
        console.print(
            f"after {done} (epoch {last.epoch + 1}): train loss {last.train_loss:.4g}{test}"
        )
    for line in [] if run.summary is None else compile_lines(run.plan, run.summary):
        console.print(Text(line))
    for line in run.missing:
        console.print(Text(line, "yellow"))


def _workers_table(run: RunFacts, figures: dict[str, Any], width: int) -> Group:
    """A row for each worker. figures: the run's, of `run_figures`."""
    from ..tables.run import takes_long

    loading = any(t is not None and takes_long(t.loading_share) for t in run.times)
    workers = figures["workers"]
    predicted = [worker["per_mini_batch"]["predicted"] for worker in workers]
    measured = [w["per_mini_batch"]["measured"] or dict.fromkeys(predicted[0]) for w in workers]
    peaks = [worker["memory"]["measured"] for worker in workers]
    accounted = [run.plan.predicted.device_of(w["stage"]).accounted_memory for w in workers]
    held = [worker["versions_held"] for worker in workers]

    def took(key: str) -> list[str]:
        return [_or_dash(times[key], format_seconds) for times in measured]

    columns = [
        beside_predicted(
            "compute", took("compute_s"), [format_seconds(t["compute_s"]) for t in predicted]
        ),
        fixed("comm.", took("communication_s")),
        *[fixed("loading", took("loading_s"))] * loading,
        beside_predicted(
            "idle",
            [_or_dash(worker["idle_share"], "{:.0%}".format) for worker in workers],
            [f"{worker['idle_share_predicted']:.0%}" for worker in workers],
        ),
        beside_predicted(
            "memory",
            [_or_dash(peak and sum(peak), format_bytes) for peak in peaks],
            [format_bytes(each.total) for each in accounted],
        ),
        fixed(
            "versions",
            ["-" if h["measured"] is None else f"{h['measured']} ({h['predicted']})" for h in held],
        ),
    ]
    title = (
        f"{run.name}: {run.settings.task} with {run.plan.variant}, "
        f"{counted(figures['mini_batches'], 'mini-batch')}" + ", inline" * run.inline
    )
    names = fixed("worker", [worker["name"] for worker in workers], left=True)
    return fitted(title, names, columns, width)


def _or_dash(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if value is None else text(value)


def _overview(runs: Sequence[RunFacts]) -> Any:
    table = compact_table(
        "side by side", ["run", "system"], ["mini-batches", "period", "train loss", "test loss"]
    )
    for run in runs:
        last = run.epochs[-1] if run.epochs else None
        loss = last.test.get("loss") if last is not None else None
        table.add_row(
            run.name,
            run.plan.variant,
            str(sum(len(each) for each in run.losses)),
            "-" if not run.period_s else format_seconds(run.period_s),
            "-" if last is None else f"{last.train_loss:.4f}",
            "-" if loss is None else f"{loss:.4f}",
        )
    return table


def _target_table(target: CurveTarget, curves: Sequence[RunCurve]) -> Any:
    table = compact_table(
        f"{target.quantity} {target.value:g} first reached", ["run"], ["after", "epochs", "time"]
    )
    # There, all stages took turns: the time is no pipeline's.
    inline = {curve.run for curve in curves if curve.inline}
    for run, point in target.reached(curves).items():
        cells = ["not reached", "-", "-"]
        if point is not None:
            cells = [
                counted(point.mini_batches, "mini-batch"),
                f"{point.epochs:.3g}",
                format_seconds(point.seconds),
            ]
        table.add_row(f"{run}, inline" if run in inline else run, *cells)
    return table
