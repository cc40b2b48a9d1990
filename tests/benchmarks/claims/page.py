"""docs/claims.md: what was studied, the claims beside what was found, and the recommendations; and
a page for each task beside its studies, with the figures of every system.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from timeprest.profiles.files import write_bytes
from timeprest.profiles.units import format_bytes, format_seconds
from timeprest.runtime.study.figures.results import results_of
from timeprest.runtime.study.figures.study import PLAIN, read_study

from ..shared import around, markdown
from .claims import CLAIMS, FoundCell, Outcome, Verdict, shown
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
                    read_study(full),
                    read_study(short) if short.exists() else None,
                    read_plans(plans_path(cell, studies)),
                )
            )
    return found


def write_page(studies: Path, page: Path, effort: Effort = FULL) -> None:
    """Make the page of the studies there are, and each task's in the folder that has the page's
    name. Raises FileError."""
    found = found_cells(studies, effort)
    parts = [_missing(found)]
    if found:
        parts += [*_claims(found), *_recommendations(found), *_bandwidths(found)]
        folder, by_task = page.with_suffix(""), _by_task(found)
        folder.mkdir(parents=True, exist_ok=True)
        links = [
            f"[{each[0].cell.task.title}]({folder.name}/{n}.md)" for n, each in by_task.items()
        ]
        parts.append(f"## Every system's figures\n\n{', '.join(links)}.")
        for name, cells_of_task in by_task.items():
            texts = [f"# {cells_of_task[0].cell.task.title}", f"Of [claims](../{page.name})."]
            _write(folder / f"{name}.md", [*texts, *(t for c in cells_of_task for t in _cell(c))])
    _write(page, around(HEAD.read_text(encoding="utf-8"), parts))


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
        [str(k), claim.source, claim.text, f"**{verdict(found, verdicts)}**"]
        for k, (claim, verdicts) in enumerate(judged, 1)
    ]
    names = [_short_name(each.cell) for each in found]
    details = [
        [str(k), claim.figure, *(_marked(each) for each in verdicts)]
        for k, (claim, verdicts) in enumerate(judged, 1)
    ]
    return [
        "## The claims, and what was found",
        _so_far(len(found)),
        markdown(["", "source", "claim", "found"], rows),
        "What that is made of: the figure of each cell. ✓ on the claim's side, ✗ against it, = "
        "equal within the seeds' spread, ? not known.",
        markdown(["", "figure", *names], details),
    ]


def _so_far(studied: int) -> str:
    count = len(cells("all", "all"))
    return f"**Of {studied} of {count} cells so far**, and of no others." if studied < count else ""


def _short_name(cell: Cell) -> str:
    return f"{cell.task.name}, S = {cell.devices}"


_MARKS = {"yes": "✓", "no": "✗", "equal": "=", "unknown": "?"}


def _marked(verdict: Verdict) -> str:
    return f"{_MARKS[verdict.outcome]} {verdict.figure}"


_SHORTFALLS: tuple[tuple[Outcome, str], ...] = (
    ("no", "doesn't"),
    ("equal", "equal"),
    ("unknown", "not known"),
)


def verdict(found: Sequence[FoundCell], verdicts: Sequence[Verdict]) -> str:
    """ "holds", "doesn't hold" or "holds where", over all cells."""
    where = [
        _short_name(each.cell)
        for each, one in zip(found, verdicts, strict=True)
        if one.outcome == "yes"
    ]
    counts = Counter(one.outcome for one in verdicts)
    if counts["yes"] == len(verdicts):
        return "holds"
    rest = [f"{text} in {counts[outcome]}" for outcome, text in _SHORTFALLS if counts[outcome]]
    if not where:
        return (
            f"doesn't hold ({'; '.join(rest)})"
            if counts["no"]
            else f"not shown ({'; '.join(rest)})"
        )
    return f"holds where: {'; '.join(where)} ({'; '.join(rest)})"


# Recommendations --------------------------------------------------------------------------------


def _recommendations(found: Sequence[FoundCell]) -> list[str]:
    rows, good, said, none = [], 0, 0, 0
    short = [each for each in found if each.short is not None]
    for each in short:
        assert each.short is not None
        told = results_of(each.short).recommendation
        truth = {p.plan: p.time_s.mean for p in each.results.plans if p.time_s is not None}
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
    for each in found:
        plain = each.reckoning.plain_samples
        if plain is None:
            continue
        for bandwidth in BANDWIDTHS:
            times = {"data parallelism": each.plans.parallel_periods_s[bandwidth]}
            for name in SWEPT:
                over = each.samples_over(name, PLAIN)
                if over is not None:
                    times[name] = over.mean * each.plans.systems[name].periods_s[bandwidth]
            scale, first = plain / each.cell.task.mini_batch, min(times, key=times.__getitem__)
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
        "Predicted time to the target, planned anew for each bandwidth; samples are those of the "
        f"study at {BANDWIDTHS[-1]} (its version differences). The shortest is bold.",
        markdown(["", "links", "data parallelism", *(f"`{n}`" for n in SWEPT)], rows),
    ]


# A cell -----------------------------------------------------------------------------------------


def _cell(each: FoundCell) -> list[str]:
    rows = []
    for plan in each.study.plans:
        result, arm = each.results.plan(plan.name), each.results.arm(plan.arm)
        trained = each.study.arm(plan.arm)
        accuracy = each.accuracy(plan.variant)
        system = each.plans.systems[plan.variant]
        rows.append(
            [
                f"`{plan.variant}`",
                str(plan.micro_batches),
                f"{trained.rate:g}{' !' if trained.at_edge else ''}",
                shown(arm.overhead) if arm.overhead else _not_reached(arm.reached, arm.diverged),
                format_seconds(plan.period_s),
                format_seconds(result.time_s.mean) if result.time_s else "–",
                f"{accuracy:.1%}" if accuracy is not None else "–",
                format_bytes(plan.memory_bytes),
                " ".join(map(str, system.versions)),
                " ".join(map(str, system.differences)),
            ]
        )
    asked, cell = each.study.question, each.cell
    told = each.results.recommendation
    first = f"**`{told.plan}`**" if told.plan else "None"
    head = ["system", "N", "rate", "samples × plain", "period", "time to target", "accuracy"]
    head += ["memory", "versions", "differences"]
    return [
        f"## {cell.task.title}, S = {cell.devices}",
        f"Mini-batch {asked.mini_batch}, target: training loss {each.reckoning.target:.4g}, which "
        f"plain training reaches after {asked.steps} mini-batches at rate "
        f"{each.study.plain.rate:g}; all train {asked.length}. {first} is first: {told.why}.",
        markdown(head, rows),
    ]


def _not_reached(reached: int, diverged: int) -> str:
    return f"not reached ({reached} seeds did{f', {diverged} diverged' if diverged else ''})"
