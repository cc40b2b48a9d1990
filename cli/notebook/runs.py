"""How runs show themselves. What reads them is imported late: it loads torch."""

from __future__ import annotations

from collections.abc import Sequence

from ...planner.recordings.recording import Recording
from ...profiles.files import MAX_COUNT
from ...profiles.units import format_seconds
from ...runtime.records.run import Run
from ..errors import output
from ..pictures.svg.frame import FigureSettings, window_of
from ..pictures.svg.timeline import timelines_svg
from ..tables.names import names_of_paths
from .sheet import Sheet


def show_run(run: Run) -> None:
    """Print it, as tp-run report does."""
    from ..pictures.html.run_data import read_facts
    from ..run_commands.report import print_run

    print_run(output(), read_facts(run.path))


def run_sheet(run: Run) -> Sheet:
    """Its epochs, and its recorded schedule."""
    from ..pictures.html.run_data import read_facts
    from ..tables.run import period_text

    facts = read_facts(run.path)
    figures = list(dict.fromkeys(name for record in facts.epochs for name in record.test))
    rows = [
        (
            str(record.epoch + 1),
            str(record.mini_batches),
            f"{record.samples_per_s:.0f}",
            f"{record.train_loss:.4g}",
            *(f"{record.test[name]:.4g}" if name in record.test else "-" for name in figures),
        )
        for record in facts.epochs
    ]
    period = period_text(facts.period_s, facts.plan.predicted.period_s)
    stopped = facts.summary.stopped if facts.summary is not None else None
    return Sheet(
        f"{facts.name}: {facts.settings.task} with {facts.plan.variant}",
        ("epoch", "mini-batches", "samples/s", "train loss", *(f"test {f}" for f in figures)),
        tuple(rows),
        facts=(period, *([f"stopped early: {stopped}"] if stopped else []), *facts.missing),
        figure=_recordings_figure(facts.recordings),
    )


def runs_sheet(runs: Sequence[Run]) -> Sheet:
    """Figures of their last epochs, and their schedules one above the other."""
    from ..pictures.html.run_data import read_facts

    names = names_of_paths([str(run.path) for run in runs])
    facts = [read_facts(run.path, name) for run, name in zip(runs, names, strict=True)]
    figures = list(
        dict.fromkeys(name for each in facts for record in each.epochs for name in record.test)
    )
    rows = []
    for each in facts:
        last = each.epochs[-1] if each.epochs else None
        test = {} if last is None else last.test
        rows.append(
            (
                each.name,
                each.plan.variant,
                str(sum(len(losses) for losses in each.losses)),
                format_seconds(each.plan.predicted.period_s),
                format_seconds(each.period_s) if each.period_s else "-",
                "-" if last is None else f"{last.samples_per_s:.0f}",
                "-" if last is None else f"{last.train_loss:.4g}",
                *(f"{test[name]:.4g}" if name in test else "-" for name in figures),
            )
        )
    recordings = [(each.name, each.measured) for each in facts if each.measured is not None]
    return Sheet(
        f"{len(runs)} runs",
        (
            *("run", "system", "mini-batches", "period predicted", "measured", "samples/s"),
            *("train loss", *(f"test {figure}" for figure in figures)),
        ),
        tuple(rows),
        words=2,
        facts=("losses and figures: of the last epoch",),
        figure=_recordings_figure(recordings),
    )


def _recordings_figure(drawn: Sequence[tuple[str, Recording]]) -> str:
    """Recordings one above the other: the mini-batches that all have, where there are such; else
    the first one alone."""
    if not drawn:
        return ""
    everything = FigureSettings(mini_batches=MAX_COUNT)
    windows = [window_of(recording, everything) for _, recording in drawn]
    first, last = max(w.first for w in windows), min(w.last for w in windows)
    if first > last:
        return timelines_svg(drawn[:1], everything)
    return timelines_svg(drawn, FigureSettings(first=first, mini_batches=last - first + 1))
