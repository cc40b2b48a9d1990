"""Tables of tp-run study: time to target of each plan, and how overheads shrink with length."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group
from rich.text import Text

from ....cli.tables.layout import counted, fitted, fixed, words
from ....cli.tables.plan import target_name
from ....profiles.units import format_bytes, format_seconds
from ..figures.reckoning import ArmResult
from ..figures.results import DroppedResult, PlanResult, StudyResults
from ..figures.spread import Spread
from ..figures.study import PLAIN, StudiedPlan, Study, StudyArm


def study_table(study: Study, results: StudyResults, width: int) -> Group:
    """Table of the plans, the shortest time to target first."""
    plans = ranked(study, results)
    found = [results.plan(plan.name) for plan in plans]
    arms = [results.arm(plan.arm) for plan in plans]
    columns = [
        fixed("", [_mark(each, results) for each in found], left=True),
        fixed("time", [time_text(each) for each in found]),
        fixed("95 %", [_interval(each.time_s, format_seconds) for each in found], left=True),
        fixed("overhead", [overhead_text(arm, study.arm(arm.arm)) for arm in arms]),
        fixed("95 %", [_interval(arm.overhead, "{:.2f}".format) for arm in arms], left=True),
        fixed("period", [format_seconds(plan.period_s) for plan in plans]),
        fixed("memory", [format_bytes(plan.memory_bytes) for plan in plans]),
        fixed("delay", [_by_stage(plan) for plan in plans]),
        fixed("S", [str(plan.stages) for plan in plans]),
        fixed("N", [str(plan.micro_batches) for plan in plans]),
        fixed("rate", [rate_text(study.arm(plan.arm)) for plan in plans]),
    ]
    title = f"predicted time to {target_text(study, results)}, {_seeds(study)}"
    note = Text(
        "*: recommended. ≈: equal to it within the seeds' spread. ●: no other is as good in time "
        "and memory. overhead: samples to the target over plain training's, paired by seed. "
        "delay: by stage, in updates. rate: the best of its budget; !: at the edge of what was "
        "tried.",
        style="dim",
    )
    return Group(fitted(title, words("system", [p.name for p in plans], 16), columns, width), note)


def _seeds(study: Study) -> str:
    least, most = study.question.seeds, len(study.plain.finals())
    return counted(least, "seed") if most == least else f"{least} to {most} seeds"


def ranked(study: Study, results: StudyResults) -> list[StudiedPlan]:
    """The plans, the shortest time first; those that don't get there last."""
    times = {p.plan: p.time_s.mean if p.time_s is not None else float("inf") for p in results.plans}
    return sorted(study.plans, key=lambda plan: times[plan.name])


def dropped_table(study: Study, results: StudyResults, width: int) -> Group:
    """Table of the plans that a budget wasn't spent on to the end, those first that may be the
    best."""
    shown = results.dropped
    plans = {plan.name: plan for each in study.dropped for plan in each.plans}
    columns = [
        fixed("expected time", [_expected(each.time_s, format_seconds) for each in shown]),
        fixed("95 %", [_interval(each.time_s, format_seconds) for each in shown], left=True),
        fixed("overhead", [_expected(each.overhead, "{:.2f}".format) for each in shown]),
        fixed("period", [format_seconds(plans[each.plan].period_s) for each in shown]),
        fixed("delay", [_by_stage(plans[each.plan]) for each in shown]),
        fixed("rate", [f"{each.rate:g}" for each in shown]),
        fixed("after", [str(each.after) for each in shown]),
        fixed("why", [_why_dropped(each) for each in shown], left=True),
    ]
    return fitted(
        "dropped: what is expected of a whole training, by trainings of so many mini-batches",
        words("system", [each.plan for each in shown], 16),
        columns,
        width,
    )


def _expected(spread: Spread | None, text: Callable[[float], str]) -> str:
    return "-" if spread is None else f"≈ {text(spread.mean)}"


def _why_dropped(each: DroppedResult) -> str:
    if each.overhead is None:
        return "diverged"
    return "budget" if each.overlap else "slower"


def level_table(results: StudyResults, width: int) -> Group:
    """Table of the overheads at levels that plain training has on its way."""
    arms = [arm for arm in results.arms if arm.arm != PLAIN]
    places = results.arms[0].by_level
    columns = [
        fixed(
            f"after {place.mini_batches}",
            [_with_interval(arm.by_level[k].overhead) for arm in arms],
        )
        for k, place in enumerate(places)
    ]
    title = "overhead at what plain training has after so many mini-batches"
    return fitted(title, words("trained", [arm.arm for arm in arms], 18), columns, width)


def study_lines(study: Study, results: StudyResults, *, verbose: bool) -> list[Text]:
    """Lines on the whole: what is recommended, what shares a training, what is untuned."""
    found = results.recommendation
    chosen = f"recommended: {found.plan}; " if found.plan else ""
    lines = [Text(chosen + found.why, style="bold")]
    plain = [plan.name for plan in study.plans if study.arm(plan.arm).kind == "plain"]
    if plain:
        alike = " and have as many micro-batches" if study.question.mixes else ""
        which = f"all that flush or have no delay{alike}"
        lines.append(Text(f"plain training, trained once for {which}: {', '.join(plain)}"))
    edge = [arm.name for arm in study.arms if arm.at_edge]
    if study.question.tune == 1:
        lines.append(Text("learning rates aren't tuned (--tune 1): each system may have a better"))
    elif edge:
        lines.append(
            Text(
                f"at the edge of what was tried, so not tuned: {', '.join(edge)}; give a larger "
                "--tune"
            )
        )
    blown = [_diverging(arm) for arm in study.arms if any(c.diverged_at for c in arm.curves)]
    if blown:
        lines.append(Text(f"diverged: {'; '.join(blown)}"))
    usual = study.question.length
    lost = [
        found.arm
        + (f" ({found.reached} of {len(found.samples)} do)" if found.reached else "")
        + (f" (in {length})" if (length := study.arm(found.arm).length) != usual else "")
        for found in results.arms
        if found.reached < len(found.samples)
    ]
    if lost:
        lines.append(
            Text(
                f"not all seeds reach the target in {usual} mini-batches: "
                f"{', '.join(lost)}; times are more than is shown"
            )
        )
    clusters = sorted({plan.cluster for plan in study.plans})
    lines.append(Text(f"periods are predicted for {'; '.join(clusters)}", style="dim"))
    if verbose:
        lines += [_tried(study, arm) for arm in study.arms]
    return lines


def target_text(study: Study, results: StudyResults) -> str:
    """``a training loss of 0.412``."""
    if results.target is None:
        return "a target that there isn't"
    return f"a {target_name(study.question.metric, results.target)}"


def _mark(plan: PlanResult, results: StudyResults) -> Text:
    best = results.recommendation
    sign = "*" if plan.plan == best.plan else "≈" if plan.plan in best.equal else " "
    return Text(sign + ("●" if plan.on_front else " "), style="green")


def time_text(plan: PlanResult) -> str:
    """The predicted time, or what it is more than."""
    if plan.time_s is not None:
        return format_seconds(plan.time_s.mean)
    return "-" if plan.at_least_s is None else f"> {format_seconds(plan.at_least_s)}"


def _interval(spread: Spread | None, text: Callable[[float], str]) -> str:
    if spread is None or spread.low is None or spread.high is None or spread.low == spread.high:
        return ""
    return f"{text(spread.low)} … {text(spread.high)}"


def overhead_text(found: ArmResult, arm: StudyArm) -> str:
    """The overhead over plain training; 1 for plain training itself."""
    if arm.name == PLAIN and found.reached:
        return "1"
    if found.overhead is not None:
        return f"{found.overhead.mean:.2f}"
    if found.diverged == len(arm.finals()):
        return "diverged"
    return "-" if found.at_least is None else f"> {found.at_least:.2f}"


def _with_interval(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    interval = _interval(spread, "{:.2f}".format)
    return f"{spread.mean:.2f}" + (f" ({interval})" if interval else "")


def rate_text(arm: StudyArm) -> str:
    """The chosen rate, with its warm-up where it has one; ``!`` at the edge."""
    warmup = f" w{arm.warmup}" if arm.warmup else ""
    return f"{arm.rate:g}{warmup}{'!' if arm.at_edge else ''}"


def _by_stage(plan: StudiedPlan) -> str:
    by_stage = plan.delays or plan.version_differences
    if len(by_stage) <= 8:
        return " ".join(map(str, by_stage))
    return f"{by_stage[0]} … {by_stage[-1]}"


def _diverging(arm: StudyArm) -> str:
    rates = sorted({curve.rate for curve in arm.curves if curve.diverged_at is not None})
    return f"{arm.name} at {', '.join(f'{rate:g}' for rate in rates)}"


def _tried(study: Study, arm: StudyArm) -> Text:
    from ..figures.curves import end_value

    parts = []
    for curve in sorted(arm.curves, key=lambda curve: (curve.rate, curve.warmup)):
        if curve.seed or curve.phase == "rung":
            continue
        end = end_value(curve, study.question.metric)
        warmup = f" w{curve.warmup}" if curve.warmup else ""
        parts.append(f"{curve.rate:g}{warmup}: {'diverged' if end is None else f'{end:.4g}'}")
    return Text(f"{arm.name}: at the end, by rate: {', '.join(parts)}")
