"""Where a study goes: its file, a page, and tables on the terminal."""

from __future__ import annotations

from pathlib import Path

from ....cli.errors import output, print_json
from ....profiles.files import Kind, check_outputs
from ..figures.results import results_of
from ..figures.study import Study, write_study
from .tables import dropped_table, level_table, study_lines, study_table


class StudyOutputs:
    """The files of a study.

    Attributes:
        study: its own.
        page: None: there is to be none.
    """

    def __init__(self, path: str) -> None:
        """`path`: of the study, or of the page that is beside it. Raises UserError, FileError."""
        given = Path(path)
        has_page = given.suffix.lower() in (".html", ".htm")
        self.study = given.with_suffix(".json") if has_page else given
        self.page = given if has_page else None
        check_outputs(("-o", self.study, Kind.STUDY), ("-o", self.page, Kind.PAGE))

    def write(self, found: Study) -> None:
        """Write them. Raises FileError."""
        write_study(self.study, found)
        if self.page is not None:
            from .page import study_page

            study_page(found, self.page)

    def show(self, found: Study, *, as_json: bool, quiet: bool, verbose: bool) -> None:
        """Print the study, and where it has been written."""
        results = results_of(found)
        if as_json:
            print_json({"study": found, "results": results})
        if as_json or quiet:
            return
        console = output()
        console.print(study_table(found, results, console.width))
        if found.dropped:
            console.print(dropped_table(found, results, console.width))
        if len(found.arms) > 1:
            console.print(level_table(results, console.width))
        for line in study_lines(found, results, verbose=verbose):
            console.print(line)
        console.print(f"wrote {self.study}{f' and {self.page}' if self.page is not None else ''}")
