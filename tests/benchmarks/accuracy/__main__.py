"""Predicts measured runs, and says how far off it was: `make accuracy SAILOR=folder`.

Prints a row for each run of the folder; with `--page` writes docs/accuracy.md besides.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from timeprest.profiles.errors import TimeprestError

from .calibrate import Calibration
from .page import by_run, doubted, halves, judged, page, summary
from .sailor import read_runs, read_tables


@click.command()
@click.option("--sailor", required=True, help="A folder with runs in Sailor's format, and tables.")
@click.option("--fit", help="A folder with runs to find figures by; else the others of --sailor.")
@click.option("--page", "target", help="Where to write the page.")
def main(sailor: str, fit: str | None, target: str | None) -> None:
    """Predict every run of a folder as `tp-plan simulate --engine deepspeed` does."""
    try:
        folders = [Path(folder) for folder in (sailor, fit) if folder]
        tables = read_tables(*folders)
        (runs, lines), *others = (read_runs(folder, tables) for folder in folders)
        calibration = Calibration(tables, runs, others[0][0] if others else ())
        found, drawn = list(judged(calibration)), halves(calibration)
    except TimeprestError as error:
        print(f"accuracy: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    lines += [line for _, more in others for line in more]
    print("\n\n".join(filter(None, (by_run(found), doubted(found), summary(found, drawn), *lines))))
    if target:
        Path(target).write_text(page(found, drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
