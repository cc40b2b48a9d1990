"""Predicts measured runs, and says how far off it was: `make accuracy SAILOR=folder`.

Prints a row for each run of the folder; with `--page` writes docs/accuracy.md besides.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from timeprest.profiles.errors import TimeprestError

from .calibrate import Calibration
from .page import by_run, doubted, judged, page, summary
from .sailor import read_runs, read_tables, reckoned_by


@click.command()
@click.option("--sailor", required=True, help="A folder with runs in Sailor's format, and tables.")
@click.option("--fit", help="A folder with runs to find figures by; else the others of --sailor.")
@click.option("--page", "target", help="Where to write the page.")
def main(sailor: str, fit: str | None, target: str | None) -> None:
    """Predict every run of a folder as `tp-plan simulate --engine deepspeed` does."""
    try:
        folder = Path(sailor)
        tables = read_tables(folder)
        others = read_runs(Path(fit), tables) if fit else []
        runs = read_runs(folder, tables)
        known, unknown = reckoned_by(tables, runs)
        found = list(judged(Calibration(tables, known, reckoned_by(tables, others)[0])))
    except TimeprestError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print("\n\n".join((by_run(found), doubted(found), summary(found), *unknown)))
    if target:
        Path(target).write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
