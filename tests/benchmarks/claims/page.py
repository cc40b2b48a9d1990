"""docs/claims.md: what was studied, and the claims beside what was found; and pages beside the
studies: one for each task, with the figures of every system, and one for each further question.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.files import write_bytes
from timeprest.profiles.units import format_bytes, format_seconds
from timeprest.runtime.study.figures.curves import points_of, samples_to, smoothed, value_at
from timeprest.runtime.study.figures.results import results_of
from timeprest.runtime.study.figures.spread import spread_of
from timeprest.runtime.study.figures.study import PLAIN, Curve, StudiedPlan, read_study

from ..shared import around, markdown
from .claims import CLAIMS, LEVELS, FoundCell, Outcome, Verdict, marked, shown
from .further import FEWEST, PARTS, UNIT, whole_study
from .originals import originals
from .plans import BANDWIDTHS, SWEPT, plans_path, read_plans
from .studies import FULL, SHORT, Cell, Effort, cells, study_path

HEAD = Path(__file__).resolve().parents[3] / "docs" / "claims.head.md"
WITHIN = 1.05
"""A recommended plan's time over the best's that is good enough."""


def found_cells(studies: Path, effort: Effort = FULL) -> list[FoundCell]:
    """Those that were studied to the end."""
    found = []
    for cell in cells("all", "all"):
        full, short = study_path(cell, effort, studies), study_path(cell, SHORT, studies)
        if full.exists() and plans_path(cell, studies).exists():
            found.append(
                FoundCell(
                    cell,
                    whole_study(cell, studies) if effort is FULL else read_study(full),
                    read_study(short) if short.exists() else None,
                    read_plans(plans_path(cell, studies)),
                )
            )
    return found


def write_page(studies: Path, page: Path, effort: Effort = FULL) -> str:
    """Make the page of the studies there are, and each task's in the folder that has the page's
    name; what was found in one line. Raises FileError."""
    found = found_cells(studies, effort)
    parts, told = [_missing(found)], in_one_line(found)
    if found:
        parts += _claims(found)
        folder, by_task = page.with_suffix(""), _by_task(found)
        folder.mkdir(parents=True, exist_ok=True)
        links = [
            f"[{each[0].cell.task.title}]({folder.name}/{n}.md)" for n, each in by_task.items()
        ]
        late = [*_staleness(found), *originals(studies)]
        chosen = [*_choices(found), *_recommendations(found)]
        beside = {
            "why `timeprest` is late, and its papers' set-ups in small": ("timeprest", late),
            "plans by period or loss, and what a short study recommends": ("choices", chosen),
            "mini-batches of M / N, and one rate for all": ("settings", _settings(found)),
            "slower links": ("bandwidths", _bandwidths(found)),
        }
        for title, (name, texts) in beside.items():
            if texts:
                head = f"# {title[0].upper()}{title[1:]}\n\nOf [claims](../{page.name})."
                _write(folder / f"{name}.md", [head, *texts])
                links.append(f"[{title}]({folder.name}/{name}.md)")
        lines = "\n".join(f"- {link}" for link in links)
        parts.append(f"## Every system's figures, and more\n\n{lines}")
        for name, cells_of_task in by_task.items():
            texts = [f"# {cells_of_task[0].cell.task.title}", f"Of [claims](../{page.name})."]
            _write(folder / f"{name}.md", [*texts, *(t for c in cells_of_task for t in _cell(c))])
    _write(page, around(HEAD.read_text(encoding="utf-8").replace("{found}", told), parts))
    return told


def _by_task(found: Sequence[FoundCell]) -> dict[str, list[FoundCell]]:
    tasks: dict[str, list[FoundCell]] = {}
    for each in found:
        tasks.setdefault(each.cell.task.name, []).append(each)
    return tasks


def _write(page: Path, parts: Sequence[str]) -> None:
    write_bytes(page, ("\n\n".join(part for part in parts if part) + "\n").encode())


def _missing(found: Sequence[FoundCell]) -> str:
    names = [cell.name for cell in cells("all", "all")]
    missing = sorted(set(names) - {each.cell.name for each in found}, key=names.index)
    return f"**Not studied yet**: {', '.join(missing)}." if missing else ""


# The claims -------------------------------------------------------------------------------------


def _claims(found: Sequence[FoundCell]) -> list[str]:
    judged = [(claim, [claim.judge(each) for each in found]) for claim in CLAIMS]
    rows = [
        [str(k), claim.source, claim.text, f"**{verdict(verdicts)}**"]
        for k, (claim, verdicts) in enumerate(judged, 1)
    ]
    names = [_short_name(each.cell) for each in found]
    details = [
        [str(k), claim.figure, *(marked(each) for each in verdicts)]
        for k, (claim, verdicts) in enumerate(judged, 1)
    ]
    outcomes = Counter(one.outcome for _, verdicts in judged for one in verdicts)
    return [
        "## The claims, and what was found",
        _so_far(len(found)),
        markdown(["", "source", "claim", "found"], rows),
        "What that is made of: the figure of each cell. ✓ on the claim's side, ✗ against it, = "
        f"equal within the seeds' spread, ? not known ({outcomes['unknown']} of "
        f"{outcomes.total()}). Samples are those to the loss that plain training ends at; where "
        "neither of both systems gets there, to the one that it has after two thirds (⅔) or a "
        "third (⅓) of its way.",
        markdown(["", "figure", *names], details),
    ]


def _so_far(studied: int) -> str:
    count = len(cells("all", "all"))
    return f"**Of {studied} of {count} cells so far**, and of no others." if studied < count else ""


def _short_name(cell: Cell) -> str:
    return f"{cell.task.name}, S = {cell.devices}"


_SHORTFALLS: tuple[tuple[Outcome, str], ...] = (
    ("no", "doesn't"),
    ("equal", "equal"),
    ("unknown", "not known"),
)


def verdict(verdicts: Sequence[Verdict]) -> str:
    """ "holds", "doesn't hold" or "holds in 2 of 3", over all cells."""
    counts = Counter(one.outcome for one in verdicts)
    if counts["yes"] == len(verdicts):
        return "holds"
    rest = [f"{text} in {counts[outcome]}" for outcome, text in _SHORTFALLS if counts[outcome]]
    if counts["no"] == len(verdicts):
        return "doesn't hold"
    first = f"holds in {counts['yes']} of {len(verdicts)}"
    if not counts["yes"]:
        first = "doesn't hold" if counts["no"] else "not shown"
    return f"{first} ({'; '.join(rest)})"


def in_one_line(found: Sequence[FoundCell]) -> str:
    """How many claims hold where."""
    told = [verdict([claim.judge(each) for each in found]) for claim in CLAIMS] if found else []
    some = sum(one.startswith("holds in") for one in told)
    none = sum(one.startswith("doesn't") for one in told)
    return (
        f"{len(told)} claims, {len(found)} cells: {told.count('holds')} hold in all, "
        f"{some} in some, {none} in none, "
        f"{sum(one.startswith('not') for one in told)} not shown"
    )


# By period or by loss ---------------------------------------------------------------------------


def _choices(found: Sequence[FoundCell]) -> list[str]:
    """What the shortest period costs in time to a level that systems reach, beside the plan that
    gets there first."""
    rows, gains = [], []
    for each in found:
        plans = [plan for plan in each.study.plans if not plan.name.endswith(PARTS)]
        shortest = min(plans, key=lambda plan: (plan.period_s, plan.name))
        level = each.levels[" at ⅓"]
        times = {plan: each.seconds(plan.name, level) for plan in plans}
        known = {plan: time for plan, time in times.items() if time is not None}
        best = min(known, key=lambda plan: (known[plan], plan.name), default=None)
        own = times[shortest]
        gain = own / known[best] if best is not None and own is not None else None
        gains += [gain] if gain else []
        shown_gain = f"{gain:.2f}" if gain else "not reached"
        rows.append(
            [_short_name(each.cell), _named(shortest), _named(best) if best else "none", shown_gain]
        )
    told = f"; the median gain is {median(gains):.2f}" if gains else ""
    return [
        "## Chosen by period, or by loss",
        "Of all plans of a cell the one with the shortest period (of equal ones, the first by "
        "name), and the one that gets to the loss at ⅓ of plain training's way first by the cell's "
        "own trainings, as `--objective loss` has it of such a study; its gain is the other's time "
        f"over its own{told}.",
        markdown(["", "shortest period", "first at ⅓", "its gain"], rows),
    ]


def _named(plan: StudiedPlan) -> str:
    return f"`{plan.variant}`{plan.name.removeprefix(plan.variant)}"


# Recommendations --------------------------------------------------------------------------------


def _recommendations(found: Sequence[FoundCell]) -> list[str]:
    rows, good, said, none = [], 0, 0, 0
    short = [each for each in found if each.short is not None]
    for each in short:
        assert each.short is not None
        told = results_of(each.short).recommendation
        truth = {
            p.plan: p.time_s.mean
            for p in each.results.plans
            if p.time_s is not None and p.plan in each.plans.systems
        }
        best = min(truth, key=truth.__getitem__, default=None)
        if told.plan is None or best is None:
            none += 1
            whole = f"`{best}`" if best else "none"
            rows.append([_short_name(each.cell), "none", whole, "", "recommends none"])
            continue
        over = truth[told.plan] / truth[best] if told.plan in truth else float("inf")
        close = over <= WITHIN
        open_ = best in (*told.equal, *told.open) or not told.begun
        good, said = good + close, said + (not close and open_)
        rows.append(
            [
                _short_name(each.cell),
                f"`{told.plan}`",
                f"`{best}`",
                "target not reached" if over == float("inf") else f"{over:.2f}",
                "within 5 %" if close else "said to be open" if open_ else "**missed**",
            ]
        )
    if not short:
        return []
    head = ["", "a tenth recommends", "the whole says", "its time over the best", ""]
    return [
        "## Is a short study's recommendation right?",
        f"A study of a tenth of the steps beside the whole: in {good} of {len(short)} cells the "
        f"system that it recommends is within 5 % of the best time to target; in {said} more the "
        "best was among those that it called equal or undecided, or it said that training had "
        "hardly begun at its target."
        + (f" In {none} it recommends none, since none reached its target." if none else ""),
        markdown(head, rows),
    ]


# Slower links -----------------------------------------------------------------------------------


def _bandwidths(found: Sequence[FoundCell]) -> list[str]:
    rows = []
    where = list(LEVELS)[-1]
    for each in found:
        level = each.levels[where]
        plain = [samples for samples in each.samples(PLAIN, level) if samples]
        if not plain:
            continue
        for bandwidth in BANDWIDTHS:
            times = {"data parallelism": each.plans.parallel_periods_s[bandwidth]}
            for name in SWEPT:
                over = None if each.untrained(name) else each.samples_over(name, PLAIN, level)
                if over is not None:
                    times[name] = over.mean * each.plans.systems[name].periods_s[bandwidth]
            scale = spread_of(plain).mean / each.cell.task.mini_batch
            first = min(times, key=times.__getitem__)
            shown_times = [
                format_seconds(times[name] * scale) if name in times else "–"
                for name in ("data parallelism", *SWEPT)
            ]
            shown_times = [
                f"**{text}**" if name == first else text
                for name, text in zip(("data parallelism", *SWEPT), shown_times, strict=True)
            ]
            rows.append([_short_name(each.cell), bandwidth, *shown_times])
    return [
        "## Winners flip with bandwidth",
        f"Predicted time to the loss{where} of plain training's way, planned anew for each "
        f"bandwidth; samples are those of the study at {BANDWIDTHS[-1]} (its version "
        "differences). The shortest is bold.",
        markdown(["", "links", "data parallelism", *(f"`{n}`" for n in SWEPT)], rows),
    ]


# Limits and clocks ------------------------------------------------------------------------------


def _staleness(found: Sequence[FoundCell]) -> list[str]:
    """`timeprest` at the papers' limits, by its figures' clock and at the smallest limits."""
    rows = []
    for each in found:
        kinds = {plan.name: plan for plan in each.study.plans if plan.variant == "timeprest"}
        own = kinds.get("timeprest")
        if own is None:
            continue
        third = [*each.levels.values()][-1]
        for name, plan in kinds.items():
            where = name.partition(", ")[2] or "the papers' limits"
            rows.append(
                [
                    _short_name(each.cell),
                    where,
                    str(plan.micro_batches),
                    " ".join(map(str, plan.in_flight)),
                    str(max(plan.version_differences)),
                    *(_overhead(each, plan, level) for level in each.levels.values()),
                    f"{plan.period_s / own.period_s:.2f}",
                    _times(each.seconds(name, third), each.seconds("timeprest", third)),
                ]
            )
    head = [
        "",
        "schedule",
        "N",
        "in flight",
        "updates late",
        "to the end",
        "⅔",
        "⅓",
        "period",
        "time",
    ]
    return [
        "## How late `timeprest` is, and by whose clock",
        _CLOCKS,
        markdown(head, rows),
    ]


_CLOCKS = f"""\
In the clock of its paper's figures a mini-batch's backward is as long as one micro-batch's forward.
By that clock ("{UNIT}" below) v = 1 from N = S − 1 on, as the paper says. Forwards are then 2
updates late at the most, and a mini-batch takes N + 1 slots, where PipeDream takes 2·N for as many
samples in N mini-batches of M / N: those are its shorter epochs.

Real backwards take twice as long as all N forwards. Then all micro-batches, or nearly all, are
S − 1 updates late at the papers' limits, whatever N is, and `timeprest` trains as
`pipedream-unstashed` does where no layer mixes samples. With {FEWEST} in flight all are one late.

Samples over plain training's; the period (in real times) and the time to ⅓ over those at the
papers' limits:"""


def _settings(found: Sequence[FoundCell]) -> list[str]:
    return [*_mini_batches(found), *_at_one_rate(found)]


def _mini_batches(found: Sequence[FoundCell]) -> list[str]:
    """PipeDream with mini-batches of M, and of M / N."""
    rows = []
    for each in found:
        own = [plan for plan in each.study.plans if plan.name.startswith("pipedream")]
        small = next((plan for plan in own if plan.name.endswith(PARTS)), None)
        if small is None:
            continue
        third = [*each.levels.values()][-1]
        whole = each.plan("pipedream")
        late = each.seconds("timeprest", third)
        for plan, size in ((whole, "M"), (small, PARTS)):
            time = each.seconds(plan.name, third)
            rows.append(
                [
                    _short_name(each.cell),
                    size,
                    *(_overhead(each, plan, level) for level in each.levels.values()),
                    f"{plan.period_s / whole.period_s:.2f}",
                    _times(time, each.seconds("pipedream", third)),
                    _times(late, time),
                ]
            )
    if not rows:
        return []
    head = ["", "mini-batch", "to the end", "⅔", "⅓", "time of M samples", "time"]
    return [
        "## PipeDream with mini-batches of M, and of M / N",
        "It knows no micro-batches: its mini-batch may be as large as the others', M, or one of "
        "their micro-batches, with N = 4 times as many updates. Samples over plain training's of "
        "mini-batches of M; predicted times of as many samples, and to ⅓, over those with M; and "
        "that of `timeprest` (mini-batches of M, the papers' limits) over its own.",
        markdown([*head, "`timeprest` over that"], rows),
    ]


_ONE_RATE = ("timeprest", "timeprest-stashed", "v-timeprest", "pipedream")


def _at_one_rate(found: Sequence[FoundCell]) -> list[str]:
    """Trials of two stages at the rates that plain training tried, too."""
    rows = []
    for each in found:
        arms = {arm.name: arm for arm in each.study.arms}
        if each.cell.devices > FEWEST or not arms.keys() >= {*_ONE_RATE}:
            continue
        half = each.study.question.steps // 2
        at_rates = [{c.rate: c for c in arms[n].curves if not c.seed} for n in (PLAIN, *_ONE_RATE)]
        for rate in sorted(at_rates[0]):
            curves = [of.get(rate) for of in at_rates]
            if all(curves[1:]):
                told = [_over_plain(curve, curves[0], half) for curve in curves[1:]]
                rows.append([_short_name(each.cell), f"{rate:g}", *told])
    if not rows:
        return []
    return [
        "## In mid-training, all at one rate",
        "The reproduction's finding is of one rate for all, and its systems are ahead in "
        "mid-training alone. So: samples to the loss that plain training has half-way at the same "
        "rate, over plain training's, in the trials of each rate (two stages, one seed); – is not "
        "reached.",
        markdown(["", "rate", *(f"`{name}`" for name in _ONE_RATE)], rows),
    ]


def _over_plain(curve: Curve | None, plain: Curve | None, mini_batches: int) -> str:
    assert curve is not None
    assert plain is not None
    own, its = (smoothed(points_of(each, "loss", 1)) for each in (curve, plain))
    level = value_at(its, mini_batches)
    if level is None:
        return "–"
    samples, of_plain = (samples_to(each, level, rises=False) for each in (own, its))
    return f"{samples / of_plain:.2f}" if samples and of_plain else "–"


def _times(time_s: float | None, own_s: float | None) -> str:
    return f"{time_s / own_s:.2f}" if time_s and own_s else "–"


def _overhead(each: FoundCell, plan: StudiedPlan, level: float) -> str:
    over = each.samples_over(plan.name, PLAIN, level)
    least = each.at_least(plan.name, PLAIN, level) if over is None else None
    return shown(over) if over else f"> {least:.2f}" if least else "–"


# A cell -----------------------------------------------------------------------------------------


def _cell(each: FoundCell) -> list[str]:
    rows = []
    third = list(each.levels.values())[-1]
    for plan in each.study.plans:
        trained = each.study.arm(plan.arm)
        accuracy = each.accuracy(plan.name)
        time = each.seconds(plan.name, third)
        rows.append(
            [
                _named(plan),
                str(plan.micro_batches),
                " ".join(map(str, plan.in_flight)),
                " ".join(map(str, plan.version_differences)),
                f"{trained.rate:g}{' !' if trained.at_edge else ''}",
                *(_overhead(each, plan, level) for level in each.levels.values()),
                format_seconds(plan.period_s),
                format_seconds(time) if time is not None else "–",
                f"{accuracy:.1%}" if accuracy is not None else "–",
                format_bytes(plan.memory_bytes),
            ]
        )
    asked, cell = each.study.question, each.cell
    told = each.results.recommendation
    first = f"**`{told.plan}`**" if told.plan else "None"
    head = ["system", "N", "in flight", "d", "rate", "samples × plain", "⅔", "⅓", "period"]
    head += ["time to ⅓", "accuracy", "memory"]
    levels = ", ".join(f"{level:.4g}{where}" for where, level in each.levels.items())
    return [
        f"## {cell.task.title}, S = {cell.devices}",
        f"Mini-batch {asked.mini_batch}, target: training loss {levels} of the {asked.steps} "
        f"mini-batches that plain training takes at rate {each.study.plain.rate:g}; "
        f"{_how_many_reach(each)}. {first} is first at the target: {told.why}.",
        markdown(head, rows),
    ]


def _how_many_reach(each: FoundCell) -> str:
    """Of the systems without a flush, at the papers' limits."""
    own = [n for n in each.plans.systems if not VARIANTS[n].flushes]
    missing = each.untrained(*own)
    reached = [
        sum(None not in each.samples(name, level) for name in own if name not in missing)
        for level in each.levels.values()
    ]
    told = f"of {len(own)} systems without a flush {', '.join(map(str, reached))} reach these"
    names = ", ".join(f"`{name}`" for name in missing)
    return f"{told} (not trained: {names})" if missing else told
