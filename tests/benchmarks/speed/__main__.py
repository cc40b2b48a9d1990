"""Races pipelines: ``python -m timeprest.tests.benchmarks.speed`` (`make bench`).

Adds to the results there are, and makes the page anew from all of them.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import click
from timeprest.profiles.errors import TimeprestError, UserError

from .contestants import ALL, BASE, Contestant, contestant_named
from .machine.machine import machine
from .machine.pace import LEAST
from .machine.quiet import MOST
from .racing.rivals import Length
from .report.page import write_page
from .report.records import DOCS, add_rounds, read_results
from .report.tables import speed_table, stage_table
from .rounds import Racer, Settings
from .tasks import ALL_RACES, GPU_RACES, RACES

BESIDE = (
    *("gpipe@4", "pipedream-flush@4", "tdp-gpipe@4", "tdp-1f1b@4"),
    *("timeprest+2", "pipedream+2", "zb-v=tdp-zbv"),
)
"""Raced beside the best of each: the same schedules with as many micro-batches, or with the same
cuts too; and systems with two stages on each device."""


def contestants_of(text: str) -> list[Contestant]:
    """Those of a list with commas, and the one that all are held against. Raises UserError."""
    names = [*ALL, *BESIDE] if text == "all" else [BASE, *text.split(",")]
    return [contestant_named(name) for name in dict.fromkeys(names)]


def models_of(text: str, device: str) -> list[str]:
    """Those of a list with commas. Raises UserError."""
    every = GPU_RACES if device == "cuda" else RACES
    names = list(every) if text == "all" else text.split(",")
    for name in names:
        if name not in ALL_RACES:
            raise UserError(f"model {name!r}: choose of {', '.join(ALL_RACES)}")
    return names


@click.command()
@click.option("--models", default="all", show_default=True, help=", ".join(ALL_RACES))
@click.option("--contestants", default="all", show_default=True, help=", ".join(ALL))
@click.option(
    "--stages",
    type=click.IntRange(2, 64),
    default=2,
    show_default=True,
    help="A process of one thread for each; there should be as many cores.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="cuda: all processes share the first GPU.",
)
@click.option("--rounds", default=5, show_default=True)
@click.option("--warm", default=3, show_default=True, help="Mini-batches before the clock runs.")
@click.option("--timed", default=10, show_default=True, help="Mini-batches after that.")
@click.option("--profile-seconds", default=15.0, show_default=True)
@click.option("--at-most", default=1e9, help="Seconds; no round begins after that.")
@click.option("--work", default="runs/bench", show_default=True, help="For profiles and plans.")
@click.option("--fresh", is_flag=True, help="Forget the profiles, plans and results there are.")
@click.option("--no-search", is_flag=True, help="Rivals take balanced cuts and torch's defaults.")
@click.option("--prepare", is_flag=True, help="Profile, plan and look for settings alone.")
@click.option(
    "--patience",
    type=click.FloatRange(0),
    help="Seconds to wait for a steady machine before each run; then run all the same, and say so.",
)
@click.option("--noisy", is_flag=True, help="Take what comes, to try things out: no figures.")
@click.option("--results", default=str(DOCS / "benchmarks" / "races.json"))
@click.option("--page", default=str(DOCS / "benchmarks.md"))
def main(
    models: str,
    contestants: str,
    stages: int,
    device: str,
    rounds: int,
    warm: int,
    timed: int,
    profile_seconds: float,
    at_most: float,
    work: str,
    fresh: bool,
    no_search: bool,
    prepare: bool,
    patience: float | None,
    noisy: bool,
    results: str,
    page: str,
) -> None:
    """Race contestants on models in interleaved rounds, a line for each run."""
    if fresh:
        shutil.rmtree(work, ignore_errors=True)
        Path(results).unlink(missing_ok=True)
    settings = Settings(
        folder=Path(work).absolute() / f"{stages}-stages",
        rounds=0 if prepare else rounds,
        length=Length(warm, timed),
        until=time.monotonic() + at_most,
        profile_s=profile_seconds,
        search=not no_search,
        most_foreign=1.0 if noisy else MOST,
        least_pace=0.0 if noisy else LEAST,
        patience_s=patience,
    )
    racer = Racer(settings, lambda text: print(text, flush=True))
    try:
        # Those of another number of stages aren't mixed with.
        read_results(Path(results), machine(), stages)
        asked = [contestant.on(stages, device) for contestant in contestants_of(contestants)]
        for model in models_of(models, device):
            able = racer.prepare(model, asked)
            found = racer.rounds(model, able)
            add_rounds(Path(results), found, racer.skipped, stages)
            if device == "cuda":
                # docs/gpu.md is written by people.
                print(speed_table(found, model), stage_table(found, model), sep="\n\n")
        if device == "cpu":
            write_page(Path(results), Path(page))
    except TimeprestError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        racer.close()


if __name__ == "__main__":
    main()
