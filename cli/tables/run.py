"""A run in the terminal: its epochs and its summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group
from rich.text import Text

from ...planner.plan import Plan
from ...profiles.units import format_bytes, format_seconds
from ...runtime.records.events import EvaluationDone
from ...runtime.records.metrics import EpochRecord, RunSummary, StageReport
from .layout import beside_predicted, counted, fitted, fixed


def epoch_line(record: EpochRecord) -> str:
    """One epoch in one line."""
    return (
        f"epoch {record.epoch + 1:3d}  {record.seconds:6.2f} s  "
        f"{record.samples_per_s:7.0f} samples/s  train loss {record.train_loss:.4f}  "
        f"{_figures(record.test)}"
    )


def evaluation_line(event: EvaluationDone) -> str:
    """An evaluation while an epoch goes on, in one line."""
    return f"epoch {event.epoch + 1:3d}  mini-batch {event.mini_batch}  {_figures(event.figures)}"


def _figures(test: Mapping[str, float]) -> str:
    return "  ".join(
        f"test {name} {value:.2%}" if name == "accuracy" else f"test {name} {value:.4f}"
        for name, value in test.items()
    )


def summary_table(plan: Plan, summary: RunSummary, width: int) -> Group:
    """One row per stage's replica: measured beside predicted; idle time, peak and RSS are its
    worker's."""
    found = summary.stages
    loading = any(r.wall_s and takes_long(r.loading_s / r.wall_s) for r in found)
    predicted = [plan.predicted.device_of(r.stage) for r in found]
    # What the runtime can't see (scratch memory inside operations) isn't compared.
    accounted = [each.accounted_memory.total for each in predicted]
    columns = [
        fixed("compute", [format_seconds(r.compute_s) for r in found]),
        fixed("comm.", [format_seconds(r.communication_s) for r in found]),
        *[fixed("loading", [format_seconds(r.loading_s) for r in found])] * loading,
        beside_predicted(
            "idle",
            ["-" if r.idle_share is None else f"{r.idle_share:.0%}" for r in found],
            [f"{each.idle_share:.0%}" for each in predicted],
        ),
        beside_predicted(
            "peak",
            [format_bytes(r.peak.total) if r.peak else "-" for r in found],
            map(format_bytes, accounted),
        ),
        fixed("RSS", [format_bytes(r.rss_peak_bytes) for r in found]),
        beside_predicted(
            "versions",
            [str(r.versions_held) for r in found],
            [str(plan.predicted.stages[r.stage].versions_held) for r in found],
        ),
    ]
    title = f"{summary.variant}, {_workers(plan)}, {summary.mode}"
    stages = fixed("stage", [_which(plan, r) for r in found], left=True)
    return fitted(title, stages, columns, width)


def takes_long(share: float) -> bool:
    """Whether so much of a worker's time is worth a column."""
    return share >= 0.01


def _device_lines(plan: Plan, summary: RunSummary) -> list[str]:
    gpus = [report for report in summary.stages if report.device_peak_bytes is not None]
    if not gpus:
        return []
    where = ", ".join(
        f"stage {_which(plan, report)} on {report.device} "
        f"(peak {format_bytes(report.device_peak_bytes or 0)}, of the GPU in use "
        f"{format_bytes(report.device_used_bytes or 0)})"
        for report in gpus
    )
    how = f"; messages by {gpus[0].transport}" * bool(gpus[0].transport)
    what = "is torch's, of all tensors of the process; in use is what all processes have at the end"
    reasons = {report.not_by_ipc for report in gpus} - {""}
    return [
        f"{where}{how}. This peak {what}",
        *(f"messages don't go from GPU to GPU by CUDA IPC: {why}" for why in reasons),
    ]


def compile_lines(plan: Plan, summary: RunSummary) -> list[str]:
    """Stages that were to be compiled, and weren't; and what of their passes was captured."""
    lines = [
        (report, f" isn't compiled: {report.not_compiled}")
        for report in summary.stages
        if report.not_compiled
    ]
    lines += [(r, f", CUDA graphs: {r.graphs}") for r in summary.stages if r.graphs]
    return [f"stage {_which(plan, report)}{line}" for report, line in lines]


def _workers(plan: Plan) -> str:
    stages, workers = len(plan.stages), plan.workers
    text = counted(stages, "stage")
    return text if workers == stages else f"{text} on {counted(workers, 'worker')}"


def _which(plan: Plan, report: StageReport) -> str:
    """``1``, or ``1.0`` for replica 0 where the stage has several."""
    several = len(plan.stages[report.stage].devices) > 1
    return f"{report.stage}.{report.replica}" if several else str(report.stage)


def period_text(measured_s: float | None, predicted_s: float) -> str:
    """The period, as far as it is known, beside what was predicted."""
    predicted = f"predicted {format_seconds(predicted_s)}"
    if not measured_s:
        return f"period {predicted}"
    ratio = f" ({measured_s / predicted_s:.2f} ×)" if predicted_s else ""
    return f"period measured {format_seconds(measured_s)}, {predicted}{ratio}"


def summary_lines(plan: Plan, summary: RunSummary) -> list[Text]:
    """Lines on the run as a whole."""
    at = summary.resumed_at
    since = f"since it went on after mini-batch {at}" if at else "in all"
    lines = [
        f"{summary.mini_batches} mini-batches of {summary.mini_batch} in "
        f"{counted(summary.micro_batches, 'micro-batch')}: "
        f"{summary.samples_per_s:.0f} samples/s, "
        f"{format_seconds(summary.seconds)} {since}, start-up and evaluation included"
    ]
    if summary.stopped is not None:
        lines.append(f"stopped early: {summary.stopped}")
    period = period_text(summary.measured_period_s, summary.predicted_period_s)
    if summary.measured_period_s is None:
        period += (
            "; an inline run takes turns and measures none"
            if summary.mode == "inline"
            else "; too few mini-batches to measure it"
        )
    lines += [period, *_device_lines(plan, summary)]
    if plan.predicted.sequence_distance is not None:
        lines.append(f"v predicted {plan.predicted.sequence_distance}")
    for report in summary.stages:
        seen = ", ".join(
            f"{difference} in {times}" for difference, times in report.version_differences.items()
        )
        apart = f"; weights up to {report.weight_distance:.2%} apart" * bool(report.weight_distance)
        which = _which(plan, report)
        lines.append(f"version differences seen on stage {which}: {seen} backwards{apart}")
    return [
        *map(Text, [*lines, *compile_lines(plan, summary)]),
        *(Text(line, style="bold") for line in _warnings(plan, summary)),
        Text(_TERMS, style="dim"),
    ]


def _warnings(plan: Plan, summary: RunSummary) -> Iterator[str]:
    for report in summary.stages:
        if report.not_finite:
            yield (
                f"stage {_which(plan, report)}: loss or gradients of "
                f"{counted(len(report.not_finite), 'mini-batch')} weren't "
                f"finite, first of mini-batch {report.not_finite[0]}"
            )
        if report.beyond_profile:
            yield (
                f"{counted(len(report.beyond_profile), 'mini-batch')} had larger shapes than any "
                f"that was profiled, the first of them mini-batch {report.beyond_profile[0]}: "
                "memory may be more than planned; tp-profile --batches N looks at more of them"
            )


_TERMS = (
    "loading: waiting for samples, where that takes 1 % or more. idle: neither computing "
    "nor communicating nor loading, in all training, evaluation left out; predicted in "
    "the steady state. peak: weights, older versions, gradients, optimizer, activations, "
    "messages; without scratch memory. RSS: the whole process, libraries included. "
    "versions: of the weights, held at once. difference: version of a backward less that "
    "of its forward. v: mini-batches from one to the next of the same sequence of updates. "
    "apart: ‖W_B − W_F‖ / ‖W_F‖, the mean of the epoch with the largest."
)
"""What the words of the table and of these lines mean."""
