"""How profiles, plans and runs show themselves: in a notebook, on a terminal, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ...planner.plan import Plan
from ...planner.recordings.recording import Recording
from ...profiles.errors import ScheduleError, UserError
from ...profiles.files import MAX_COUNT
from ...profiles.profile import Profile
from ...profiles.units import format_bytes, format_seconds
from ...runtime.records.run import Run
from ..errors import output, printable
from ..pictures.svg.frame import FigureSettings, window_of
from ..pictures.svg.options import plans_svg
from ..pictures.svg.timeline import timelines_svg
from ..tables.layout import counted, devices_text, first_to_last, fitted, fixed, words
from ..tables.names import names_of_paths, numbered
from ..tables.plan import print_plan, rate
from ..tables.plans import IN_ROWS, figure_text
from ..tables.profile import print_profile

_MOST_ROWS = 24


@dataclass(frozen=True)
class Sheet:
    """A table, and a figure below it.

    Attributes:
        words: how many columns from the left are words; the others are figures.
        facts: lines between title and table.
        figure: SVG text; empty: there is none.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    facts: tuple[str, ...] = ()
    figure: str = ""

    def _repr_html_(self) -> str:
        """For a notebook: light, whatever theme it has, as the figure is."""
        rows = [*self.rows[:_MOST_ROWS]]
        if len(self.rows) > _MOST_ROWS:
            more = f"… {len(self.rows) - _MOST_ROWS} more"
            rows.append((more, *[""] * (len(self.head) - 1)))
        lines = [
            f'<div style="{_BOX}">',
            f"<b>{_text(self.title)}</b>",
            *(f"<div>{_text(fact)}</div>" for fact in self.facts),
            f'<table style="{_TABLE}"><thead><tr>',
            *(self._cell("th", k, name) for k, name in enumerate(self.head)),
            "</tr></thead><tbody>",
            *(
                f"<tr>{''.join(self._cell('td', k, cell) for k, cell in enumerate(row))}</tr>"
                for row in rows
            ),
            "</tbody></table>",
        ]
        if self.figure:
            # The declaration of a document of its own doesn't stand within another.
            lines.append(self.figure[self.figure.index("<svg") :])
        return "\n".join([*lines, "</div>"])

    def _cell(self, tag: str, column: int, text: str) -> str:
        side = "left" if column < self.words else "right"
        wrap = "; white-space: nowrap" * (tag == "td")
        return f'<{tag} style="text-align: {side}; {_CELL}{wrap}">{_text(text)}</{tag}>'

    def show(self) -> None:
        """Print it on the terminal, without the figure."""
        found = list(zip(self.head, *self.rows, strict=True))
        key, *columns = (
            words(name, cells, 12) if k < self.words else fixed(name, cells)
            for k, (name, *cells) in enumerate(found)
        )
        output().print(fitted(self.title, key, columns, output().width))
        for fact in self.facts:
            output().print(fact)


_BOX = (
    "background: #ffffff; color: #1a1f27; padding: 0.6em 0.8em; max-width: 178mm; "
    "overflow-x: auto; font: 13px sans-serif"
)
_TABLE = "border-collapse: collapse; margin: 0.5em 0; font-size: 12px"
_CELL = "padding: 1px 6px; background: #ffffff; color: #1a1f27; vertical-align: bottom"


def _text(text: str) -> str:
    return escape(printable(text))


# What `profiles.files.Views` asks for -----------------------------------------------------------


def html(shown: Any) -> str:
    """As a notebook shows it."""
    if isinstance(shown, Profile):
        return _profile_sheet(shown)._repr_html_()
    if isinstance(shown, Plan):
        return _plan_sheet(shown)._repr_html_()
    return _run_sheet(shown)._repr_html_()


def show(shown: Any) -> None:
    """Print it, as the commands do."""
    if isinstance(shown, Profile):
        print_profile(output(), shown, verbose=False)
    elif isinstance(shown, Plan):
        print_plan(shown, 16)
    else:
        from ..pictures.html.run_data import read_facts
        from ..run_commands.report import print_run

        print_run(output(), read_facts(shown.path))


def compare(shown: Sequence[Any]) -> Sheet:
    """Side by side. Raises UserError for things of different kinds."""
    for kind, sheet in ((Profile, _profiles_sheet), (Plan, _plans_sheet), (Run, _runs_sheet)):
        if all(isinstance(each, kind) for each in shown):
            return sheet(shown)
    kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in shown))
    raise UserError(f"compare: give profiles, plans or runs alone, not {kinds}")


# Profiles ---------------------------------------------------------------------------------------


def _profile_sheet(profile: Profile) -> Sheet:
    size, whole = profile.micro_batch_sizes[-1], profile.whole_model[-1]
    rows = []
    for layer in profile.layers:
        found = layer.measurements[-1]
        times = format_seconds(found.forward_s), format_seconds(found.backward_s)
        cost = format_bytes(layer.parameter_bytes), *times, format_bytes(found.saved_bytes)
        rows.append((layer.name, layer.kind, *cost))
    total = format_bytes(sum(layer.parameter_bytes for layer in profile.layers))
    frozen = sum(layer.frozen_bytes or 0 for layer in profile.layers)
    more = f" that are trained, {format_bytes(frozen)} that are frozen" if frozen else ""
    times = format_seconds(whole.forward_s), format_seconds(whole.backward_s)
    return Sheet(
        f"{profile.target}: {counted(len(profile.layers), 'layer')}",
        ("layer", "kind", "parameters", "forward", "backward", "saved"),
        tuple(rows),
        words=2,
        facts=(
            f"on {profile.device}, micro-batch of {size}; the whole model: {total} of "
            f"parameters{more}, forward {times[0]}, backward {times[1]}",
        ),
    )


def _profiles_sheet(profiles: Sequence[Profile]) -> Sheet:
    """Times of the layers that have the same names; of each the largest micro-batch."""
    each = [
        {layer.name: _passes_s(layer.measurements[-1]) for layer in profile.layers}
        for profile in profiles
    ]
    names = list(dict.fromkeys(name for found in each for name in found))
    whole = [_passes_s(profile.whole_model[-1]) for profile in profiles]
    rows = [(name, *_times([found.get(name) for found in each])) for name in names]
    titles = [f"{p.target} on {p.device}, {p.micro_batch_sizes[-1]}" for p in profiles]
    return Sheet(
        "forward and backward of each layer",
        ("layer", *numbered(titles)),
        (("whole model", *_times(whole)), *rows),
    )


def _passes_s(found: Any) -> float:
    return float(found.forward_s + found.backward_s)


def _times(seconds: Sequence[float | None]) -> list[str]:
    """The first as it is, the others with how many times as long they take."""
    first, found = seconds[0], []
    for k, each in enumerate(seconds):
        ratio = f" ({each / first:.2f} ×)" if k and each is not None and first else ""
        found.append("-" if each is None else f"{format_seconds(each)}{ratio}")
    return found


# Plans ------------------------------------------------------------------------------------------


def _plan_sheet(plan: Plan) -> Sheet:
    rows = []
    for s, (stage, found) in enumerate(zip(plan.stages, plan.predicted.stages, strict=True)):
        devices = devices_text(plan, [s])
        times = format_seconds(found.forward_s), format_seconds(found.backward_s)
        held = str(found.version_difference), str(found.versions_held)
        memory = format_bytes(found.memory_bytes)
        layers = first_to_last(stage.nodes, 36)
        rows.append((str(s), layers, devices, *times, f"{found.idle_share:.0%}", *held, memory))
    return Sheet(
        f"{plan.variant}: {counted(len(plan.stages), 'stage')} on "
        f"{counted(IN_ROWS['devices'].value(plan), 'device')}, mini-batch of "
        f"{plan.mini_batch} in {counted(plan.micro_batches, 'micro-batch')}",
        ("stage", "layers", "device", "forward", "backward", "idle", "d", "versions", "memory"),
        tuple(rows),
        words=3,
        facts=(f"period {format_seconds(plan.predicted.period_s)}: {rate(plan)}",),
        figure=_plan_figure([("", plan)]),
    )


def _plans_sheet(plans: Sequence[Plan]) -> Sheet:
    names = numbered([plan.variant for plan in plans])
    keys = (
        *("stages", "devices", "micro_batches", "period_s", "samples_per_s", "memory_bytes"),
        *("versions_held", "version_difference", "least_idle_share", "gap"),
    )
    found = [IN_ROWS[key] for key in keys]
    return Sheet(
        f"{len(plans)} plans",
        ("system", *(figure.name for figure in found)),
        tuple(
            (name, *(figure_text(figure, plan) for figure in found))
            for name, plan in zip(names, plans, strict=True)
        ),
        facts=("most: of the stage or device with most; idle: of the busiest",),
        figure=_plan_figure(list(zip(names, plans, strict=True))),
    )


def _plan_figure(plans: Sequence[tuple[str, Plan]]) -> str:
    """As `plans_svg`; empty for a schedule that can't be drawn."""
    try:
        return plans_svg(plans, FigureSettings())
    except ScheduleError:
        return ""


# Runs -------------------------------------------------------------------------------------------


def _run_sheet(run: Run) -> Sheet:
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


def _runs_sheet(runs: Sequence[Run]) -> Sheet:
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
