"""Studies what the papers claim, and writes docs/claims.md: `make claims`, `make claims-quick`.

It may be stopped and goes on; with `--page-only` the page alone is made, of the studies there are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from timeprest.profiles.errors import TimeprestError

from .further import write_further
from .originals import study_originals
from .page import write_page
from .plans import plans_path, record, write_plans
from .studies import FULL, QUICK, SHORT, STUDIES, cells, studied


@click.command()
@click.option("--tasks", default="all", show_default=True, help="plain, characters, normed")
@click.option("--devices", default="all", show_default=True, help="2, 4, 8")
@click.option("--quick", is_flag=True, help="A twentieth of the training, to try things out.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True)
@click.option("--work", default="runs/claims", show_default=True, help="For plans and trainings.")
@click.option("--studies", default=str(STUDIES), help="Where studies are kept.")
@click.option("--page", default=str(STUDIES.parent / "claims.md"))
@click.option("--page-only", is_flag=True)
def main(
    tasks: str,
    devices: str,
    quick: bool,
    jobs: int,
    work: str,
    studies: str,
    page: str,
    page_only: bool,
) -> None:
    """Study the claims' cells, short and at full length, and write the page."""
    try:
        for cell in () if page_only else cells(tasks, devices):
            write_plans(plans_path(cell, Path(studies)), record(cell, Path(work), jobs))
            for effort in (QUICK,) if quick else (SHORT, FULL):
                studied(cell, effort, Path(work), Path(studies), jobs)
            if not quick:
                write_further(cell, Path(work), Path(studies))
        if tasks == devices == "all" and not (quick or page_only):
            study_originals(Path(work), Path(studies), jobs)
        print(write_page(Path(studies), Path(page), QUICK if quick else FULL))
    except TimeprestError as error:
        print(f"claims: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
