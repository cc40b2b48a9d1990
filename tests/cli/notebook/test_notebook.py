"""The notebook of the docs runs from top to bottom, and shows what it says."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import nbformat
import pytest
from helpers.output.notebooks import executed, outputs
from helpers.paths import ROOT

NOTEBOOK = ROOT / "docs" / "examples" / "first_steps.ipynb"
SVG = "{http://www.w3.org/2000/svg}"


def shown(text):
    """Title, rows of the table, and words of the figure."""
    root = ElementTree.fromstring(text)
    rows = [["".join(c.itertext()) for c in row] for row in root.iter("tr")]
    return root.find("b").text, rows, [t.text for t in root.iter(f"{SVG}text")]


def check_outputs(found):
    """Raise AssertionError unless these are the outputs that the notebook is to have."""
    assert [kind for kind, _ in found] == [*["execute_result"] * 6, "stream"]
    *results, printed = [data for _, data in found]
    profile, plan, plans, run, runs = (shown(data["text/html"]) for data in results[:5])
    assert profile[0] == "session:Task: 7 layers"
    assert [row[1] for row in profile[1][1:]] == [*["Linear", "ReLU"] * 3, "Linear"]
    assert plan[0].startswith("timeprest: 2 stages on 2 devices, mini-batch of 64 in 4 micro")
    assert {"stage 0", "stage 1", "time (ms)"} <= set(plan[2])
    systems = ["timeprest", "pipedream", "gpipe"]
    assert [row[0] for row in plans[1][1:]] == systems
    # One above the other.
    assert [words for words in plans[2] if words in systems] == systems
    assert run[0] == "timeprest: session:Task with timeprest"
    assert {"measured", "predicted"} <= set(run[2])
    losses = [float(row[3]) for row in run[1][1:]]
    assert losses[-1] < losses[0]
    assert [row[0] for row in runs[1][1:]] == systems
    assert [words for words in runs[2] if words in systems] == systems
    # Each has learned: a guess is right in a quarter of the cases.
    assert all(float(row[-1]) > 0.5 for row in runs[1][1:])
    assert results[5]["text/plain"] == "'same'"
    one, other = re.findall(r"\d\.\d+", printed["text/plain"])
    assert one == other


@pytest.mark.choice(0)
@pytest.mark.slow
@pytest.mark.processes
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    check_outputs(outputs(executed(NOTEBOOK, tmp_path)))


def test_the_notebook_is_stored_with_small_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    check_outputs(outputs(notebook))
    assert NOTEBOOK.stat().st_size < 200_000
    text = NOTEBOOK.read_text("utf-8")
    assert not re.search(r"/(tmp|home|root|work)/", text)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
