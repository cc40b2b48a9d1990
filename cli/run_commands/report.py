"""tp-run report: what runs did, beside what their plans predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from ...profiles.errors import UserError
from ...profiles.files import Kind, check_outputs
from ...profiles.units import format_bytes, format_seconds
from ..errors import errors_as_lines, output, print_json
from ..options import CONTEXT, common_options, plugin_option
from ..options.command import GroupedCommand, examples, group, refuse
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
from ..tables.layout import compact_table, counted
from ..tables.names import names_by_system, names_of_paths

if TYPE_CHECKING:
    from ...planner.recordings.recording import Recording
    from ...runtime.prepare.workers import Worker
    from ..pictures.html.run_data import RunFacts


@click.command(
    cls=GroupedCommand,
    context_settings=CONTEXT,
    epilog=examples(
        "tp-run report runs/first -o report.html",
        "tp-run report runs/timeprest runs/gpipe -o both.html",
        "tp-run report runs/* --curves accuracy.pdf --over epochs,seconds --target accuracy=0.9",
    ),
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
    target: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Show what each RUN did beside what its plan predicted; several runs are overlaid.

    A run that hasn't ended is shown as far as it has come.
    """
    from ..pictures.html.run_data import distinct_names, read_facts, run_figures

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
    level = read_target(target, curves)
    timelines = _timelines(runs) if svg else []
    for file in curve_files:
        write_curves(file, curves, axes, svg_width, level)
    if path:
        from ..pictures.html.page import write_page

        write_page(path, page_data(runs))
    if trace_path:
        from ..pictures.chrome_trace import write_trace

        write_trace(trace_path, _recordings(runs))
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
    from ..pictures.html.page import placed_part
    from ..pictures.html.run_data import run_part

    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    plans: list[dict[str, Any]] = []
    for run in runs:
        part = {
            "name": f"plan of {run.name}",
            "plan": msgspec.to_builtins(run.plan),
            **placed_part(run.plan),
            "recording": None,
            "mini_batches_shown": 0,
        }
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
        found = [(r.source, r) for r in (runs[0].measured, runs[0].predicted) if r is not None]
        if not found:
            raise UserError(f"--svg: {runs[0].missing[-1]}")
        return found
    several = []
    names = names_by_system([run.plan.variant for run in runs], [run.name for run in runs])
    for run, name in zip(runs, names, strict=True):
        if run.measured is None:
            raise UserError(f"--svg: {run.name}: {run.missing[-1]}")
        several.append((run.plan.variant if len(of) == len(runs) else run.name, run.measured))
    return several


def _recordings(runs: Sequence[RunFacts]) -> list[tuple[str, Recording]]:
    found = []
    for run in runs:
        for recording in (run.measured, run.predicted):
            if recording is not None:
                of = f"{run.name}, " if len(runs) > 1 else ""
                found.append((f"{of}{recording.source}", recording))
    return found


# Tables for the terminal --------------------------------------------------------------------------


def print_run(console: Console, run: RunFacts) -> None:
    """Print a run's figures beside its plan's."""
    from ...planner.recordings.lane_times import steady_times
    from ...runtime.records.recording import mini_batches_of
    from ..tables.run import compile_lines, takes_long

    plan = run.plan
    done = sum(len(each) for each in run.losses)
    loading = any(t is not None and takes_long(t.loading_share) for t in run.times)
    table = compact_table(
        f"{run.name}: {run.settings.task} with {plan.variant}, "
        f"{counted(done, 'mini-batch', 'mini-batches')}" + ", inline" * run.inline,
        ["worker"],
        [
            *("compute", "(pred.)", "comm.", *["loading"] * loading, "idle", "(pred.)"),
            *("memory", "(pred.)", "versions"),
        ],
    )
    steady = steady_times(plan)
    for worker in run.workers:
        first = worker.stages[0]
        predicted = plan.predicted.device_of(first)
        versions = max(plan.predicted.stages[s].versions_held for s in worker.stages)
        epochs = run.worker_epochs[worker.rank]
        times, idle = run.times[worker.rank], run.idle_shares[worker.rank]
        peak = _peak_bytes(run, worker)
        held = max((epoch.versions_held for epoch in epochs), default=None)
        table.add_row(
            worker.name,
            "-" if times is None else format_seconds(times.compute_s),
            format_seconds(steady[first].compute_s),
            "-" if times is None else format_seconds(times.communication_s),
            *["-" if times is None else format_seconds(times.loading_s)] * loading,
            "-" if idle is None else f"{idle:.0%}",
            f"{predicted.idle_share:.0%}",
            "-" if peak is None else format_bytes(peak),
            format_bytes(predicted.accounted_memory.total),
            "-" if held is None else f"{held} ({versions})",
        )
    console.print(table)
    of = "all training"
    if run.measured is not None and not run.epochs:
        begin, end = mini_batches_of(run.measured)
        of = f"mini-batches {begin} to {end - 1}, which were recorded"
    console.print(
        Text(
            f"times: per mini-batch, of {of}; predicted in the steady state. idle: neither "
            "computing nor communicating nor loading. memory: without scratch. versions: held "
            "(predicted)",
            "dim",
        )
    )
    console.print(_period_line(run))
    if run.epochs:
        last = run.epochs[-1]
        test = ", ".join(f"test {name} {value:.4g}" for name, value in last.test.items())
        console.print(
            f"after {counted(len(run.epochs), 'epoch', 'epochs')}: train loss {last.train_loss:.4g}"
            + (f", {test}" if test else "")
        )
    for told in [] if run.summary is None else compile_lines(plan, run.summary):
        console.print(told)
    for line in run.missing:
        console.print(Text(line, "yellow"))


def _period_line(run: RunFacts) -> Text:
    predicted = run.plan.predicted.period_s
    text = f"period predicted {format_seconds(predicted)}"
    if run.period_s:
        ratio = f" ({run.period_s / predicted:.2f} ×)" if predicted else ""
        text = f"period measured {format_seconds(run.period_s)}, {text[7:]}{ratio}"
    return Text(text)


def _peak_bytes(run: RunFacts, worker: Worker) -> int | None:
    if run.summary is not None:
        peak = run.summary.stages[worker.replicas[0].number].peak
        return None if peak is None else peak.total
    if run.measured is None:
        return None
    return max((sum(p.nbytes) for p in run.measured.memory if p.lane == worker.rank), default=None)


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
                counted(point.mini_batches, "mini-batch", "mini-batches"),
                f"{point.epochs:.3g}",
                format_seconds(point.seconds),
            ]
        table.add_row(f"{run}, inline" if run in inline else run, *cells)
    return table
