"""docs/benchmarks.md, made from the results, the text of benchmarks.head.md and the reasons of
benchmarks.reasons.toml; and a page for each model in the folder beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from timeprest.profiles.files import read_toml
from timeprest.profiles.units import format_bytes

from ...shared import around, markdown
from ..contestants import ALL
from ..machine.machine import machine
from ..machine.pace import LEAST
from ..tasks import MEMORY_RACES, RACES
from .bars import bars
from .goals import Goal, goals
from .records import DOCS, Results, held_of, read_results
from .tables import (
    fastest_table,
    held_table,
    link_table,
    speed_bars,
    speed_table,
    stage_by_stage,
    stage_table,
)

HEAD = DOCS / "benchmarks.head.md"
REASONS = DOCS / "benchmarks.reasons.toml"
"""Why goals are missed, by their keys; written by people."""


EQUAL = (
    "**At equal limits.** Four stages with the same cuts for all, those that the planner chose for "
    "`timeprest`; four micro-batches, and one in systems of whole mini-batches. *in flight*: so "
    "many mini-batches may be in flight at each stage. Here it is 4, 3, 2 and 1, PipeDream's own "
    "and the most that 1F1B can use; systems that flush have one, and `pipedream-2bw` two. Bytes "
    "as the runtime accounts for them at each stage's peak, added up; *predicted* is the plan's "
    "sum less that. *period predicted* is the plan's, for a device to each stage; nothing is "
    "timed. The goals are judged here."
)
OWN = (
    "**At limits of the planner's choice.** The planner looks for the shortest predicted period "
    "and takes other limits where they shorten it, or do as well with less: what that buys and "
    "costs against the same system at equal limits. Who isn't here has the same limits as above."
)


LINKS = (
    "Two hosts (network namespaces of one machine) joined by a wire of that speed in each "
    "direction, a process of one thread on each; ours planned for that wire. Bytes over the wire "
    "in both directions together, headers and the start of the run included for ours."
)


def write_page(results_path: Path, page: Path) -> None:
    """Write the page; each model's plots and tables go into the folder that has the page's name."""
    results = read_results(results_path, machine())
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    fastest = fastest_table(results.rounds)
    head = HEAD.read_text(encoding="utf-8").replace("{fastest}", fastest)
    parts = around(head, list(_sections(results, folder)))
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {page}", fastest, sep="\n")


def _sections(results: Results, folder: Path) -> Iterator[str]:
    yield _facts(results)
    judged = list(goals(results))
    if judged:
        yield "## Against the goals"
        yield markdown(
            ["", "wanted", "found", ""],
            (
                [goal.what, goal.wanted, goal.found, "reached" if goal.reached else "**missed**"]
                for goal in judged
            ),
        )
    yield from _missed(judged, read_toml(REASONS, "give a reason for each goal that is missed"))
    left_out = [[f"`{what}`", why] for what, why in sorted(results.skipped.items())]
    if left_out:
        yield "## Left out\n\n" + markdown(["model/contestant", "why"], left_out)
    yield "## Model by model"
    yield "\n".join(
        f"- [{title}]({folder.name}/{name})" for name, title in _model_pages(results, folder)
    )
    if results.links:
        yield "## Slow links: " + MEMORY_RACES["vgg16"].title
        yield LINKS
        yield link_table(results.links)


def _model_pages(results: Results, folder: Path) -> Iterator[tuple[str, str]]:
    """Writes each model's page. Gives their files' names and titles."""
    for model in [m for m in RACES if any(each.model == m for each in results.rounds)]:
        title = f"Speed: {RACES[model].title}"
        bars_path = folder / f"{model}.svg"
        bars_path.write_text(
            bars(f"{RACES[model].title}: speed over one thread", speed_bars(results.rounds, model))
        )
        parts = [
            f"![speed over one thread]({bars_path.name})",
            speed_table(results.rounds, model),
            "What the processes did, shares of a mini-batch's period, process by process:",
            stage_table(results.rounds, model),
        ]
        yield _model_page(folder, model, title, parts)
    for model in dict.fromkeys(each.model for each in results.held):
        title = f"What systems hold: {MEMORY_RACES[model].title}"
        yield _model_page(folder, f"{model}_held", title, _held(results, model))


def _model_page(folder: Path, name: str, title: str, parts: Iterable[str]) -> tuple[str, str]:
    texts = [f"# {title}", f"How it was measured: [{folder.name}](../{folder.name}.md).", *parts]
    (folder / f"{name}.md").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return f"{name}.md", title


def _held(results: Results, model: str) -> Iterator[str]:
    equal = held_of(results.held, model, equal_limits=True)
    own = held_of(results.held, model, equal_limits=False)
    if equal:
        yield EQUAL
        base = equal.get("pipedream")
        yield held_table(equal.values(), dict.fromkeys(equal, base) if base else {}, "pipedream")
        if base and "timeprest" in equal:
            yield stage_by_stage(equal["timeprest"], base)
    if own:
        yield OWN
        yield held_table(own.values(), equal, "at equal limits")


def _missed(judged: list[Goal], reasons: Mapping[str, str]) -> Iterator[str]:
    """Goals that are missed, each with its reason."""
    missed = [goal for goal in judged if not goal.reached]
    if missed:
        yield "Missed, and why:"
        yield "\n".join(
            f"- {goal.what}: {reasons.get(goal.key, 'not understood yet')}" for goal in missed
        )
    unknown = [goal.key for goal in missed if goal.key not in reasons]
    if unknown:
        print(f"missed, without a reason in {REASONS.name}: {', '.join(unknown)}")


def _facts(results: Results) -> str:
    here = results.machine
    versions = ", ".join(f"{name} {number}" for name, number in here.versions.items())
    thrown = sum(each.thrown_away for each in results.rounds)
    runs = sum(len(each.runs) for each in results.rounds)
    slow = sum(
        r.pace is not None and r.pace < LEAST for o in results.rounds for r in o.runs.values()
    )
    rough = (
        f" {slow} of the runs were made while the machine was at less than {LEAST:.0%} of its best "
        "pace: those figures are rough."
    )
    missing = missing_from(results)
    return (
        f"Pipelines of {results.stages} stages, a process of one thread for each, on the CPU ([on "
        f"a GPU](gpu.md#races)). Measured on {here.processor}, {here.cores} cores, "
        f"{format_bytes(here.memory_bytes)}, {here.system}; {versions}. "
        f"{runs} runs in {len(results.rounds)} rounds are in the "
        f"tables; {thrown} more were thrown away because others were computing meanwhile, or the "
        "machine was slow."
        + (rough if slow else "")
        + (f"\n\nNot raced so far: {'; '.join(missing)}." if missing else "")
    )


def missing_from(results: Results) -> list[str]:
    """Who hasn't been raced on which model, for people."""
    found = []
    for model in RACES:
        raced = {name for each in results.rounds if each.model == model for name in each.runs}
        known = {what.partition("/")[2] for what in results.skipped if what.startswith(f"{model}/")}
        left = [name for name in ALL if name not in raced | known]
        if left:
            found.append(f"{model}: {', '.join(left)}" if raced else f"{model}, with anybody")
    return found
