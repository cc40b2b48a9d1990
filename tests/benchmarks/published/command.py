"""tp-plan published: a published planner's workload, cut under its authors' own cost model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text
from timeprest.cli.errors import errors_as_lines, output, print_json
from timeprest.cli.options import common_options
from timeprest.cli.options.command import GroupedCommand, examples, group
from timeprest.cli.options.fields import options_of
from timeprest.cli.options.values import FileName, Number, Whole
from timeprest.cli.progress import Bar
from timeprest.cli.tables.layout import compact_table, counted, first_to_last
from timeprest.planner.partition.problem import StageProblem, members, stage_bytes, stage_load
from timeprest.planner.search.request import PlanRequest
from timeprest.profiles.errors import InfeasibleError
from timeprest.profiles.files import MAX_FACTOR
from timeprest.profiles.units import format_bytes, format_seconds, parse_bandwidth, parse_memory
from timeprest.tests.benchmarks.published.cost_models import COST_MODELS, problem_of
from timeprest.tests.benchmarks.published.cut import CutAnswer, solve_cut
from timeprest.tests.benchmarks.published.reader import read_workload

if TYPE_CHECKING:
    from timeprest.tests.benchmarks.published.non_contiguous import NoncontiguousAnswer


@click.command(
    cls=GroupedCommand,
    epilog=examples(
        "tp-plan published graph.txt --devices 4",
        "tp-plan published workload.json --solver ilp --time-limit 300",
    ),
)
@click.argument("path", type=FileName(), metavar="FILE")
@group(
    "Costs",
    click.option(
        "--cost-model",
        type=click.Choice(list(COST_MODELS)),
        help="[default: the one the file is for]",
    ),
    click.option("--devices", type=Whole(), help="How many.  [default: the file's own]"),
    click.option("--memory", help="Of each device.  [default: the file's own]"),
    click.option("--bandwidth", help="Between devices.  [default: the file's own]"),
    click.option(
        "--micro-batches", type=Whole(), help="In a mini-batch.  [default: the file's own]"
    ),
    click.option(
        "--transfer-scale",
        type=Number(0, MAX_FACTOR),
        default=1.0,
        help="Multiply the times of transfers.",
    ),
)
@group(
    "Cuts",
    *(
        click.option(f"--{name}", type=click.Choice(["auto", "off"]), default="auto", help=text)
        for name, text in (
            ("replicas", "Stages may take several devices, or not."),
            ("recompute", "Stages may recompute activations, or not."),
        )
    ),
    click.option(
        "--non-contiguous",
        is_flag=True,
        help="Let a device hold several stretches of the model too (by the ILP).",
    ),
)
@options_of(PlanRequest, only=("solver", "time_limit_s"))
@common_options
@errors_as_lines
def published(
    path: str,
    memory: str | None,
    bandwidth: str | None,
    solver: str,
    non_contiguous: bool,
    time_limit_s: float,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **asked: Any,
) -> None:
    """Cut FILE, a workload that a planner's authors published, under their own cost model.

    FILE is PipeDream's graph.txt, or a JSON workload of the NeurIPS'20 or NeurIPS'21 planner. To
    plan it for our own systems, import it with tp-profile and use tp-plan solve.
    """
    for name in ("replicas", "recompute"):
        asked[name] = asked[name] == "auto"
    problem = problem_of(
        read_workload(path),
        asked.pop("cost_model"),
        bandwidth_bytes_per_s=parse_bandwidth(bandwidth) if bandwidth else None,
        memory_bytes=parse_memory(memory, "--memory") if memory else None,
        **asked,
    )
    with Bar("planning", quiet=quiet) as bar:

        def tell(bound_s: float, best_s: float) -> None:
            bar(f"bound {format_seconds(bound_s)}, best {format_seconds(best_s)}", 0, 0)

        answer = solve_cut(problem, solver=solver, time_limit_s=time_limit_s, progress=tell)
        if answer.cut is None:
            raise InfeasibleError(
                f"{path}: no cut fits the devices' memory; raise --memory or --devices"
                if answer.optimal
                else f"{path}: no cut found in time; raise --time-limit"
            )
        scattered = None
        if non_contiguous:
            from timeprest.tests.benchmarks.published.non_contiguous import solve_noncontiguous

            scattered = solve_noncontiguous(problem, warm=answer.cut, time_limit_s=time_limit_s)
    if as_json:
        found = _json(problem, answer)
        if scattered:
            found["non_contiguous"] = {
                "objective_s": scattered.objective_s,
                "bound_s": scattered.bound_s,
                "optimal": scattered.optimal,
                "devices": [
                    [problem.names[j] for j in members(mask)] for mask in scattered.devices or ()
                ],
            }
        print_json(found)
        return
    if quiet:
        return
    console = output()
    console.print(_table(problem, answer))
    console.print(_verdict(answer))
    if scattered:
        told = _scattered(problem, answer, scattered)
        console.print(f"with several stretches on a device: {told}", soft_wrap=True)


def _rows(problem: StageProblem, answer: CutAnswer) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    below = 0
    assert answer.cut is not None
    for stage in answer.cut.stages:
        option = problem.options[stage.option]
        rows.append(
            {
                "nodes": [problem.names[j] for j in members(stage.layers)],
                "replicas": option.replicas,
                "mode": problem.modes[option.mode].name,
                "load_s": stage_load(problem, below, stage.layers, stage.option, stage.k),
                "memory_bytes": round(
                    stage_bytes(problem, below, stage.layers, stage.option, stage.k)
                ),
            }
        )
        below |= stage.layers
    return rows


def _json(problem: StageProblem, answer: CutAnswer) -> dict[str, object]:
    return {
        "objective_s": answer.objective_s,
        "bound_s": answer.bound_s,
        "gap": answer.gap,
        "optimal": answer.optimal,
        "method": answer.method,
        "downsets": answer.downsets,
        "seconds": answer.seconds,
        "stages": _rows(problem, answer),
    }


def _table(problem: StageProblem, answer: CutAnswer) -> Table:
    rows = _rows(problem, answer)
    table = compact_table(
        f"{counted(len(rows), 'stage')} of {counted(problem.layers, 'layer')}",
        ["stage", "layers", "mode"],
        ["devices", "load", "memory"],
    )
    for s, row in enumerate(rows):
        nodes = row["nodes"]
        assert isinstance(nodes, list)
        assert isinstance(row["memory_bytes"], int)
        table.add_row(
            str(s),
            first_to_last(nodes),
            str(row["mode"]),
            str(row["replicas"]),
            _time(row["load_s"]),
            format_bytes(row["memory_bytes"]),
        )
    return table


def _verdict(answer: CutAnswer) -> Text:
    if answer.optimal:
        proof = "proven optimal"
    else:
        proof = f"lower bound {_time(answer.bound_s)}, gap {answer.gap:.1%}"
    places = "" if answer.downsets is None else f", {answer.downsets} downsets"
    return Text(
        f"objective {_time(answer.objective_s)}; {answer.method}: {proof}{places}, in "
        f"{format_seconds(answer.seconds)}"
    )


def _scattered(problem: StageProblem, answer: CutAnswer, scattered: NoncontiguousAnswer) -> str:
    """How the best assignment compares with the cut."""
    if scattered.devices is None:
        if scattered.optimal:
            return "none fits the devices' memory"
        return "none found in time; raise --time-limit"
    proof = "proven optimal" if scattered.optimal else f"bound {_time(scattered.bound_s)}"
    found = f"{_time(scattered.objective_s)} ({proof})"
    assert answer.cut is not None
    if any(problem.options[stage.option].replicas > 1 for stage in answer.cut.stages):
        return f"{found}, without replicas; to compare a cut without them: --replicas off"
    ratio = scattered.objective_s / answer.objective_s if answer.objective_s else 1.0
    return f"{found}, {1 - ratio:.1%} shorter"


def _time(seconds: object) -> str:
    """Six digits: published objectives are compared by them."""
    assert isinstance(seconds, float)
    return f"{seconds * 1e3:.6g} ms"
